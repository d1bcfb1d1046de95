package integration_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/statefork/statefork/shim/api"
)

// quick fails if what happened since then took as long as a hang.
func (s *sessions) quick(what string, begun time.Time) {
	s.e.Helper()
	if d := time.Since(begun); d > 3*time.Second {
		s.e.Errorf("%s took %v", what, d)
	}
}

// TestB115HereDocuments gives here-documents, whole and not, and quotes that do
// not end. Each ends at once with what the shell says of it, and the next command
// is not touched by it.
func TestB115HereDocuments(t *testing.T) {
	onShells(t, func(s *shelled) {
		var lines strings.Builder
		for i := range 40 {
			fmt.Fprintf(&lines, "line %d with $HOME `date` \\ and ' and \"\n", i)
		}
		begun := time.Now()
		s.want("cat >/tmp/f <<'EOF'\n"+lines.String()+"EOF\n", 0, "")
		s.want("cat /tmp/f", 0, lines.String())
		s.want("x=5; cat <<-EOF\n\t\ttabs $x\n\tEOF", 0, "tabs 5\n")
		s.want("cat <<A; cat <<'B'\na $x\nA\nb $x\nB", 0, "a 5\nb $x\n")
		// A shell takes the end of the text for the end of the document; only
		// bash tells.
		r := s.says("cat <<'EOF'\nno end", 0, "no end")
		if s.bash() != strings.Contains(r.out, "delimited by end-of-file") {
			s.e.Errorf("an unfinished here-document prints %q", r.out)
		}
		unmatched := s.pick("unexpected eof while looking for matching", "unterminated quoted string", "unterminated quoted string")
		// The last one's document is a command of its own, before the error.
		for _, text := range []string{`echo "abc`, `echo 'abc`, "cat >/tmp/f <<'EOF'\n'\nEOF\necho 'x"} {
			s.says(text, 2, unmatched)
			s.want("echo $x", 0, "5\n")
		}
		s.says("echo `echo abc", 2, s.pick("unexpected eof", "eof in backquote", "eof in backquote"))
		s.want("echo $x; cat /tmp/f", 0, "5\n'\n")
		s.quick("all", begun)
	})
}

// code is the number that is right for the shell.
func (s *shelled) code(bash, dash, ash int) int {
	return map[string]int{"bash": bash, "dash": dash, "ash": ash}[s.subject.shell]
}

// TestB117ShellsOwnSyntax runs what only the running shell can judge: no check
// comes before it, and the words about an error are its own.
func TestB117ShellsOwnSyntax(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("alias hi='echo hello'", 0, "")
		s.want("hi you", 0, "hello you\n")
		s.says("echo ${(U)x}", s.code(1, 2, 2), "bad substitution")
		s.says("echo ok; done", 2, s.pick("unexpected token `done'", `"done" unexpected`, `unexpected "done"`))
		s.says("no-such-program", 127, "not found")
		s.says("/etc", 126, s.pick("is a directory", "permission denied", "permission denied"))
		s.says("ls /no-such-file", s.code(2, 2, 1), "no such file")
		if !s.bash() {
			// Not in POSIX, and not in these: arrays, coproc, extended patterns.
			s.says("a=(1 2)", 2, "syntax error")
			s.says("shopt -s extglob", 127, "not found")
			return
		}
		s.want("cd $(mktemp -d); touch a b c; shopt -s extglob", 0, "")
		s.want("echo !(a)", 0, "b c\n")
		s.want("[[ abc =~ ^a(b)c$ ]] && echo ${BASH_REMATCH[1]}", 0, "b\n")
		s.want("a=(1 2 3); echo ${#a[@]} ${a[-1]}; diff <(echo 1) <(echo 1)", 0, "3 3\n")
		s.want("set +m; { coproc cat; } 2>/dev/null; echo through >&${COPROC[1]}; read -u ${COPROC[0]} x; echo $x", 0, "through\n")
		s.says("kill $COPROC_PID; wait $COPROC_PID", 143, "")
	})
}

