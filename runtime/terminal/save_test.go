package terminal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestUnreadInput takes out what was typed and puts it back, as it was and
// without an echo.
func TestUnreadInput(t *testing.T) {
	for _, c := range []struct{ name, mode, typed, want string }{
		{"lines", "stty echo", "one\ntwo\n", "one\ntwo\n"},
		{"part", "stty echo", "one\ntwo", "one\ntwo and more\n"},
		{"erased", "stty echo", "onx\x7fe\ntwo\x16\x7f", "one\ntwo\x7f and more\n"},
		{"end", "stty echo", "one\x04\x04", "one"},
		{"signs", "stty echo", "a\x16\x03b\x16\x15c\x16\rd", "a\x03b\x15c\rd and more\n"},
		{"raw", "stty raw", "one\rtwo\x03\x7f\x04", "one\rtwo\x03\x7f\x04 and more\n"},
		{"full", "stty -echo", strings.Repeat("y\n", 2000) + "z", strings.Repeat("y\n", 2000) + "z and more\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "dash")
			s := f.open("")
			fifo, out := filepath.Join(t.TempDir(), "fifo"), filepath.Join(t.TempDir(), "out")
			count := ""
			if c.mode == "stty raw" {
				count = "head -c " + strconv.Itoa(len(c.want)) + " >"
			} else {
				count = "cat >"
			}
			st := f.post(s, "mkfifo "+fifo+"; "+c.mode+"; echo up; read x <"+fifo+"; "+count+out)
			f.printed(st, "up\n")
			p := s.present().pty
			if _, err := p.master.Write([]byte(c.typed)); err != nil {
				t.Fatal(err)
			}
			if c.mode == "stty echo" {
				f.eventually("it is echoed", func() bool { return st.Status().Output >= int64(len("up\n")+3) })
			}
			var before int64
			for i := range 4 {
				typed, err := p.takeInput()
				if err != nil || len(typed) == 0 {
					t.Fatalf("took %q, %v", typed, err)
				}
				if again, err := p.takeInput(); err != nil || len(again) > 0 {
					t.Fatalf("took %q once more, %v", again, err)
				}
				if err := errors.Join(p.putInput(typed), p.drain()); err != nil {
					t.Fatal(err)
				}
				if i == 0 { // all has been echoed that is to be
					before = st.Status().Output
				}
			}
			if got := st.Status().Output; got != before {
				t.Errorf("there is an echo: %q", f.output(st))
			}
			if err := os.WriteFile(fifo, []byte("go\n"), 0); err != nil {
				t.Fatal(err)
			}
			rest := strings.HasSuffix(c.want, " and more\n")
			if rest {
				if _, err := p.master.Write([]byte(" and more\n")); err != nil {
					t.Fatal(err)
				}
			}
			if c.mode != "stty raw" && c.name != "end" {
				if _, err := p.master.Write([]byte("\x04")); err != nil {
					t.Fatal(err)
				}
			}
			if c.name == "end" {
				f.end(st)
			}
			f.end(st)
			if b, err := os.ReadFile(out); err != nil || string(b) != c.want {
				t.Errorf("read %q, want %q, %v", b, c.want, err)
			}
		})
	}
}

// itself finds processes of this machine.
func itself(inner int) (int, error) { return inner, nil }

// nobody finds no process.
func nobody(int) (int, error) { return 0, errors.New("no such process") }

