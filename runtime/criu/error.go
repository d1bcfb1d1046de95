package criu

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// maxSummary bounds a summary, in bytes.
	maxSummary = 300
	// maxLogTail is how much of a log's end is read for its errors.
	maxLogTail = 1 << 20
)

// Error is a dump or restore that failed.
type Error struct {
	// Op is "dump", "restore" or "check".
	Op string
	// Summary is what CRIU's log says of the cause, on one line.
	Summary string
	// Log is the path of CRIU's log; empty if there is none.
	Log string
	// Err is of an errdefs class: FailedPrecondition if CRIU refuses something
	// in the tree, and the state of the tree would have to change; NotFound if
	// the tree is gone; AlreadyExists if a pid is taken; else Internal.
	Err error
}

// Error describes the failure and says where to read on.
func (e *Error) Error() string {
	s := "criu " + e.Op + ": " + e.Summary
	if e.Log != "" {
		s += "; log: " + e.Log
	}
	return s
}

// Unwrap returns the class.
func (e *Error) Unwrap() error {
	return e.Err
}

// refusals are the beginnings or parts of the errors by which CRIU says that it
// cannot dump something, rather than that something broke.
var refusals = regexp.MustCompile(`TODO`)

// logLine matches an error in a log: time, pid of the restored task, source.
var logLine = regexp.MustCompile(`^\(\d+\.\d+\)\s+(?:\d+:\s+)?Error \([^)]*\):\s*(.*)$`)

// harmless matches errors that do not make CRIU fail.
var harmless = regexp.MustCompile(`^rlimit: Can't setup RLIMIT_NOFILE`)

// newError explains a request that CRIU answered with a failure.
func newError(c *call, errno int32, message string) error {
	summary, class := "", errdefs.ErrInternal
	if f, err := openTail(c.log); err == nil {
		s, refused := summarize(f)
		f.Close()
		summary = s
		if refused {
			return &Error{Op: c.op, Summary: summary, Log: c.log, Err: errdefs.ErrFailedPrecondition}
		}
	}
	e := &Error{Op: c.op, Summary: summary, Log: c.log, Err: class}
	return e.withErrno(errno, message)
}

func (e *Error) withErrno(errno int32, message string) *Error {
	switch unix.Errno(errno) {
	case unix.ESRCH:
		e.Err = errdefs.ErrNotFound
	case unix.EEXIST:
		e.Err = errdefs.ErrAlreadyExists
	}
	if e.Summary == "" {
		e.Summary = orElse(message, "failed without a reason")
	}
	return e
}

// brokenError explains a request to which no proper answer came.
func brokenError(c *call, err error, printed string) error {
	summary := err.Error()
	if last := strings.TrimSpace(printed); last != "" {
		summary += ": " + cut(last[strings.LastIndexByte(last, '\n')+1:])
	}
	if _, serr := os.Stat(c.log); errors.Is(serr, os.ErrNotExist) {
		return &Error{Op: c.op, Summary: summary, Err: err}
	}
	return &Error{Op: c.op, Summary: summary, Log: c.log, Err: err}
}

// openTail opens a log at the place from which on it is read.
func openTail(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	st, err := f.Stat()
	if err == nil && st.Size() > maxLogTail {
		_, err = f.Seek(-maxLogTail, io.SeekEnd)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// summarize joins the errors of a log, beginning with the first that matters:
// it names the cause, and those that follow name what failed for it.
func summarize(log io.Reader) (summary string, refused bool) {
	var errs []string
	scan := bufio.NewScanner(log)
	for scan.Scan() {
		m := logLine.FindStringSubmatch(scan.Text())
		if m == nil || harmless.MatchString(m[1]) {
			continue
		}
		errs = append(errs, m[1])
	}
	for _, e := range errs {
		refused = refused || refusals.MatchString(e)
	}
	return cut(strings.Join(errs, "; ")), refused
}

// cut shortens s to what a summary may hold.
func cut(s string) string {
	if len(s) <= maxSummary {
		return s
	}
	return strings.ToValidUTF8(s[:maxSummary-3], "") + "..."
}
