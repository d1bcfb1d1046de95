package terminal

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// TestMain keeps what the test itself has inherited from the shells.
func TestMain(m *testing.M) {
	_ = unix.CloseRange(3, ^uint(0)>>33, unix.CLOSE_RANGE_CLOEXEC)
	os.Exit(m.Run())
}

// host starts shells on the machine itself. Like some containers' init it does
// not reap them before the end, unless reap is set.
type host struct {
	dir  string
	reap bool

	operation sync.Mutex // held while the container is acquired

	mu      sync.Mutex
	dead    bool
	begun   func(ch *Channel) // is called with each new shell
	started []*exec.Cmd
	reaping sync.WaitGroup
}

func (h *host) Acquire(context.Context) (func(), error) {
	h.operation.Lock()
	return h.operation.Unlock, nil
}

func (h *host) StartShell(_ context.Context, want Launch) (_ *Channel, retErr error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		return nil, errors.New("container has ended")
	}
	name := want.Shell
	if name == "" {
		name = "bash"
	}
	path, dialect := name, shell.ForPath(name)
	if filepath.Base(name) == "ash" {
		path = "busybox"
	}
	path, err := exec.LookPath(path)
	if err != nil {
		return nil, err
	}
	ch := &Channel{Path: path, Dialect: dialect}
	slave, commands, reports, err := h.files(ch, want.Size)
	defer func() {
		for _, f := range []*os.File{slave, commands, reports} {
			if f != nil {
				f.Close()
			}
		}
		if retErr != nil {
			ch.close()
		}
	}()
	if err != nil {
		return nil, err
	}
	cmd := command(dialect, path, filepath.Base(name), slave, commands, reports)
	if cmd.Dir = want.Cwd; want.Cwd == "" {
		cmd.Dir = h.dir
	}
	cmd.Env = append(append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + h.dir, "LC_ALL=C", "TERM=dumb"}, want.Env...), shell.Env()...)
	var pidfd int
	cmd.SysProcAttr.PidFD = &pidfd
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h.started = append(h.started, cmd)
	if h.reap {
		h.reaping.Go(func() { _ = cmd.Wait() })
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		return nil, err
	}
	ch.Exit, ch.Pid, ch.Inner = os.NewFile(uintptr(pidfd), "pidfd"), cmd.Process.Pid, cmd.Process.Pid
	if h.begun != nil {
		h.begun(ch)
	}
	return ch, nil
}

func (h *host) files(ch *Channel, size Size) (slave, commands, reports *os.File, err error) {
	if ch.Master, slave, err = Open(size, os.Getuid()); err != nil {
		return nil, nil, nil, err
	}
	if err = Plain(slave); err == nil {
		commands, ch.Commands, err = NewPipe(Writing)
	}
	if err == nil {
		ch.Reports, reports, err = NewPipe(Reading)
	}
	return slave, commands, reports, err
}

// Processes returns all descendants of the shells, and what they have left.
func (h *host) Processes() ([]int, error) {
	h.mu.Lock()
	sessions := map[int]bool{}
	for _, cmd := range h.started {
		sessions[cmd.Process.Pid] = true
	}
	h.mu.Unlock()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if sid, err := unix.Getsid(pid); err == nil && sessions[sid] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func command(d shell.Dialect, path, arg0 string, slave, commands, reports *os.File) *exec.Cmd {
	cmd := &exec.Cmd{
		Path: path, Args: append([]string{arg0}, d.Args()...),
		Stdin: slave, Stdout: slave, Stderr: slave,
		ExtraFiles:  []*os.File{commands, reports},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 2},
	}
	if d.CommandFD() == 0 {
		cmd.Stdin, cmd.ExtraFiles[0] = commands, nil
	}
	return cmd
}

// die ends all shells, as the end of a container does.
func (h *host) die() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dead = true
	for _, cmd := range h.started {
		_ = cmd.Process.Kill()
	}
}