// TestB118OutputBeforeLimit has a step reach its limits: what it has printed
// until then is there, and the session goes on.
func TestB118OutputBeforeLimit(t *testing.T) {
	onShells(t, func(s *shelled) {
		var lines strings.Builder
		for i := 1; i <= 100; i++ {
			fmt.Fprintln(&lines, i)
		}
		for _, req := range []*api.StartStepRequest{
			{Command: []byte("v=kept; seq 100; sleep 1000"), TimeoutMs: 700},
			{Command: []byte("seq 100; sleep 1000; echo never"), IdleTimeoutMs: 400},
			{Command: []byte("trap '' INT; seq 100; trap '' INT; sleep 1000"), TimeoutMs: 300},
		} {
			r := s.run(req)
			if !r.TimedOut || r.ShellExited || r.ExitCode < 128 {
				s.e.Errorf("%s: %v", req.Command, r)
			}
			if !strings.HasPrefix(r.out, lines.String()) || strings.Contains(r.out, "never") {
				s.e.Errorf("%s: output %q", req.Command, r.out)
			}
			s.want("trap - INT; echo $v", 0, "kept\n")
		}
		r := s.run(&api.StartStepRequest{Command: []byte("for i in 1 2 3 4 5; do echo $i; sleep 0.2; done"), IdleTimeoutMs: 700})
		if r.TimedOut || r.out != "1\n2\n3\n4\n5\n" {
			s.e.Errorf("a step that prints all the time was ended: %v %q", r, r.out)
		}
	})
}

// TestB120Prompts changes what other drivers look for: nothing depends on
// a prompt, and all that is set stays set.
func TestB120Prompts(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("PS1='\n%'; PS2='...'", 0, "")
		s.want("echo \"<$PS1>\" \"<$PS2>\"", 0, "<\n%> <...>\n")
		s.want("activate() { _OLD=$PS1; PS1=\"(venv) $PS1\"; export VIRTUAL_ENV=/venv; PATH=/venv/bin:$PATH; hash -r; }; activate", 0, "")
		s.want("echo \"$PS1 $VIRTUAL_ENV ${PATH%%:*}\"", 0, "(venv) \n% /venv /venv/bin\n")
		if s.bash() {
			s.want("PROMPT_COMMAND='echo prompt'; PS0='before'", 0, "")
			s.want("echo $PROMPT_COMMAND $PS0", 0, "echo prompt before\n")
		}
		s.want("false", 1, "")
		begun := time.Now()
		r := s.sh("cd /tmp; export E=exported; exec " + s.subject.shell)
		if !r.ShellExited || !r.ExitKnown || r.ExitCode != 0 {
			s.e.Errorf("exec of a shell: %v %q", r, r.out)
		}
		s.quick("exec of a shell", begun)
		if r := s.want("pwd; echo $E $0", 0, "/tmp\nexported "+s.pick("bash", "/proc/self/fd/3", "/proc/self/fd/3")+"\n"); !r.NewShell {
			s.e.Errorf("the step after exec does not tell of a new shell: %v", r)
		}
	})
}

// TestB120ReadonlyPrompt makes the prompt readonly, which no driver can take
// away then. Each step still runs, and ends with its own code.
func TestB120ReadonlyPrompt(t *testing.T) {
	onShells(t, func(s *shelled) {
		for _, step := range []struct {
			command, out string
			code         uint32
		}{
			{"PS1='% '; readonly PS1; false", "", 1},
			{"PS4='+ '; echo \"<$PS1>\"", "<% >\n", 0},
			{"(exit 3)", "", 3},
		} {
			r := s.sh(step.command)
			// It is shown, as its user wants.
			if out := strings.ReplaceAll(r.out, "% ", ""); out != strings.ReplaceAll(step.out, "% ", "") || r.ExitCode != step.code {
				s.e.Errorf("%q ends with %d and prints %q", step.command, r.ExitCode, r.out)
			}
		}
	})
}

// TestB122ShellOptions sets what breaks drivers that put text around commands.
// Each later command has its own code, and prints its own text.
func TestB122ShellOptions(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("set -u", 0, "")
		r := s.says("echo $unset_variable", s.code(1, 2, 2), s.pick("unbound variable", "parameter not set", "parameter not set"))
		if r.ShellExited {
			s.e.Errorf("an unset variable ends the shell: %v", r)
		}
		s.want("set -u; echo $-", 0, s.sh("echo $-").out)
		s.want("set -e; trap 'echo exit' EXIT", 0, "")
		s.want("if false; then :; fi; false || echo or", 0, "or\n")
		if s.subject.shell != "dash" { // which has no pipefail
			s.want("set -o pipefail; false | true || echo failed", 0, "failed\n")
			s.want("true | true", 0, "")
		}
		s.want("set -x", 0, "")
		// Bash shows by a second "+" that it evaluates.
		s.want("echo hi", 0, s.pick("++", "+", "+")+" echo hi\nhi\n")
		if s.bash() {
			s.want("set +x; trap 'echo debug' DEBUG", 0, "++ set +x\n")
			s.want("echo hi", 0, "debug\nhi\n")
			s.want("trap - DEBUG; trap 'echo error' ERR; set +e", 0, "debug\n")
			s.want("false", 1, "error\n")
			s.want("true", 0, "")
			s.want("trap - ERR; set -e; set -x", 0, "")
		}
		r = s.sh("(exit 9)")
		if !r.ShellExited || r.ExitCode != 9 || !strings.HasSuffix(r.out, "exit\n") {
			s.e.Errorf("a failed command under -e: %v %q", r, r.out)
		}
		if r := s.want("echo back", 0, "back\n"); !r.NewShell {
			s.e.Errorf("the next step does not tell of a new shell: %v", r)
		}
		s.want("set -v", 0, "")
		// Only bash has -v show what it evaluates.
		shown := func(text string) string { return s.pick(text+"\n", "", "") }
		s.want("echo hi; (exit 4)", 4, shown("echo hi; (exit 4)")+"hi\n")
		s.want("set +v; set -f; set -C; set -a; y=1", 0, shown("set +v; set -f; set -C; set -a; y=1"))
		s.want("env | grep ^y=; echo *", 0, "y=1\n*\n")
		s.want("set +f +C +a; unset y", 0, "")
		s.want("trap 'echo usr' USR1; kill -USR1 $$", 0, "usr\n")
		s.want("IFS=abc; printf() { echo mine; }; unalias -a; echo $((1 + 1))", 0, "2\n")
		s.want("printf x; test() { return 3; }; test", 3, "mine\n")
	})
}

