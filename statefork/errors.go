package statefork

import "errors"

// hinted is an error together with what the user can do about it.
type hinted struct {
	err  error
	hint string
}

func (e *hinted) Error() string { return e.err.Error() }

func (e *hinted) Unwrap() error { return e.err }

// WithHint adds to err what the user can do about it, as one lower-case clause.
// The message and the class of err stay as they are; nil stays nil.
func WithHint(err error, hint string) error {
	if err == nil {
		return nil
	}
	return &hinted{err, hint}
}

// Hint returns the outermost hint in err, or nothing.
func Hint(err error) string {
	if h, ok := errors.AsType[*hinted](err); ok {
		return h.hint
	}
	return ""
}
