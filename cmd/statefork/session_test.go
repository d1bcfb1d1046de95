package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

// TestSessionScripts runs testdata/session/*.txt: a private containerd knows the
// container, and an actor is its shim.
func TestSessionScripts(t *testing.T) {
	socket := filepath.Join(startContainerd(t), "sock")
	createRecord(t, socket)
	testscript.Run(t, testscript.Params{
		Dir:  "testdata/session",
		Cmds: commands(),
		Setup: func(e *testscript.Env) error {
			dir, err := os.MkdirTemp("", "sf")
			if err != nil {
				return err
			}
			state, stop, err := serveShim(dir, newActor())
			if err != nil {
				return errors.Join(err, os.RemoveAll(dir))
			}
			e.Defer(func() {
				if err := errors.Join(stop(), os.RemoveAll(dir)); err != nil {
					t.Error(err)
				}
			})
			e.Setenv("STATE", state)
			e.Setenv("CONTAINERD_ADDRESS", socket)
			return nil
		},
	})
}

// TestInterrupt sends signals to a statefork that follows a step.
func TestInterrupt(t *testing.T) {
	socket := filepath.Join(startContainerd(t), "sock")
	createRecord(t, socket)
	for _, tt := range []struct {
		name, command string
		// signals are sent one by one, when the first has reached the step.
		signals []os.Signal
		code    int
		stderr  string
		step    []uint32
	}{
		{"interrupt", "hang", []os.Signal{os.Interrupt}, 130, "", []uint32{2}},
		{"twice", "stubborn", []os.Signal{os.Interrupt, os.Interrupt}, exitRuns, `step 1 of session "main" still runs: wait for it by`, []uint32{2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			a := newActor()
			cmd, stderr := startExec(t, ctx, socket, a, tt.command)
			if !a.await(ctx, func() bool { return a.step.Step == 1 }) {
				t.Error("the step was not started")
			}
			for _, sig := range tt.signals {
				if err := cmd.Process.Signal(sig); err != nil {
					t.Error(err)
				}
				if !a.await(ctx, func() bool { return len(a.signals) > 0 }) {
					t.Error("the step was not interrupted")
				}
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("exit code %d, stderr %q; want %d, %q", code, stderr, tt.code, tt.stderr)
			}
			if !slices.Equal(a.signals, tt.step) {
				t.Errorf("the step got the signals %v, want %v", a.signals, tt.step)
			}
		})
	}
}

