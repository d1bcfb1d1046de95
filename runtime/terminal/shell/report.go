package shell

import (
	"fmt"
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
				// One that is readonly still has its value, and to set it is an
				// error that "command" keeps from ending the step.
				b.WriteString(`\command eval ` + Quote(name+"="+Quote(s.prompts[i])) + " 2>/dev/null; ")
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
