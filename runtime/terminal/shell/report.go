package shell

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// The first field of a report, and what the last one has before its token.
const (
	begin = "sf1"
	end   = "end."
)

// MaxReport bounds the bytes of one report. The kernel bounds an environment
// by a quarter of the stack limit, which is 2 MiB by default.
const MaxReport = 8 << 20

// State is what a shell has reported when it was done with a step.
type State struct {
	// Status is $?: 0 to 255, 128+n for a command that signal n ended.
	Status int
	// Flags are the options that $- has.
	Flags string
	// Dir is the shell's idea of its working directory, $PWD.
	Dir string
	// Umask is the file mode mask in octal.
	Umask string
	// Exports is text that sets the exported variables when evaluated.
	Exports string

	traps   string
	prompts []string
	found   string // the answer to Probe
}

// defaultPrompts is what bash says of prompts that nobody has set.
const defaultPrompts = "declare -- PS1=\"\"\ndeclare -- PS2=\"\"\n"

// restore is text that gives back what report has taken away, or nothing.
func (s *State) restore(d Dialect) string {
	var b strings.Builder
	if d == Bash {
		if len(s.prompts) == 1 && s.prompts[0] != defaultPrompts {
			// One that is readonly still has its value.
			b.WriteString("{ " + oneLine(s.prompts[0]) + "} 2>/dev/null; ")
		}
	} else {
		for i, name := range []string{"PS1", "PS2"} {
			if i < len(s.prompts) && s.prompts[i] != "" {
				b.WriteString(name + "=" + Quote(s.prompts[i]) + "; ")
			}
		}
	}
	flags := ""
	for _, c := range between {
		if c != 'm' && strings.ContainsRune(s.Flags, c) {
			flags += string(c)
		}
	}
	if flags == "" && s.traps == "" {
		return b.String()
	}
	// The group's redirection hides what -x shows of the group itself. DEBUG
	// is the last trap in the list.
	b.WriteString("{ ")
	if flags != "" {
		builtin := `\`
		if d == Bash {
			builtin = `\builtin `
		}
		b.WriteString(builtin + "set -" + flags + "\n")
	}
	b.WriteString(oneLine(s.traps) + "} 2>/dev/null; ")
	return b.String()
}

// oneLine ends each command of a shell's own text so that more can follow.
func oneLine(text string) string {
	if text == "" {
		return ""
	}
	return strings.TrimRight(text, "\n") + "\n"
}

// fatal says that a command that fails would end the shell or run a trap.
func (s *State) fatal() bool {
	return strings.Contains(s.Flags, "e") || strings.Contains(s.traps, "ERR") || strings.Contains(s.traps, "DEBUG")
}

// A Reader reads reports.
type Reader struct {
	r *bufio.Reader
}

// NewReader returns a reader of the report pipe.
func NewReader(r io.Reader) *Reader { return &Reader{bufio.NewReader(r)} }

// field reads up to the next NUL, and left bytes at most. No value of a
// variable has a NUL.
func (r *Reader) field(left *int) (string, error) {
	var b []byte
	for {
		part, err := r.r.ReadSlice(0)
		if *left -= len(part); *left < 0 {
			return "", fmt.Errorf("read report: more than %d bytes: %w", MaxReport, errdefs.ErrOutOfRange)
		}
		b = append(b, part...)
		switch {
		case err == nil:
			return string(b[:len(b)-1]), nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(b) > 0:
			return "", io.ErrUnexpectedEOF
		default:
			return "", err
		}
	}
}

// Probe reads the answer to Probe.
func (r *Reader) Probe(token string) (Dialect, error) {
	left := MaxReport
	found, err := r.field(&left)
	if err != nil {
		return Unknown, fmt.Errorf("read probe: %w", err)
	}
	got, err := r.field(&left)
	if err != nil {
		return Unknown, fmt.Errorf("read probe: %w", err)
	}
	if got != token {
		return Unknown, fmt.Errorf("read probe: token %q: %w", got, errdefs.ErrInvalidArgument)
	}
	switch strings.TrimSpace(found) {
	case "shopt\nlet":
		return Bash, nil
	case "let":
		return Ash, nil
	case "":
		return Dash, nil
	}
	return Unknown, fmt.Errorf("probe shell: it has %q: %w", found, errdefs.ErrNotImplemented)
}

// Next reads the report that has token. Reports with another one are dropped,
// and so is the beginning of one that was interrupted and begun again. At the
// end of the pipe it returns io.EOF, possibly wrapped: the shell has ended.
func (r *Reader) Next(token string) (*State, error) {
	left := MaxReport
	var fields []string
	for {
		f, err := r.field(&left)
		if err != nil {
			return nil, fmt.Errorf("read report: %w", err)
		}
		fields = append(fields, f)
		n := len(fields)
		if n >= 2 && fields[n-2] == begin && f == token {
			fields = []string{begin, token}
			continue
		}
		if f != end+token {
			// Without our token yet only the last field can matter.
			if fields[0] != begin || n >= 2 && fields[1] != token {
				fields = []string{f}
			}
			continue
		}
		return parse(fields)
	}
}

// parse takes begin, token, status, flags, dir, traps, umask, exports, one or
// two fields of prompts, and end.
func parse(fields []string) (*State, error) {
	if n := len(fields); n != 10 && n != 11 || fields[0] != begin {
		return nil, fmt.Errorf("parse report of %d fields: %w", n, errdefs.ErrInvalidArgument)
	}
	status, err := strconv.ParseUint(fields[2], 10, 8)
	if err != nil {
		return nil, fmt.Errorf("parse status %q: %w", fields[2], errdefs.ErrInvalidArgument)
	}
	umask := strings.TrimSpace(fields[6])
	if _, err := strconv.ParseUint(umask, 8, 12); err != nil {
		return nil, fmt.Errorf("parse umask %q: %w", fields[6], errdefs.ErrInvalidArgument)
	}
	return &State{
		Status: int(status), Flags: fields[3], Dir: fields[4], traps: fields[5], Umask: umask,
		Exports: fields[7], prompts: fields[8 : len(fields)-1],
	}, nil
}
