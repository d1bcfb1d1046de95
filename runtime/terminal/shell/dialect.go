// Package shell drives a persistent interactive shell over a command pipe and
// a report pipe, so that its terminal carries only what the user's programs
// print and read.
//
// The shell reads its commands from the command pipe. The text of a step runs
// under eval, with the report pipe closed, and is followed by a report of ours
// that says how it ended. The shell that does not survive a step sends no
// report: the holder sees its process end, and that is the truth. The end of
// the report pipe is not, for a background subshell that runs no other program
// (`while :; do :; done &`) keeps what its parent had open.
//
// What a user can see of it:
//
//   - The names that it needs must keep their meaning: a function builtin in
//     bash, or an alias for case anywhere, and no report comes any more; nor
//     does one after set -n in dash and ash.
//   - With set -e, dash and ash end after every step whose status is not 0,
//     also where the failing command was part of a condition.
//   - A PS1 that the user has set is shown after an interrupt, and so is a
//     line of ours if set -v is on.
//   - Busybox ash may stand still for ever if it is interrupted while it prints
//     itself: only an end to the process helps then.
//   - $_ is not kept, nor $? by an empty step or while set -e or an ERR or
//     DEBUG trap is set; a DEBUG trap runs for a few commands of ours, with its
//     output dropped. `exec <file` lasts for one step in bash, and so do file
//     descriptors 60 and 61 in bash, and 7 in dash and ash.
//   - Bash shows one + more with set -x, and dash has "eval: " in its messages.
package shell

import (
	"fmt"
	"path"

	"github.com/containerd/errdefs"
)

// ReportFD is the write end of the report pipe in a new shell.
const ReportFD = 4

// A Dialect is a family of shells that take the same text.
type Dialect int

// The dialects. Unknown is a shell that has to be asked with Probe.
const (
	Unknown Dialect = iota
	Bash
	Dash
	Ash
)

func (d Dialect) String() string {
	switch d {
	case Bash:
		return "bash"
	case Dash:
		return "dash"
	case Ash:
		return "ash"
	}
	return "unknown"
}

// ForPath returns the dialect of the shell at a path from its name. The path
// may be one with its links resolved; the name sh alone says nothing.
func ForPath(p string) Dialect {
	switch path.Base(p) {
	case "bash":
		return Bash
	case "dash":
		return Dash
	case "ash", "busybox":
		return Ash
	}
	return Unknown
}

// CommandFD is where a new shell expects the read end of the command pipe.
//
// Bash reads it as its standard input: only then it is an interactive shell
// in every respect. `bash -i script` is not; an interrupt in the middle of a
// list ends it. Dash and ash read it as a script, for dash may read a standard
// input byte by byte, which loses packets. All shells keep the script under a
// high number and close it on exec.
func (d Dialect) CommandFD() int {
	if d == Bash {
		return 0
	}
	return 3
}

// Packets says whether the command pipe must be in packet mode (O_DIRECT),
// with one write for each chunk of a text. Dash and ash forget what they have
// read ahead when a command is interrupted or fails; a packet is not read
// ahead. Bash reads bytes, and must have none. The command pipe of a shell
// that is Unknown is put into packet mode after Exec.
func (d Dialect) Packets() bool { return d == Dash || d == Ash }

// Banner says that the standard output of a new shell must be /dev/null, or
// it shows a banner of the shell; Start gives it the terminal.
func (d Dialect) Banner() bool { return d == Ash }

// Args are the arguments of a new shell after its name.
func (d Dialect) Args() []string {
	const script = "/proc/self/fd/3"
	switch d {
	case Bash:
		return []string{"--noprofile", "--norc", "--noediting", "-i"}
	case Dash, Ash:
		return []string{"-i", script}
	}
	return []string{script}
}

// Env is what the environment of a new shell needs besides the user's: an
// interactive shell prompts before Start has been read.
func Env() []string { return []string{"PS0=", "PS1=", "PS2=", "PROMPT_COMMAND="} }

// Probe asks a shell that was started as Unknown what it is; its report is
// read with Parser.ExpectProbe. It asks for builtins, not for variables, which could
// be in the environment.
func Probe(token string) Text {
	return Text{[]byte(`{ command -v shopt; command -v setopt; command -v whence; command -v let; printf '\0%s\0' ` + token + `; } >&4 2>/dev/null` + "\n")}
}

// Exec has a shell that was started as Unknown, and has answered Probe, run
// itself again as d. Nothing may be written before its packet mode is set.
func (d Dialect) Exec(shell string) (Text, error) {
	env := "PS0= PS1= PS2= PROMPT_COMMAND= ENV= "
	switch d {
	case Bash:
		return Text{[]byte(env + "exec " + Quote(shell) + " --noprofile --norc --noediting -i 0<&3 3<&-\n")}, nil
	case Dash, Ash:
		return Text{[]byte(env + "exec " + Quote(shell) + " -i /proc/self/fd/3 >/dev/null\n")}, nil
	}
	return nil, fmt.Errorf("run shell %q: dialect %v: %w", shell, d, errdefs.ErrNotImplemented)
}