// startExec starts "statefork exec" of a command that an actor acts.
func startExec(t *testing.T, ctx context.Context, socket string, a *actor, command string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		t.Fatal(err)
	}
	state, stop, err := serveShim(dir, a)
	if err != nil {
		t.Fatal(errors.Join(err, os.RemoveAll(dir)))
	}
	t.Cleanup(func() {
		if err := errors.Join(stop(), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, self)
	// The test's program is statefork under this name: see TestMain.
	cmd.Args = []string{"statefork", "-a", socket, "--state", state, "exec", "job1", "--", command}
	stderr := &bytes.Buffer{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, stderr
}

// TestShellText has the shells themselves say which words they see.
func TestShellText(t *testing.T) {
	words := []string{
		"plain", "", " ", "it's", `"double"`, "$HOME", "`id`", "a\nb", `back\slash`, "*", "?", "[a]", "~", "~root", "{a,b}", "a=b", "#x", "!", "!!",
		"-n", "--", "a;b", "a&b", "(x)", "<x>", "|", "é", "\xff\xfe", "\t", "a\\\nb", "''", "%1", "^x^y", "café's \"$x\"",
	}
	for _, shell := range [][]string{{"sh", "-c"}, {"bash", "-c"}, {"dash", "-c"}, {"busybox", "sh", "-c"}} {
		path, err := exec.LookPath(shell[0])
		if err != nil {
			t.Logf("no %s here", shell[0])
			continue
		}
		text := shellText(append([]string{"printf", "<%s>"}, words...))
		out, err := exec.Command(path, append(shell[1:], text)...).Output()
		if want := "<" + strings.Join(words, "><") + ">"; err != nil || string(out) != want {
			t.Errorf("%s printed %q, %v; want %q", shell, out, err, want)
		}
		// A word is no keyword, and no assignment.
		for _, first := range []string{"if", "{", "!", "a=b", "time"} {
			out, err := exec.Command(path, append(shell[1:], shellText([]string{first, "x"})+" 2>/dev/null; echo $?$a")...).Output()
			if got := strings.TrimSpace(string(out)); err != nil || got != "127" && first != "time" {
				t.Errorf("%s took %q for %q, %v", shell, first, got, err)
			}
		}
	}
	if got := shellText([]string{"ls -l | wc"}); got != "ls -l | wc" {
		t.Errorf("one argument became %q", got)
	}
	if got, want := shellText([]string{"ls", "-l", "/a b", "x.y_z:1,2@%+"}), `'ls' -l '/a b' x.y_z:1,2@%+`; got != want {
		t.Errorf("text is %q, want %q", got, want)
	}
}

func TestUnescape(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "plain é": "plain é", `a\n\r\t\e\b\\z`: "a\n\r\t\x1b\b\\z", `\x00\xfF\x419`: "\x00\xff\x419", `\cC\c[\cd`: "\x03\x1b\x04",
	} {
		if got, err := unescape(text); err != nil || string(got) != want {
			t.Errorf("unescape(%q) = %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{`\`, `a\`, `\q`, `\x`, `\x1`, `\xg1`, `\x 1`, `\c`, `\c1`, `\0`} {
		var usage *usageError
		if got, err := unescape(text); !errors.As(err, &usage) {
			t.Errorf("unescape(%q) = %q, %v; want a usage error", text, got, err)
		}
	}
}

func TestTyped(t *testing.T) {
	for _, tt := range []struct {
		args     []string
		terminal bool
		want     string
	}{
		{[]string{"job1"}, false, "from stdin"},
		{[]string{"job1", "main"}, true, "from stdin"},
		{[]string{"--enter", "job1", "main"}, false, "from stdin\r"},
		{[]string{"--enter", "job1"}, true, "\r"},
		{[]string{"job1", "main", "two", "words"}, false, "two words"},
		{[]string{"--enter", "-e", "job1", "main", `\cC`}, false, "\x03\r"},
		{[]string{"job1", "main", "--", "--enter", `\n`}, false, `--enter \n`},
	} {
		verb := sessionSendCommand()
		var got []byte
		verb.Action = func(_ context.Context, cmd *cli.Command) (err error) {
			got, err = typed(cmd, strings.NewReader("from stdin"), tt.terminal)
			return err
		}
		if err := verb.Run(t.Context(), append([]string{"send"}, tt.args...)); err != nil || string(got) != tt.want {
			t.Errorf("send %q types %q, %v; want %q", tt.args, got, err, tt.want)
		}
	}
}

func TestStepCode(t *testing.T) {
	for _, tt := range []struct {
		res  waypoint.StepResult
		code int
	}{
		{waypoint.StepResult{ExitKnown: true}, 0},
		{waypoint.StepResult{ExitKnown: true, ExitCode: 3}, 3},
		{waypoint.StepResult{}, exitOwn},
		{waypoint.StepResult{ExitKnown: true, ExitCode: 130, TimedOut: true}, exitTimeout},
		{waypoint.StepResult{StillRunning: true}, exitRuns},
		{waypoint.StepResult{StillRunning: true, TimedOut: true}, exitRuns},
		{waypoint.StepResult{StillRunning: true, WaitingForInput: true}, exitWaits},
	} {
		err := stepCode(&tt.res)
		if (err != nil) != (tt.code != 0) || err != nil && exitCode(err) != tt.code {
			t.Errorf("%+v: %v, want exit code %d", tt.res, err, tt.code)
		}
	}
}

func TestSessionsTable(t *testing.T) {
	o, out, _ := buffers()
	err := o.sessions([]waypoint.Session{
		{Name: "main", Shell: "/bin/bash", PID: 7, Cwd: "/a\x1b[2J\n", LastStep: 12, Running: true},
		{Name: "old"},
		{Name: "service-1", Shell: "/bin/sh", PID: 9, Cwd: "/srv", LastStep: 1, Service: strings.Repeat("é", 60)},
	})
	want := `SESSION     SHELL       PID   STEP   STATE     DIRECTORY     SERVICE
main        /bin/bash   7     12     running   /a\x1b[2J\n   -
old         -           0     0      ended     -             -
service-1   /bin/sh     9     1      idle      /srv          ` + strings.Repeat("é", 37) + `...
`
	if err != nil || out.String() != want {
		t.Errorf("sessions are\n%s%v; want\n%s", out, err, want)
	}
}
