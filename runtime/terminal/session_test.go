package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestLeaks comes before all tests that run in parallel.
func TestLeaks(t *testing.T) {
	open := func() int {
		runtime.GC() // closes the files that nobody has any more
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	var goroutines, files int
	for i, name := range []string{"bash", "bash", "dash", "ash"} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, name)
			s := f.open("")
			f.expect(s, "echo a", "a\n", 0)
			f.run(s, "exit 3")
			f.run(s, "exec true")
			f.run(f.open("two"), "kill -9 $$")
			st := f.post(s, "sleep 100")
			held, err := f.set.Hold(f.Context())
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			if err := held.Save(dir); err != nil {
				t.Fatal(err)
			}
			held.Free()
			r, err := f.set.Revive(dir)
			if err != nil {
				t.Fatal(err)
			}
			r.Close()
			if err := f.set.Close("main"); err != nil {
				t.Fatal(err)
			}
			if got := st.Status(); !got.Ended || !got.ShellExited {
				t.Errorf("%+v", got)
			}
		})
		if i == 0 { // what the runtime itself needs is there now
			goroutines, files = runtime.NumGoroutine(), open()
		}
	}
	f := &fixture{T: t}
	f.eventually("goroutines have ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	f.eventually("files are closed", func() bool { return open() <= files })
}

func TestSteps(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		f.expect(s, "echo one; (exit 7)", "one\n", 7)
		f.expect(s, "echo $?; x=5; cd /", "7\n", 0)
		st := f.post(s, "echo $x; pwd; printf 'no newline'")
		out, status := f.end(st)
		if out != "5\n/\nno newline" || status.Cwd != "/" || status.Output != int64(len(out)) || st.ID() != 3 || status.NewShell {
			f.Errorf("printed %q; %+v", out, status)
		}
		if got := st.Wait(f.Context(), status.Output); !got.Ended {
			f.Errorf("%+v", got)
		}
		if same, err := s.Step(0); err != nil || same != st {
			f.Errorf("the newest step is %v, %v", same, err)
		}
		if _, err := s.Step(99); !errdefs.IsNotFound(err) {
			f.Errorf("step 99: %v", err)
		}
		info := s.Info()
		if info.Cwd != "/" || info.Pid == 0 || info.Running || info.Steps != 3 || info.Size != (Size{80, 24}) {
			f.Errorf("%+v", info)
		}
		for range keptSteps {
			f.expect(s, "echo", "\n", 0)
		}
		if _, err := s.Step(3); !errdefs.IsNotFound(err) {
			f.Errorf("step 3 is still there: %v", err)
		}
		if _, err := s.Start(f.Context(), StepSpec{Command: []byte("a\x00b")}); !errdefs.IsInvalidArgument(err) {
			f.Errorf("a command with NUL: %v", err)
		}
		if _, err := s.Start(f.Context(), StepSpec{OutputLimit: 1}); !errdefs.IsInvalidArgument(err) {
			f.Errorf("a small limit: %v", err)
		}
	})
}

// TestGrowing reads output while it grows.
func TestGrowing(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		st := f.post(s, "echo a; read x; echo b; read x; echo c")
		if got := st.Wait(f.Context(), 0); got.Output == 0 {
			f.Fatalf("%+v", got)
		}
		f.waiting(st)
		if _, err := s.Start(f.Context(), StepSpec{}); !errdefs.IsFailedPrecondition(err) {
			f.Errorf("another step: %v", err)
		}
		two := f.open("two")
		f.expect(two, "echo two", "two\n", 0)
		before := st.Status().Output
		if err := s.Send(f.Context(), []byte("\n")); err != nil {
			f.Fatal(err)
		}
		f.eventually("b is printed", func() bool {
			return strings.HasSuffix(f.output(st), "b\n") && st.Wait(f.Context(), before).Output > before
		})
		f.waiting(st) // once more, although nothing says that it did not before
		if err := s.Send(f.Context(), []byte("\n")); err != nil {
			f.Fatal(err)
		}
		if out, status := f.end(st); !strings.HasSuffix(out, "c\n") || status.WaitingForInput {
			f.Errorf("printed %q; %+v", out, status)
		}
		if n := len(f.set.List()); n != 2 {
			f.Errorf("%d sessions", n)
		}
	})
}