// TestB123ShellDeath ends the shell in every way. The step ends at once with the
// true status, and the next one has a new shell in the same directory with the
// exported variables.
func TestB123ShellDeath(t *testing.T) {
	tests := []struct {
		command string
		code    uint32
		signal  uint32
		out     string
	}{
		{command: "exit 7", code: 7},
		{command: "exit 0"},
		{command: "set -e; false; echo never", code: 1},
		{command: "kill -TERM $$; kill -KILL $$", code: 137, signal: 9},
		{command: "kill -HUP $$; sleep 5", code: 129, signal: 1},
		{command: "exec true"},
		{command: "exec sh -c 'echo last; exit 3'", code: 3, out: "last\n"},
		{command: "trap 'echo bye' EXIT; exit 300", code: 44, out: "bye\n"},
	}
	onShells(t, func(s *shelled) {
		for _, tt := range tests {
			s.want("cd /var; export KEPT='a b'; LOST=1", 0, "")
			before := s.info().Pid
			begun := time.Now()
			r := s.sh(tt.command)
			// An interactive bash says so when it is told to exit.
			out := tt.out
			if s.bash() && strings.Contains(tt.command, "exit") && !strings.HasPrefix(tt.command, "exec") {
				out = "exit\n" + out
			}
			if r.ExitCode != tt.code || !r.ExitKnown || r.Signal != tt.signal || !r.ShellExited || r.out != out {
				s.e.Errorf("%s: %v, output %q", tt.command, r, r.out)
			}
			s.quick(tt.command, begun)
			r = s.want(`echo "$PWD $KEPT $LOST"`, 0, "/var a b \n")
			if !r.NewShell || s.info().Pid == before {
				s.e.Errorf("after %s: %v", tt.command, r)
			}
			s.want("cd /; unset KEPT", 0, "")
		}
		// -e is the user's own choice, and survives.
		s.want("set -e", 0, "")
		s.cycle("sticky")
		if r := s.sh("false"); !r.ShellExited || r.ExitCode != 1 {
			s.e.Errorf("set -e has not survived a restore: %v", r)
		}
	})
}

// TestB125NothingAppended ends commands in what would swallow text after them.
func TestB125NothingAppended(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("cat >/tmp/f <<EOF\na\nEOF", 0, "")
		s.want("cat /tmp/f; cat <<EOF\nb\nEOF", 0, "a\nb\n")
		s.want("echo a # note", 0, "a\n")
		s.want("# nothing", 0, "")
		s.want("(exit 3) # note", 3, "")
		s.want("(exit 3)", 3, "")
		s.want("# what $? was", s.code(0, 0, 0), "")
		s.want("echo $?", 0, "0\n")
		s.want("echo a \\\n  b\\", 0, "a b\\\n")
		s.want("echo a \\\n", 0, "a\n")
		s.want("", 0, "")
		s.want("\n\n", 0, "")
		s.want("   ", 0, "")
		for _, text := range []string{"echo $(echo a", "if true; then", "{ echo a", "f() {", "for i in 1 2"} {
			code := 2
			if s.bash() && text == "echo $(echo a" {
				code = 1
			}
			s.says(text, code, s.pick("unexpected", "end of file unexpected", "unexpected end of file"))
			s.want("echo still", 0, "still\n")
		}
		// An interactive bash numbers a job, on the standard error.
		s.says("{ echo a & } 2>/dev/null; wait", 0, "a\n")
		s.says("{ cat /tmp/f | sed s/a/b/ & } 2>/dev/null\nwait # for it", 0, "b\n")
	})
}
