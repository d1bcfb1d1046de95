package terminal

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

func TestWaitingForInput(t *testing.T) {
	for _, c := range []struct{ program, command, input string }{
		{"bash", "read x", "a\n"}, {"bash", "cat", "\x04"}, {"bash", "cat </dev/tty", "\x04"},
		{"bash", "sh -c 'read x'", "\n"}, {"bash", "{ read x; } | cat", "\n"},
		{"python3", "python3 -i -c 1", "exit()\n"},
		{"python3", "python3 -c 'import select,sys; select.select([sys.stdin],[],[])'", "\n"},
		{"python3", "python3 -c 'import select,sys; p=select.poll(); p.register(0,select.POLLIN); p.poll()'", "\n"},
		{"dash", "read x", "a\n"}, {"ash", "read x", "a\n"}, {"ash", "busybox cat", "\x04"},
	} {
		t.Run(c.program+" "+c.command, func(t *testing.T) {
			t.Parallel()
			name := c.program
			if name == "python3" {
				needs(t, name)
				name = "bash"
			}
			f := newFixture(t, name)
			s := f.open("")
			st := f.post(s, c.command)
			f.waiting(st)
			if err := s.Send(f.Context(), []byte(c.input)); err != nil {
				t.Fatal(err)
			}
			if st.Status().WaitingForInput {
				t.Error("it still waits")
			}
			f.end(st)
			f.expect(s, "echo alive", "alive\n", 0)
		})
	}
}

// TestNotWaitingForInput has programs that wait for something else.
func TestNotWaitingForInput(t *testing.T) {
	for _, command := range []string{
		"sleep 100", "sleep 100 | cat", "while :; do :; done",
		"python3 -c 'import socket,select; s=socket.socket(); s.bind((\"127.0.0.1\",0)); s.listen(); p=select.poll(); p.register(s,1); p.register(0,1); p.poll()'",
		"python3 -c 'import socket,select,sys; s=socket.socket(); s.bind((\"127.0.0.1\",0)); s.listen(); select.select([s,sys.stdin],[],[])'",
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(command, "python3") {
				needs(t, "python3")
			}
			f := newFixture(t, "bash")
			s := f.open("")
			st := f.post(s, "echo up; "+command)
			f.printed(st, "up\n")
			f.stays("it does not wait", 8*inputQuiet, func() bool { return !st.Status().WaitingForInput })
			if err := s.Signal(f.Context(), unix.SIGINT); err != nil {
				t.Fatal(err)
			}
			f.end(st)
		})
	}
}

// TestSendLines has lines as long as the kernel takes, and longer ones.
func TestSendLines(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "bash")
	s := f.open("")
	full := strings.Repeat("x", maxLine)
	st := f.post(s, "stty -echo; for i in 1 2 3; do read -r x; echo ${#x}; done")
	f.waiting(st)
	for _, input := range []string{full + "\n", "short\n"} {
		if err := s.Send(f.Context(), []byte(input)); err != nil {
			t.Fatal(err)
		}
	}
	for _, input := range []string{full + "x\n", "a\n" + full + "x"} {
		if err := s.Send(f.Context(), []byte(input)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%d bytes: %v", len(input), err)
		}
	}
	if err := s.Send(f.Context(), []byte("part")); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(f.Context(), []byte(full)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("the rest of a line: %v", err)
	}
	if err := s.Send(f.Context(), []byte("\n")); err != nil {
		t.Fatal(err)
	}
	if out, _ := f.end(st); out != "4095\n5\n4\n" {
		t.Errorf("printed %q", out)
	}
	st = f.post(s, "stty raw; echo up; head -c 100000 | md5sum")
	f.printed(st, "up\n")
	if err := s.Send(f.Context(), bytes.Repeat([]byte("x"), 100000)); err != nil {
		t.Fatal(err)
	}
	want, err := exec.Command("sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x | md5sum").Output()
	if out, _ := f.end(st); err != nil || !strings.HasSuffix(out, string(want)) {
		t.Errorf("printed %q, want %q, %v", out, want, err)
	}
}