func TestShellEnds(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		dir := f.TempDir()
		f.run(s, "cd "+dir+"; export A='it'\\''s'; B=local")
		for _, c := range []struct {
			command, out string
			code         int
			signal       unix.Signal
		}{
			{"echo last; exit 5", "last\n", 5, 0},
			{"kill -9 $$", "", 137, unix.SIGKILL},
			{"exec sh -c 'echo program; exit 6'", "program\n", 6, 0},
			{"set -e; echo before; false; echo after", "before\n", 1, 0},
		} {
			// The shim opens a session before it starts a step.
			if _, err := f.set.Open(f.Context(), "", Launch{}); err != nil {
				f.Fatal(err)
			}
			out, st := f.run(s, c.command)
			if f.shell == "bash" {
				out = strings.TrimSuffix(out, "exit\n") // what "exit" says there
			}
			if out != c.out || st.ExitCode != c.code || !st.ExitKnown || st.Signal != c.signal || !st.ShellExited || st.Cwd != dir {
				f.Errorf("%q printed %q; %+v", c.command, out, st)
			}
			if _, err := f.set.Open(f.Context(), "", Launch{}); err != nil {
				f.Fatal(err)
			}
			out, st = f.run(s, "pwd; echo $A$B")
			if out != dir+"\nit's\n" || !st.NewShell || st.ShellExited {
				f.Errorf("after %q: printed %q; %+v", c.command, out, st)
			}
			if _, st = f.run(s, ":"); st.NewShell {
				f.Error("still a new shell")
			}
		}
	})
}

// TestReaped has shells whose status only their pidfd knows.
func TestReaped(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "dash")
	f.host.reap = true
	s := f.open("")
	_, st := f.run(s, "exit 5")
	if !st.ShellExited || st.ExitKnown && st.ExitCode != 5 {
		t.Errorf("%+v", st)
	}
}

// TestAdopt replaces the shell by another interactive one.
func TestAdopt(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		f.run(s, "cd /; export A=kept; export LC_ALL=C")
		_, st := f.run(s, "exec bash --norc")
		if !st.ShellExited || st.ExitCode != 0 || !st.ExitKnown || st.Cwd != "/" {
			f.Errorf("%+v", st)
		}
		out, st := f.run(s, "echo $A $(pwd) ${BASH_VERSION:+bash}")
		if out != "kept / bash\n" || !st.NewShell {
			f.Errorf("printed %q; %+v", out, st)
		}
		// A program that is replaced is none.
		if out, st = f.run(s, "exec bash -c 'echo no shell; exit 3'"); out != "no shell\n" || st.ExitCode != 3 {
			f.Errorf("printed %q; %+v", out, st)
		}
	})
}

// TestMute has shells that do not report any more.
func TestMute(t *testing.T) {
	for _, c := range []struct{ shell, command string }{
		{"dash", "set -n"}, {"ash", "set -n"}, {"bash", "builtin() { :; }"},
		{"bash", "X=$(head -c 9000000 /dev/zero | tr '\\0' x); export X"},
	} {
		t.Run(c.shell+" "+c.command[:5], func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, c.shell)
			s := f.open("")
			begun := time.Now()
			_, st := f.run(s, c.command)
			if !st.ShellExited || st.ExitKnown || st.Signal != 0 {
				t.Errorf("%+v", st)
			}
			if d := time.Since(begun); d > 5*time.Second {
				t.Errorf("it took %s", d)
			}
			f.expect(s, "echo new", "new\n", 0)
		})
	}
}