func (f *fixture) hold() *Held {
	f.Helper()
	h, err := f.set.Hold(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	return h
}

// freeze has a session's processes stand still.
func (f *fixture) freeze(s *Session, sig unix.Signal) {
	f.Helper()
	pid := s.present().Pid
	all := []int{pid}
	_, targets, err := s.present().inForeground()
	if err != nil {
		f.Fatal(err)
	}
	all = append(all, targets...)
	if sig == unix.SIGCONT {
		slices.Reverse(all) // the shell must not see a job that is stopped
	}
	for _, p := range all {
		if err := unix.Kill(p, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			f.Fatal(err)
		}
		if p = max(p, -p); sig == unix.SIGSTOP {
			f.eventually("it stands still", func() bool {
				b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
				return err == nil && strings.Contains(string(b), ") T ")
			})
		}
	}
}

// TestCheckpoint goes on in place: same terminals, same pipes, same steps.
func TestCheckpoint(t *testing.T) {
	each(t, func(f *fixture) {
		s, idle := f.open(""), f.open("idle")
		f.run(idle, "x=kept")
		st := f.post(s, "echo one; sh -c 'read x; echo $x'; echo two; (exit 3)")
		f.waiting(st)
		for i := range 3 {
			h := f.hold()
			if err := h.Save(f.TempDir()); err != nil {
				f.Fatal(err)
			}
			if i != 1 { // as if the dump had failed
				if err := h.Resume(itself); err != nil {
					f.Fatal(err)
				}
			}
			h.Free()
			h.Free()
		}
		f.expect(idle, "echo $x", "kept\n", 0)
		if err := s.Send(f.Context(), []byte("typed\n")); err != nil {
			f.Fatal(err)
		}
		out, status := f.end(st)
		if out != "one\ntyped\ntyped\ntwo\n" || status.ExitCode != 3 {
			f.Errorf("printed %q; %+v", out, status)
		}
		f.expect(s, "echo go on", "go on\n", 0)
		// A shell that is not there any more is an end.
		st = f.post(s, "read x")
		f.waiting(st)
		h := f.hold()
		if err := h.Save(f.TempDir()); err != nil {
			f.Fatal(err)
		}
		if err := h.Resume(nobody); err == nil {
			f.Error("went on without a shell")
		}
		f.host.die()
		h.Free()
		if _, status := f.end(st); !status.ShellExited {
			f.Errorf("%+v", status)
		}
	})
}

// TestEndsBlock has the container's ends wait like those of a new shell.
func TestEndsBlock(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "dash")
	f.open("")
	h := f.hold()
	defer h.Free()
	ends, err := h.Ends()
	if err != nil || len(ends) != 3 || len(Terminals(ends)) != 1 {
		t.Fatalf("%d ends, %v", len(ends), err)
	}
	for _, p := range ends {
		err := control(p.File, func(fd int) error {
			flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			if flags&unix.O_NONBLOCK != 0 {
				t.Error("it does not block")
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// leave lets a held set's shells go without a word, and makes the ways of the
// revival lead to them: what comes from its pipes goes to the old ones, and the
// other way round. That is what new pipes would be to a restored shell. Their
// terminal stays the old one.
func (f *fixture) leave(h *Held, r *Revival) {
	f.Helper()
	for i, l := range h.lines() {
		commands, err := duplicate(l.Commands)
		if err != nil {
			f.Fatal(err)
		}
		reports, err := duplicate(l.Reports)
		if err != nil {
			f.Fatal(err)
		}
		old, err := h.Ends()
		if err != nil {
			f.Fatal(err)
		}
		// What has not been read comes again.
		pipe := int(old[3*i+1].File.Fd())
		if err := unix.SetNonblock(pipe, true); err != nil {
			f.Fatal(err)
		}
		buf := make([]byte, 64<<10)
		for n := 1; n > 0; {
			n, _ = unix.Read(pipe, buf)
		}
		if err := unix.SetNonblock(pipe, false); err != nil {
			f.Fatal(err)
		}
		from, err := duplicate(r.ends[3*i+1].File)
		if err != nil {
			f.Fatal(err)
		}
		to, err := duplicate(r.ends[3*i+2].File)
		if err != nil {
			f.Fatal(err)
		}
		ch := r.channels[h.sessions[i].name]
		f.checkTerminal(ch.Master, l.pty)
		// What was typed comes again, too.
		if _, err := l.pty.takeInput(); err != nil {
			f.Fatal(err)
		}
		ch.Master.Close()
		if ch.Master, err = duplicate(l.Master); err != nil {
			f.Fatal(err)
		}
		if err := l.close(); err != nil {
			f.Fatal(err)
		}
		go relay(commands, from)
		go relay(to, reports)
	}
}

// checkTerminal compares a new terminal with the one that was saved.
func (f *fixture) checkTerminal(master *os.File, old *pty) {
	f.Helper()
	p, err := newPTY(master, func([]byte) {})
	if err != nil {
		f.Fatal(err)
	}
	defer p.slave.Close()
	size, err := p.size()
	was, werr := old.size()
	if err = errors.Join(err, werr); err != nil || size != was {
		f.Errorf("size %v, was %v, %v", size, was, err)
	}
	after, err := mode(p.slave)
	before, berr := mode(old.slave)
	if err = errors.Join(err, berr); err != nil || *after != *before {
		f.Errorf("mode %+v, was %+v, %v", after, before, err)
	}
}

func relay(to, from *os.File) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err == nil {
			_, err = to.Write(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// TestRevive brings sessions back in another set, with an idle shell, a command
// that was not read yet, and a running step.
func TestRevive(t *testing.T) {
	each(t, func(f *fixture) {
		s, idle := f.open(""), f.open("idle")
		unread := f.open("unread")
		f.run(idle, "x=kept; cd /; (exit 4)")
		st := f.start(s, StepSpec{Command: []byte("echo one; sh -c 'read x; echo $x'; echo two; (exit 3)"), Timeout: time.Hour, OutputLimit: minOutputLimit})
		f.waiting(st)
		f.run(unread, "y=5; stty -echo rows 33")
		f.freeze(unread, unix.SIGSTOP)
		f.post(unread, "echo "+strings.Repeat("a", 3000)+" $y")
		f.freeze(s, unix.SIGSTOP)
		h := f.hold()
		s.present().reading.Lock()
		s.present().feed([]byte("\x00sf1\x00" + st.token + "\x00"))
		s.present().reading.Unlock()
		if _, err := s.present().Master.Write([]byte("ty")); err != nil {
			f.Fatal(err)
		}
		dir := f.TempDir()
		if err := h.Save(dir); err != nil {
			f.Fatal(err)
		}
		f.checkSaved(dir)
		next := NewSet(filepath.Join(f.TempDir(), "next"), f.host)
		r, err := next.Revive(dir)
		if err != nil {
			f.Fatal(err)
		}
		defer r.Close()
		f.leave(h, r)
		if err := r.Rollback(itself); err != nil {
			f.Fatal(err)
		}
		h.Free()
		f.forget()
		f.set = next
		for _, name := range []string{"unread", "main"} {
			s, err := f.set.Get(name)
			if err != nil {
				f.Fatal(err)
			}
			f.freeze(s, unix.SIGCONT)
		}
		if next.Generation() != 1 {
			f.Errorf("generation %d", next.Generation())
		}
		f.checkRevived()
	})
}

// forget has the first set give up its shells without an end to them.
func (f *fixture) forget() {
	for _, s := range f.set.List() {
		s.mu.Lock()
		st := s.current
		s.line, s.current = nil, nil
		s.mu.Unlock()
		if st != nil {
			st.end(func(st *Status) { st.Stale = true })
		}
	}
	if err := f.set.CloseAll(); err != nil {
		f.Error(err)
	}
}

func (f *fixture) checkSaved(dir string) {
	f.Helper()
	b, err := os.ReadFile(filepath.Join(dir, savedFile))
	var all saved
	if err == nil {
		err = json.Unmarshal(b, &all)
	}
	if err != nil || len(all.Sessions) != 3 {
		f.Fatalf("%d sessions, %v", len(all.Sessions), err)
	}
	for _, s := range all.Sessions {
		n := 0
		for _, p := range s.Line.Unread {
			n += len(p)
		}
		running := s.Name == "main"
		if (n > 3000) != (s.Name == "unread") || (len(s.Line.Partial) > 30) != running || string(s.Line.Typed) != map[bool]string{true: "ty"}[running] {
			f.Errorf("session %q: %d bytes unread, %q partial, %q typed", s.Name, n, s.Line.Partial, s.Line.Typed)
		}
		if f.shell != "bash" && n > 3000 && len(s.Line.Unread) < 4 {
			f.Errorf("%d packets", len(s.Line.Unread))
		}
	}
}

func (f *fixture) checkRevived() {
	f.Helper()
	get := func(name string) (*Session, *Step) {
		f.Helper()
		s, err := f.set.Get(name)
		if err != nil {
			f.Fatal(err)
		}
		st, err := s.Step(0)
		if err != nil {
			return s, nil
		}
		return s, st
	}
	idle, _ := get("idle")
	f.expect(idle, "echo $? $x; pwd", "4 kept\n/\n", 0)
	_, st := get("unread")
	if out, status := f.end(st); out != strings.Repeat("a", 3000)+" 5\n" || status.ExitCode != 0 || status.Generation != 1 {
		f.Errorf("printed %q; %+v", out, status)
	}
	s, st := get("")
	if d := st.Status().Duration; st.spec.Timeout != time.Hour || d < 50*time.Millisecond {
		f.Errorf("%+v, for %s", st.spec, d)
	}
	f.waiting(st)
	if err := s.Send(f.Context(), []byte("ped\n")); err != nil {
		f.Fatal(err)
	}
	out, status := f.end(st)
	if out != "one\ntyped\ntyped\ntwo\n" || status.ExitCode != 3 || status.ShellExited {
		f.Errorf("printed %q; %+v", out, status)
	}
	f.expect(s, "echo new", "new\n", 0)
	f.run(s, "exit 2")
	f.expect(s, "echo other", "other\n", 0)
}

// TestReviveFails ends the step of a shell that was not restored.
func TestReviveFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "dash")
	st := f.post(f.open(""), "cd /; sleep 100")
	h := f.hold()
	dir := t.TempDir()
	if err := h.Save(dir); err != nil {
		t.Fatal(err)
	}
	h.Free()
	r, err := f.set.Revive(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Rollback(nobody); err == nil {
		t.Error("no error")
	}
	if got := st.Status(); !got.Stale || !got.Ended {
		t.Errorf("%+v", got)
	}
	s, err := f.set.Get("")
	if err != nil {
		t.Fatal(err)
	}
	lost, err := s.Step(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, status := f.end(lost); !status.ShellExited || status.Generation != 1 {
		t.Errorf("%+v", status)
	}
	if _, status := f.run(s, "echo new"); !status.NewShell || status.ExitCode != 0 {
		t.Errorf("%+v", status)
	}
	if _, err := f.set.Revive(filepath.Join(t.TempDir(), "none")); err != nil {
		t.Errorf("a node without sessions: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, savedFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := f.set.Revive(dir); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a broken file: %v", err)
	}
}