// TestSendBlocked gives up to type, and goes on after the session was held.
func TestSendBlocked(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "bash")
	s := f.open("")
	fifo := filepath.Join(t.TempDir(), "fifo")
	st := f.post(s, "mkfifo "+fifo+"; stty raw -echo; echo up; read x <"+fifo+"; head -c 200000 | tr -d x | wc -c")
	f.printed(st, "up\n")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	big := bytes.Repeat([]byte("x"), 150000)
	if err := s.Send(ctx, big); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v", err)
	}
	sent := make(chan error, 1)
	go func() { sent <- s.Send(t.Context(), bytes.Repeat([]byte("y"), 400000)) }()
	for range 3 {
		h, err := f.set.Hold(f.Context())
		if err != nil {
			t.Fatal(err)
		}
		h.Free()
	}
	if err := os.WriteFile(fifo, []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
	out, _ := f.end(st)
	if !strings.HasPrefix(out, "up\n") || len(out) < 5 {
		t.Errorf("printed %q", out)
	}
	// Nobody reads the rest.
	if err := f.set.Close(""); err != nil {
		t.Error(err)
	}
	if err := <-sent; err == nil {
		t.Error("all was typed")
	}
}

func TestSignalAndResize(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		if err := s.Resize(f.Context(), Size{Columns: 111, Rows: 33}); err != nil {
			f.Fatal(err)
		}
		f.expect(s, "stty size", "33 111\n", 0)
		st := f.post(s, "bash -c 'trap \"stty size\" WINCH; trap \"exit 9\" USR1; echo up; while :; do sleep 0.05; done'")
		f.printed(st, "up\n")
		if err := s.Resize(f.Context(), Size{Columns: 50, Rows: 20}); err != nil {
			f.Fatal(err)
		}
		f.printed(st, "20 50\n")
		if err := s.Signal(f.Context(), unix.SIGUSR1); err != nil {
			f.Fatal(err)
		}
		if _, status := f.end(st); status.ExitCode != 9 || status.ShellExited {
			f.Errorf("%+v", status)
		}
		// With nothing in the foreground it is the shell's, which does not mind.
		if err := s.Signal(f.Context(), unix.SIGINT); err != nil {
			f.Fatal(err)
		}
		f.expect(s, "echo alive", "alive\n", 0)
		f.run(s, "exit")
		if err := s.Resize(f.Context(), Size{Columns: 40, Rows: 10}); err != nil {
			f.Fatal(err)
		}
		f.expect(s, "stty size", "10 40\n", 0)
	})
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	var checks []func()
	for _, c := range []struct {
		name, command string
		spec          StepSpec
		most          time.Duration
		ends          bool // the shell, too
	}{
		{"ends", "sleep 100", StepSpec{Timeout: 100 * time.Millisecond}, 1500 * time.Millisecond, false},
		{"idle", "for i in 1 2 3; do echo $i; sleep 0.2; done; sleep 100", StepSpec{IdleTimeout: 400 * time.Millisecond}, 3 * time.Second, false},
		{"read", "read x", StepSpec{Timeout: 100 * time.Millisecond}, 1500 * time.Millisecond, false},
		{"term", "sh -c 'trap \"\" INT; while :; do sleep 0.1; done'", StepSpec{Timeout: 100 * time.Millisecond}, signalGrace + 2*time.Second, false},
		{"kill", "sh -c 'trap \"\" INT TERM; while :; do sleep 0.1; done'", StepSpec{IdleTimeout: 100 * time.Millisecond}, 2*signalGrace + 2*time.Second, false},
		{"shell", "trap '' INT TERM; while :; do :; done", StepSpec{Timeout: 100 * time.Millisecond}, 2*signalGrace + 2*time.Second, true},
		{"children", "trap '' INT TERM; while :; do sleep 100; done", StepSpec{Timeout: 100 * time.Millisecond}, 2*signalGrace + 4*time.Second, true},
	} {
		for _, shell := range []string{"bash", "dash", "ash"} {
			f := newFixture(t, shell)
			s := f.open("")
			c.spec.Command = []byte(c.command)
			st := f.start(s, c.spec)
			// They wait most of the time, so all of them wait at once.
			checks = append(checks, func() {
				out, got := f.end(st)
				if !got.TimedOut || got.ShellExited != c.ends || got.ExitCode == 0 || got.Duration > c.most {
					t.Errorf("%s %s: %q, %+v", shell, c.name, out, got)
				}
				if c.name == "idle" && (!strings.HasPrefix(out, "1\n2\n3\n") || got.Duration < 700*time.Millisecond) {
					t.Errorf("%s: printed %q in %s", shell, out, got.Duration)
				}
				f.expect(s, "echo alive", "alive\n", 0)
			})
		}
	}
	for _, check := range checks {
		check()
	}
}
