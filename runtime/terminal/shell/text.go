package shell

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// A Text is what is written to the command pipe, one write for each chunk.
type Text [][]byte

// packet is the longest chunk in packet mode. It must fit into one read, and
// busybox reads 1023 bytes at least.
const packet = 1000

// Quote returns s as one word of a shell.
func Quote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// between are the options that are off while the shell reads our own text:
// a would export what we set, e would end the shell, H would change the text,
// x and v would show it, and m would tell of jobs that have ended.
const between = "aevxHm"

// Start is the first text for a new shell; the shell reports with token. With
// the state of an earlier shell it takes over the exported variables and the
// file mode mask. The working directory is the holder's to set.
func (d Dialect) Start(token string, last *State) (Text, error) {
	if err := d.valid(token); err != nil {
		return nil, err
	}
	var restore string
	if last != nil {
		restore = "umask " + Quote(last.Umask) + "; \\command eval " + Quote(last.Exports) + " >/dev/null 2>&1; "
	}
	if d == Bash {
		// 60 is the report pipe and 61 the terminal, which the user's commands
		// get for their standard input: out of the way of who counts his
		// descriptors, and possible with "ulimit -n 64". Bash closes neither on
		// exec, but eval below does. History would hold our text.
		return d.text("exec 60>&4 4>&- 61<&1; \\set +H +o history; \\history -c; "+
			"\\unset PS0 PS1 PS2 PROMPT_COMMAND; PS1= PS2=; "+restore+"\\builtin :; ", "", token), nil
	}
	// Without job control: with it they hold /dev/tty open, and CRIU cannot dump
	// a terminal then while another process group has its foreground.
	return d.text("\\exec 7>&4 4>&- 3<&- 1>&2; \\set +m; \\unset PS0 PS1 PS2 PROMPT_COMMAND; PS1= PS2=; "+restore+"\\:; ", "", token), nil
}

// Step is the text that runs command, in a shell whose last report was last;
// it reports with token. A command cannot hold a NUL.
func (d Dialect) Step(command, token string, last *State) (Text, error) {
	if err := d.valid(token); err != nil {
		return nil, err
	}
	if strings.IndexByte(command, 0) >= 0 {
		return nil, fmt.Errorf("run command: it has a NUL: %w", errdefs.ErrInvalidArgument)
	}
	builtin := `\`
	if d == Bash {
		builtin = `\builtin `
	}
	var status string
	switch {
	case last.Status == 0:
	case d == Bash:
		status = fmt.Sprintf("(%sexit %d); ", builtin, last.Status)
	default:
		// Where there can be no other process that is an error, and "command"
		// keeps it from ending the whole line.
		status = fmt.Sprintf(`{ \command eval '(\exit %d)'; } 2>/dev/null; `, last.Status)
	}
	// What the user has set is given back inside of eval, where our own
	// commands are not seen any more, and on a line of its own: a shell runs
	// it before it finds a syntax error in the next.
	if inner := last.restore(d); inner != "" {
		if !last.fatal() && status != "" {
			inner += "{ " + status + "} 2>/dev/null"
		}
		command = strings.TrimRight(inner, "; \n") + "\n" + command
	}
	var job string
	if strings.Contains(last.Flags, "m") {
		job = builtin + "set -m; "
	}
	if d == Bash {
		// `!` keeps -e from ending the shell because of what eval returns,
		// and PIPESTATUS has the status that `!` turned around.
		// Not `command eval` or eval alone: a function would come first.
		return d.text(`\builtin trap - INT; `+job+status+
			`! \builtin eval `+Quote(command)+" 0<&61- 60>&-; ", "${PIPESTATUS[0]}", token), nil
	}
	// A function cannot be named like a special builtin.
	return d.text(`\trap - INT; `+job+status+`\eval `+Quote(command)+" 7>&-; ", "", token), nil
}

// Again has the shell report once more. A holder sends it if a report does not
// come soon after it has interrupted a command: two interrupts in a row may
// lose the one that the step has asked for. It does no harm to a shell that is
// still busy; the first report is the right one, and what comes later for an
// earlier token is dropped.
func (d Dialect) Again(token string) (Text, error) {
	if err := d.valid(token); err != nil {
		return nil, err
	}
	return d.text("", "", token), nil
}

// valid fails for a token that would have to be quoted.
func (d Dialect) valid(token string) error {
	if d != Bash && d != Dash && d != Ash {
		return fmt.Errorf("drive shell: dialect %v: %w", d, errdefs.ErrNotImplemented)
	}
	if len(token) < 16 || len(token) > 64 || strings.Trim(token, "0123456789abcdef") != "" {
		return fmt.Errorf("use token %q: %w", token, errdefs.ErrInvalidArgument)
	}
	return nil
}

// text is run and the report, which is on the same line, because that line
// has been read before the command may have set -v. An interrupt or an error
// takes the shell back to its top level, where it reads the next line; $? is
// then not 0, as it is after the report, so it reports there. The empty line
// is for bash 5.2, which knows no reserved word in the first line after an
// unclosed quote.
func (d Dialect) text(run, status, token string) Text {
	if status == "" {
		status = "$?"
	}
	first := []byte(run + d.report(status, token) + "\n")
	second := []byte("\ncase $? in (0) ;; (*) " + d.report("$?", token) + ";; esac\n")
	if !d.Packets() {
		return Text{append(first, second...)}
	}
	var t Text
	for _, b := range [][]byte{first, second} {
		for len(b) > packet {
			t, b = append(t, b[:packet]), b[packet:]
		}
		t = append(t, b)
	}
	return t
}

// report is a command that reports and ends with $? = 0. It redirects as little
// as possible: what takes a shell most of its time here is to set its file
// descriptors and to put them back. But the output of a DEBUG trap, which bash
// has until it is taken away, goes where the group's does, so before that each
// builtin writes to the report pipe itself. The prompts come last, for to set
// one that is readonly is an error that leaves the group.
func (d Dialect) report(status, token string) string {
	var b bytes.Buffer
	if d == Bash {
		b.WriteString(`{ \builtin printf '\0%s' ` + begin + ` ` + token + ` "` + status + `" "$-" "${PWD-}" '' >&60; `)
		b.WriteString(`\builtin trap -p INT ERR DEBUG >&60; \builtin trap - ERR DEBUG; \builtin trap '' INT; \builtin set +` + between + ` +o history; `)
		b.WriteString(`{ \builtin printf '\0'; \builtin umask; \builtin printf '\0'; \builtin export -p; `)
		b.WriteString(`\builtin printf '\0'; \builtin declare -p PS0 PS1 PS2 PROMPT_COMMAND; \builtin unset PS0 PS1 PS2 PROMPT_COMMAND; `)
		b.WriteString(`\builtin printf '\0%s\0' ` + end + token + `; } >&60; PS1= PS2=; } >/dev/null 2>&1`)
		return b.String()
	}
	// printf is no special builtin, so a function could be in its place; one
	// named command is forgotten. $? is expanded before that.
	b.WriteString(`{ \eval "\\unset -f command; \\command printf '\\0%s' ` + begin + ` ` + token + ` ` + status + `"; \command printf '\0%s' "$-" "${PWD-}" ''; `)
	b.WriteString(`\trap; \trap '' INT; \set +aevxm; `)
	b.WriteString(`\command printf '\0'; \command umask; \command printf '\0'; \export -p; `)
	b.WriteString(`\command printf '\0%s\0%s\0%s\0' "${PS1-}" "${PS2-}" ` + end + token + `; PS1= PS2=; } >&7 2>/dev/null`)
	return b.String()
}