// fixture is a set of sessions of one shell.
type fixture struct {
	*testing.T
	shell string
	host  *host
	set   *Set
}

// newFixture returns sessions of a shell, which end with the test.
func newFixture(t *testing.T, shell string) *fixture {
	t.Helper()
	program := shell
	if shell == "ash" {
		program = "busybox"
	}
	if _, err := exec.LookPath(program); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("needs %s", program)
		}
		t.Skipf("needs %s", program)
	}
	h := &host{dir: t.TempDir()}
	f := &fixture{T: t, shell: shell, host: h, set: NewSet(filepath.Join(t.TempDir(), "sessions"), h)}
	t.Cleanup(func() {
		if err := f.set.CloseAll(); err != nil {
			t.Errorf("close all: %v", err)
		}
		h.die()
		h.reaping.Wait()
		for _, cmd := range h.started {
			_ = cmd.Wait() // it was killed, or waited for
		}
	})
	return f
}

// each runs a test with all shells.
func each(t *testing.T, fn func(f *fixture)) {
	for _, name := range []string{"bash", "dash", "ash"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fn(newFixture(t, name))
		})
	}
}

func (f *fixture) open(name string) *Session {
	f.Helper()
	s, err := f.set.Open(f.Context(), name, Launch{Shell: f.shell})
	if err != nil {
		f.Fatal(err)
	}
	return s
}

func (f *fixture) start(s *Session, spec StepSpec) *Step {
	f.Helper()
	st, err := s.Start(f.Context(), spec)
	if err != nil {
		f.Fatalf("%q: %v", spec.Command, err)
	}
	return st
}

func (f *fixture) post(s *Session, command string) *Step {
	f.Helper()
	return f.start(s, StepSpec{Command: []byte(command)})
}

// end waits for a step's end, whatever it waits for in between.
func (f *fixture) end(st *Step) (string, Status) {
	f.Helper()
	select {
	case <-st.ended:
	case <-time.After(patience):
		f.Fatalf("%q does not end: %+v; it printed %q", st.spec.Command, st.Status(), f.output(st))
	}
	return f.output(st), st.Status()
}

// waiting waits until a step waits for input.
func (f *fixture) waiting(st *Step) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	if got := st.Wait(ctx, -1); !got.WaitingForInput || got.Ended {
		f.Fatalf("%q: %+v; it printed %q", st.spec.Command, got, f.output(st))
	}
}

// printed waits until a step has printed a text.
func (f *fixture) printed(st *Step, text string) {
	f.Helper()
	f.eventually("it prints "+text, func() bool { return strings.Contains(f.output(st), text) })
}

func (f *fixture) output(st *Step) string {
	f.Helper()
	var all []byte
	buf := make([]byte, 1000)
	for {
		n, from, err := st.Output(buf, int64(len(all)))
		if errors.Is(err, io.EOF) {
			return string(all)
		}
		if err != nil || from != int64(len(all)) {
			f.Fatalf("read output at %d: from %d, %v", len(all), from, err)
		}
		all = append(all, buf[:n]...)
	}
}

func (f *fixture) run(s *Session, command string) (string, Status) {
	f.Helper()
	return f.end(f.post(s, command))
}

// expect runs a step that leaves the shell alive.
func (f *fixture) expect(s *Session, command, out string, code int) {
	f.Helper()
	got, st := f.run(s, command)
	if got != out || st.ExitCode != code || !st.ExitKnown || st.ShellExited {
		f.Errorf("%q printed %q, want %q; %+v, want %d", command, got, out, st, code)
	}
}

// eventually waits until ok.
func (f *fixture) eventually(what string, ok func() bool) {
	f.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			f.Fatalf("it takes too long until %s", what)
		}
	}
}

// stays checks that ok stays true for a while.
func (f *fixture) stays(what string, d time.Duration, ok func() bool) {
	f.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		if !ok() {
			f.Fatalf("it does not stay that %s", what)
		}
	}
}
