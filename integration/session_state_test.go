package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
)

// TestTenCycles takes a session through ten checkpoints and restores in a row,
// fewer of them for the smaller shells, and looks each time at everything that
// a shell and a terminal have.
func TestTenCycles(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.sh(persist)
		if err := s.c.ResizeSession(s.e.ctx, "", 133, 37); err != nil {
			s.e.Fatal(err)
		}
		s.want("stty -echoe intr ^Y", 0, "")
		show := look + "; hi; stty -a; stty size; sleep 0 | cat; (exit 42)"
		s.sh("(exit 42)")
		before := s.sh(show).out
		if !strings.Contains(before, "37 133") || !strings.Contains(before, "intr = ^Y") {
			s.e.Errorf("the terminal shows %q", before)
		}
		cycles := s.code(10, 4, 4)
		for i := 1; i <= cycles; i++ {
			s.cycle(fmt.Sprintf("n%d", i))
			s.e.equal(fmt.Sprintf("cycle %d", i), s.sh(show).out, before)
			if g := s.info().Generation; g != uint64(i) {
				s.e.Errorf("cycle %d: generation %d", i, g)
			}
		}
	})
}

// TestTenCyclesOfPython has somebody type to an interpreter in between, and see
// what it answers.
func TestTenCyclesOfPython(t *testing.T) {
	e := withDebian(t)
	id := e.run(e.name(), testbed.Debian, "sleep", "100000")
	s := e.sessions(id).in("py")
	s.open("bash")
	s.until(s.start("stty -echoe; python3 -q -i"), ">>> ")
	s.typeAt(">>> ", "x = 40; import os, termios")
	groups := e.sh(id, foreground)
	attributes := s.typeAt(">>> ", "print(termios.tcgetattr(0), os.getpgrp(), os.get_terminal_size())")
	for i := 1; i <= 10; i++ {
		s.cycle(fmt.Sprintf("n%d", i))
		out := s.typeAt(">>> ", "x += 1; print('x is', x)")
		if !strings.Contains(out, fmt.Sprintf("x is %d", 40+i)) {
			t.Errorf("cycle %d: python shows %q", i, out)
		}
		e.equal("settings", s.typeAt(">>> ", "print(termios.tcgetattr(0), os.getpgrp(), os.get_terminal_size())"), attributes)
		e.equal("groups", e.sh(id, foreground), groups)
	}
	s.send("exit(3)\n")
	if r := s.wait(s.again(&api.StepResponse{Session: "py", Step: 1})); r.ExitCode != 3 {
		t.Errorf("python has ended with %d, want 3: %v", r.ExitCode, r)
	}
}

// TestTenCyclesOfReader has the foreground read each time.
func TestTenCyclesOfReader(t *testing.T) {
	e := withDebian(t)
	s := e.shelled(subjects[0])
	r := s.start("while read -r x; do echo \"got $x\"; done; (exit 4)")
	want := ""
	for i := 1; i <= 10; i++ {
		s.untilInput(r)
		s.cycle(fmt.Sprintf("n%d", i))
		r = s.again(r)
		line := fmt.Sprintf("line %d\n", i)
		s.send(line)
		want += line + "got " + line // with the terminal's echo
		if out := s.until(r, "got "+line); strings.ReplaceAll(out, "\r", "") != want {
			t.Errorf("cycle %d: the step has printed %q, want %q", i, out, want)
		}
	}
	s.send("\x04")
	if got := s.wait(r); got.ExitCode != 4 {
		t.Errorf("the step at the end of its input: %v", got)
	}
}

// typeAt types a line and waits until the prompt is back.
func (s *sessions) typeAt(prompt, line string) string {
	s.e.Helper()
	offset := s.end()
	s.send(line + "\n")
	return s.screen(offset, prompt)
}

// TestTypeAhead types a complete and an incomplete line that nobody has read at
// the checkpoint. Both are read after it: in place, after a restore, in a fork.
func TestTypeAhead(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("cd /tmp; mkfifo go", 0, "")
		s.e.checkpoint(s.box, "first")
		r := s.start("read -r x <go; read -r a; read -r b; echo \"$x <$a> <$b>\"; (exit 8)")
		s.send("complete\ninc")
		s.e.checkpoint(s.box, "typed")
		s.goOn(r, "one")
		s.e.restore(s.box, "typed")
		stale(s.sessions, r)
		s.goOn(s.again(r), "two")
		for _, f := range s.e.fork(s.box+"@typed", "-n", "2") {
			in := s.e.sessions(f.ID)
			in.goOn(in.again(r), f.ID)
		}
	})
}

// again is the same step in another generation.
func (s *sessions) again(r *api.StepResponse) *api.StepResponse {
	s.e.Helper()
	return &api.StepResponse{Session: r.Session, Step: r.Step, Generation: s.in(r.Session).info().Generation}
}