// TestReminded has a shell that reports when it is asked again.
func TestReminded(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		f.run(s, "alias case=echo")
		if _, st := f.run(s, "kill -INT $$; echo no"); st.ShellExited || st.ExitCode == 0 {
			f.Errorf("%+v", st)
		}
		// Bash may complain of what else it was asked.
		if out, st := f.run(s, "unalias case; echo same"); !strings.HasSuffix(out, "same\n") || st.ShellExited {
			f.Errorf("printed %q; %+v", out, st)
		}
	})
}

// TestLateReports has reports come once more while the next step begins.
func TestLateReports(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		for i := range 100 {
			st := f.post(s, fmt.Sprintf("echo %d; (exit %d)", i, i))
			again, err := s.present().Dialect.Again(st.token)
			if err != nil {
				f.Fatal(err)
			}
			s.present().send(again)
			s.present().send(again)
			if out, status := f.end(st); out != fmt.Sprintln(i) || status.ExitCode != i {
				f.Errorf("%d: printed %q; %+v", i, out, status)
			}
		}
	})
}

// TestKilledWhileIdle has the shell end between two steps.
func TestKilledWhileIdle(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		for range 20 {
			f.expect(s, "cd /", "", 0)
			if err := unix.Kill(s.present().Pid, unix.SIGKILL); err != nil {
				f.Fatal(err)
			}
			// It is not known when the end is noticed.
			if _, st := f.run(s, "echo a"); !st.ShellExited {
				f.expect(s, "pwd", "/\n", 0)
			}
		}
	})
}

func TestClose(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		st := f.post(s, "trap '' HUP; echo $$; sh -c 'trap \"\" HUP TERM; echo up; while :; do sleep 1; done'")
		f.printed(st, "up")
		var targets []int
		f.eventually("it is in the foreground", func() bool {
			var err error
			_, targets, err = s.present().inForeground()
			return err == nil && len(targets) > 0
		})
		if err := f.set.Close(""); err != nil {
			f.Fatal(err)
		}
		out, status := f.end(st)
		if !status.ShellExited || !strings.Contains(out, "up\n") {
			f.Errorf("printed %q; %+v", out, status)
		}
		f.eventually("its program is gone", func() bool { return errors.Is(unix.Kill(targets[0], 0), unix.ESRCH) })
		if _, err := s.Start(f.Context(), StepSpec{}); !errdefs.IsNotFound(err) {
			f.Errorf("start: %v", err)
		}
		if err := s.Send(f.Context(), []byte("x")); err == nil {
			f.Error("send: no error")
		}
		if err := f.set.Close(""); !errdefs.IsNotFound(err) {
			f.Errorf("close again: %v", err)
		}
		if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
			f.Errorf("directory of session: %v", err)
		}
		f.expect(f.open(""), "echo again", "again\n", 0)
	})
}

// TestContainerEnds has the container die while a step runs, and while a shell
// starts.
func TestContainerEnds(t *testing.T) {
	each(t, func(f *fixture) {
		st := f.post(f.open(""), "sleep 100")
		f.host.mu.Lock()
		f.host.begun = func(ch *Channel) { _ = unix.Kill(ch.Pid, unix.SIGKILL) }
		f.host.mu.Unlock()
		if _, err := f.set.Open(f.Context(), "two", Launch{Shell: f.shell}); err == nil {
			f.Error("opened a session without a shell")
		}
		if _, err := f.set.Get("two"); !errdefs.IsNotFound(err) {
			f.Errorf("session two: %v", err)
		}
		f.host.die()
		if _, status := f.end(st); !status.ShellExited || status.Signal != unix.SIGKILL {
			f.Errorf("%+v", status)
		}
		if err := f.set.CloseAll(); err != nil {
			f.Error(err)
		}
		if _, err := f.set.Open(f.Context(), "", Launch{}); !errdefs.IsFailedPrecondition(err) {
			f.Errorf("open: %v", err)
		}
	})
}

func TestNames(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "bash")
	for _, name := range []string{"../x", ".x", "a b", strings.Repeat("x", 65), "a/b"} {
		if _, err := f.set.Open(f.Context(), name, Launch{}); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", name, err)
		}
	}
	f.open("")
	if _, err := f.set.Open(f.Context(), "main", Launch{Cwd: "/"}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("open as another: %v", err)
	}
	if s, err := f.set.Get("none"); !errdefs.IsNotFound(err) {
		t.Errorf("%v, %v", s, err)
	}
	if _, err := f.set.Open(f.Context(), "bad", Launch{Shell: "/nonexistent"}); err == nil {
		t.Error("opened a session with no shell")
	}
	if n := len(f.set.List()); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

func TestService(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		f.run(s, "cd /; export A=kept")
		svc, st, err := f.set.StartService(f.Context(), "", StepSpec{Command: []byte("echo $A; pwd; nohup sleep 100 2>/dev/null")})
		if err != nil {
			f.Fatal(err)
		}
		f.printed(st, "kept\n/\n")
		if i := svc.Info(); i.Name != "service-1" || len(i.Service) == 0 || !i.Running {
			f.Errorf("%+v", i)
		}
		f.expect(s, "echo free", "free\n", 0)
		if err := f.set.Close(svc.Name()); err != nil {
			f.Error(err)
		}
		if _, status := f.end(st); !status.ShellExited {
			f.Errorf("%+v", status)
		}
	})
}

// TestBackground has output of background processes come to the step that runs,
// and always to the screen.
func TestBackground(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		fifo := filepath.Join(f.TempDir(), "fifo")
		f.run(s, "mkfifo "+fifo+"; { read x <"+fifo+"; echo back $x; } &")
		st := f.post(s, "read y; echo $y")
		f.waiting(st)
		if err := os.WriteFile(fifo, []byte("ground\n"), 0); err != nil {
			f.Fatal(err)
		}
		f.printed(st, "back ground")
		if err := s.Send(f.Context(), []byte("end\n")); err != nil {
			f.Fatal(err)
		}
		f.end(st)
		f.run(s, "{ read x <"+fifo+"; echo back $x; } &")
		if err := os.WriteFile(fifo, []byte("alone\n"), 0); err != nil {
			f.Fatal(err)
		}
		f.eventually("it is on the screen", func() bool {
			b := make([]byte, 64<<10)
			n, _, _ := s.Screen().ReadAt(b, 0)
			return strings.Contains(string(b[:n]), "back ground") && strings.Contains(string(b[:n]), "back alone")
		})
		f.expect(s, "echo clean", "clean\n", 0)
	})
}

// TestFlood has a background process print without an end.
func TestFlood(t *testing.T) {
	each(t, func(f *fixture) {
		s := f.open("")
		st := f.start(s, StepSpec{Command: []byte("yes & p=$!; echo $p"), OutputLimit: minOutputLimit})
		select {
		case <-st.ended:
		case <-time.After(patience):
			f.Fatal("the step does not end")
		}
		for range 3 {
			one := f.start(s, StepSpec{Command: []byte("(exit 3)"), OutputLimit: minOutputLimit})
			select {
			case <-one.ended:
			case <-time.After(patience):
				f.Fatal("the next step does not end")
			}
			if got := one.Status(); got.ExitCode != 3 {
				f.Errorf("%+v", got)
			}
		}
		kill := f.start(s, StepSpec{Command: []byte("kill $p; wait"), OutputLimit: minOutputLimit})
		<-kill.ended
	})
}