func (s *sessions) goOn(r *api.StepResponse, word string) {
	s.e.Helper()
	s.e.sh(s.box, "echo "+word+" >/tmp/go")
	s.untilInput(r)
	s.in(r.Session).send("omplete\n")
	if got := s.wait(r); !strings.HasSuffix(got.out, word+" <complete> <incomplete>\n") || got.ExitCode != 8 {
		s.e.Errorf("the step that reads: %v %q", got, got.out)
	}
}

// foreground shows the process groups of a session of bash, and which is in
// front: its leader tells.
const foreground = `ps -e -o sid,pgid,pid,comm | grep -E ' (bash|sleep)$'; ps -o tpgid= -C bash`

// TestB06ForegroundInForks checkpoints a session while a command has the
// foreground. The key ends it in each fork on its own, and the groups and the
// foreground are the same everywhere.
func TestB06ForegroundInForks(t *testing.T) {
	e := withDebian(t)
	s := e.shelled(subjects[0])
	r := s.start("echo begin; sleep 1000; echo code $?")
	s.until(r, "begin\n")
	groups := e.sh(s.box, foreground)
	if n := strings.Count(groups, "\n"); n != 3 { // init, the shell, its command; in front
		t.Fatalf("the session shows %q", groups)
	}
	e.checkpoint(s.box, "n")
	e.equal("groups after a checkpoint", e.sh(s.box, foreground), groups)
	forks := e.fork(s.box+"@n", "-n", "3")
	s.interrupt(r)
	e.restore(s.box, "n")
	for _, f := range append(forks, forkOf(s.box)) {
		in := e.sessions(f.ID)
		e.equal("groups in "+f.ID, e.sh(f.ID, foreground), groups)
		in.interrupt(in.again(r))
		in.want("jobs; echo ready", 0, "ready\n")
	}
}

// TestB06ControllingTerminal opens the terminal by the name that all programs
// have for theirs. Of those that run at a checkpoint only the shell can do that
// afterwards: a restore has no way to give others a controlling terminal. What
// the shell starts then has it.
func TestB06ControllingTerminal(t *testing.T) {
	e := withDebian(t)
	s := e.shelled(subjects[0])
	r := s.start(`python3 -c '
import os
while True:
	input()
	try:
		with open("/dev/tty") as tty:
			print("terminal", os.tcgetpgrp(tty.fileno()) == os.getpgrp(), flush=True)
	except OSError as err:
		print("terminal", err, flush=True)
'`)
	for _, node := range []string{"", "n1", "n2"} {
		if node != "" {
			s.cycle(node)
			r = s.again(r)
		}
		offset := s.end()
		s.send("\n")
		if out := s.screen(offset, "terminal "); node == "" && !strings.Contains(out, "terminal True") {
			t.Errorf("in the foreground: %q", out)
		}
	}
	// Python does not notice a signal that comes just before it waits.
	s.untilInput(r)
	s.send("\x03")
	if got := s.wait(r); got.ExitCode != 130 {
		t.Errorf("the interrupted step: %v", got)
	}
	s.want("sh -c 'test -t 3 3</dev/tty'", 0, "")
}

// interrupt types the key that ends the step's command.
func (s *sessions) interrupt(r *api.StepResponse) {
	s.e.Helper()
	s.in(r.Session).send("\x03")
	if got := s.wait(r); got.ExitCode != 130 || !strings.HasPrefix(got.out, "begin\n") || strings.Contains(got.out, "code 0") {
		s.e.Errorf("the interrupted step: %v %q", got, got.out)
	}
}

// TestForegroundRefused has shells with job control that hold /dev/tty open,
// which CRIU cannot dump while a command has the foreground: refused, and
// everything runs on.
func TestForegroundRefused(t *testing.T) {
	onShells(t, func(s *shelled) {
		if s.bash() {
			return // which holds no such thing; see TestB06ForegroundInForks
		}
		s.want("set -m", 0, "")
		r := s.start("sh -c 'echo begin; read -r x; echo \"got $x\"; exit 5'")
		s.until(r, "begin\n")
		before := s.e.writable(s.box).Upperdir
		for range 3 {
			_, err := s.c.Checkpoint(s.e.ctx, "never", nil)
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "/dev/tty") {
				s.e.Errorf("checkpoint: %v, want a refusal that tells of /dev/tty", err)
			}
			s.e.equal("layer", s.e.writable(s.box).Upperdir, before)
		}
		s.send("word\n")
		if got := s.wait(r); !strings.HasSuffix(got.out, "got word\n") || got.ExitCode != 5 {
			s.e.Errorf("the step that reads: %v %q", got, got.out)
		}
		step := s.start("sh -c 'echo begin; exec sleep 1000'")
		s.until(step, "begin\n")
		if _, err := s.c.Checkpoint(s.e.ctx, "never", nil); !errdefs.IsFailedPrecondition(err) {
			s.e.Errorf("checkpoint: %v, want a refusal", err)
		}
		s.interrupt(step)
		if n := len(s.e.nodes(s.box)); n != 0 {
			s.e.Errorf("the refusals have left %d nodes", n)
		}
		s.e.checkpoint(s.box, "idle")
	})
}

// TestStepGoesOn checkpoints a container while steps run. Their waiters notice
// nothing; after a restore the old ones are told, and the new ones get all of
// the result; and each fork has a result of its own.
func TestStepGoesOn(t *testing.T) {
	e := withDebian(t)
	s := e.shelled(subjects[0])
	s.want("cd /tmp; mkfifo go", 0, "")
	r := s.start("seq 1000; read -r x <go; echo \"end $x\"; (exit 9)")
	s.until(r, "\n1000\n")
	var all strings.Builder
	for i := 1; i <= 1000; i++ {
		fmt.Fprintln(&all, i)
	}
	waiting := s.waitAside(r)
	e.checkpoint(s.box, "n")
	finish := func(in *sessions, word string) {
		t.Helper()
		step := in.again(r)
		e.sh(in.box, "echo "+word+" >/tmp/go")
		if got := in.wait(step); got.out != all.String()+"end "+word+"\n" || got.ExitCode != 9 || got.Step != r.Step {
			t.Errorf("step in %s: %v, %d bytes of output", word, got, len(got.out))
		}
		in.want("echo $x", 0, word+"\n")
	}
	finish(s.sessions, "here")
	if err := <-waiting; err != nil {
		t.Errorf("the waiter of the whole time: %v", err)
	}
	e.restore(s.box, "n")
	waiting = s.waitAside(s.again(r))
	e.restore(s.box, "n")
	if err := <-waiting; !errors.Is(err, api.ErrStale) {
		t.Errorf("the waiter at the restore: %v, want %v", err, api.ErrStale)
	}
	stale(s.sessions, r)
	forks := e.fork(s.box+"@n", "-n", "2")
	for i, f := range append(forks, forkOf(s.box)) {
		finish(e.sessions(f.ID), fmt.Sprintf("fork-%d", i))
	}
}

// TestLimitGoesOn checkpoints while a step with a time limit runs. The limit goes
// on counting from where it was, after a restore and in each fork.
func TestLimitGoesOn(t *testing.T) {
	e := withDebian(t)
	s := e.shelled(subjects[0])
	const limit = 4 * time.Second
	r, err := s.c.StartStep(e.ctx, &api.StartStepRequest{Command: []byte("echo begin; sleep 1000"), TimeoutMs: uint64(limit.Milliseconds())})
	if err != nil {
		t.Fatal(err)
	}
	s.until(r, "begin\n")
	e.checkpoint(s.box, "n")
	ends := func(in *sessions) {
		t.Helper()
		got := in.wait(in.again(r))
		took := time.Duration(got.DurationUs) * time.Microsecond
		// An interactive bash ends the line that an interrupt came in.
		if !got.TimedOut || got.out != "begin\n\n" || got.ExitCode != 130 || took < limit || took > limit+time.Second {
			t.Errorf("the limited step in %s ends after %v: %v %q", in.box, took, got, got.out)
		}
		in.want("echo ready", 0, "ready\n")
	}
	ends(s.sessions)
	forks := e.fork(s.box+"@n", "-n", "2")
	e.restore(s.box, "n")
	for _, f := range append(forks, forkOf(s.box)) {
		ends(e.sessions(f.ID))
	}
}

// waitAside waits for a step's end while the test goes on.
func (s *sessions) waitAside(r *api.StepResponse) <-chan error {
	s.e.Helper()
	done := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		close(begun)
		for {
			got, err := s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{Session: r.Session, Step: r.Step, Generation: r.Generation, NoOutput: true, WaitMs: 60_000})
			if err != nil || got.Ended {
				done <- err
				return
			}
		}
	}()
	<-begun
	return done
}

// TestSessionClosed closes a session, and kills the shim, while a step is
// waited for.
func TestSessionClosed(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id).in("closing")
	r := s.start("trap '' HUP TERM; echo begin; sleep 1000")
	s.until(r, "begin\n")
	waiting := s.waitAside(r)
	if err := s.c.CloseSession(e.ctx, "closing"); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err != nil && !errdefs.IsNotFound(err) {
		t.Errorf("the waiter: %v, want that the step has ended or the session is not found", err)
	}
	if err := s.c.CloseSession(e.ctx, "closing"); !errdefs.IsNotFound(err) {
		t.Errorf("close again: %v", err)
	}
	s.want("echo new $PPID", 0, "new 1\n")
	r = s.start("echo begin; sleep 1000")
	waiting = s.waitAside(r)
	s.until(r, "begin\n")
	e.killShim(id)
	if err := <-waiting; !errors.Is(err, api.ErrGone) || !errdefs.IsUnavailable(err) {
		t.Errorf("the waiter of a shim that was killed: %v, want %v", err, api.ErrGone)
	}
	e.noTask(id)
	ctx, cancel := context.WithTimeout(e.ctx, waitTimeout)
	defer cancel()
	if c, err := api.Dial(ctx, api.Config{State: e.ns.State(), Namespace: e.ns.NS, ContainerID: id}); err == nil {
		c.Close()
		t.Error("a shim that was killed can be reached")
	}
}