func TestBigOutput(t *testing.T) {
	each(t, func(f *fixture) {
		const limit, size = 64 << 10, 1 << 20
		file := filepath.Join(f.TempDir(), "big")
		var all strings.Builder
		for i := 0; all.Len() < size; i++ {
			fmt.Fprintf(&all, "line %d\r\n", i)
		}
		want := all.String()
		if err := os.WriteFile(file, []byte(want), 0o600); err != nil {
			f.Fatal(err)
		}
		s := f.open("")
		f.expect(s, "cat "+file, want, 0)
		st := f.start(s, StepSpec{Command: []byte("cat " + file), OutputLimit: limit})
		<-st.ended
		status := st.Status()
		if status.Output != int64(len(want)) || status.Dropped != int64(len(want)-limit) {
			f.Errorf("%+v", status)
		}
		head, tail := make([]byte, limit/2), make([]byte, limit/2)
		n, from, err := st.Output(head, 0)
		if err != nil || from != 0 || string(head[:n]) != want[:limit/2] {
			f.Errorf("the head is %d bytes from %d, %v", n, from, err)
		}
		n, from, err = st.Output(tail, limit/2)
		if err != nil || from != int64(len(want)-limit/2) || string(tail[:n]) != want[len(want)-limit/2:] {
			f.Errorf("the tail is %d bytes from %d, %v", n, from, err)
		}
	})
}

// TestConcurrent uses one session from all sides at once.
func TestConcurrent(t *testing.T) {
	each(t, func(f *fixture) {
		done := make(chan error, 8)
		for i := range 4 {
			go func() {
				done <- func() error {
					for j := range 10 {
						s, err := f.set.Open(f.Context(), "", Launch{})
						if err != nil {
							return err
						}
						st, err := s.Start(f.Context(), StepSpec{Command: fmt.Appendf(nil, "echo %d %d; [ %d != 3 ] || exit 3", i, j, j)})
						if errdefs.IsFailedPrecondition(err) || errdefs.IsUnavailable(err) {
							continue
						}
						if err != nil {
							return err
						}
						ctx, cancel := context.WithTimeout(f.Context(), patience)
						for got := st.Wait(ctx, -1); !got.Ended; got = st.Wait(ctx, -1) {
							if ctx.Err() != nil {
								cancel()
								return fmt.Errorf("%d %d: %+v", i, j, got)
							}
						}
						cancel()
					}
					return nil
				}()
			}()
			go func() {
				done <- func() error {
					for range 20 {
						h, err := f.set.Hold(f.Context())
						if err != nil {
							return err
						}
						h.Free()
						for _, s := range f.set.List() {
							s.Info()
							_ = s.Resize(f.Context(), Size{Columns: 100, Rows: 30})
						}
					}
					return nil
				}()
			}()
		}
		for range 8 {
			select {
			case err := <-done:
				if err != nil {
					f.Error(err)
				}
			case <-time.After(patience):
				f.Fatal("it stands still")
			}
		}
	})
}

// TestNoHistory has shells leave no file behind, however they end.
func TestNoHistory(t *testing.T) {
	each(t, func(f *fixture) {
		want := "\n"
		if f.shell == "bash" {
			// What bash itself says is still there for the user.
			want = filepath.Join(f.host.dir, ".bash_history") + "\n"
		}
		for _, end := range []string{"exit 0", "exec true", "kill -TERM $$; kill -HUP $$", ""} {
			s := f.open("")
			f.expect(s, "cd /; echo secret >/dev/null", "", 0)
			if f.shell != "ash" { // whose HISTFILE depends on how it was built
				f.expect(s, "echo $HISTFILE", want, 0)
			}
			if end != "" {
				if _, st := f.run(s, end); !st.ShellExited {
					f.Errorf("%q: %+v", end, st)
				}
			}
			if err := f.set.Close(""); err != nil {
				f.Fatal(err)
			}
			files, err := os.ReadDir(f.host.dir)
			if err != nil || len(files) > 0 {
				f.Errorf("after %q: %v, %v", end, files, err)
			}
		}
	})
}

func needs(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("needs %s", program)
	}
}
