package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

const (
	// keptSteps is how many steps of a session can be read after they have ended.
	keptSteps = 16
	// screenLimit is how much of a session's whole output is kept.
	screenLimit = 1 << 20
)

// Session is one persistent shell.
type Session struct {
	name string
	dir  string // holds the spools
	host Host
	// keep keeps the terminal of a shell that has ended for who still has it.
	keep func(l *line, sink func([]byte)) error
	// service is the command of a background service.
	service []byte
	// screen is all that came from the terminal, in steps and between them.
	screen *Spool

	mu sync.Mutex
	// The rest is guarded by mu. A line is replaced only by who has acquired the
	// container, or after its shell has ended.

	want       Launch
	line       *line // nil without a shell
	generation uint64
	// current is the step that runs.
	current *Step
	steps   []*Step // the kept ones, oldest first
	last    uint64  // the id of the newest step
	// state is what the last report said; cwd is where the shell was then.
	state shell.State
	cwd   string
	// lost says that a shell has ended since the last step began.
	lost bool
	// held says that nothing may be written: the container is being dumped.
	held    bool
	release chan struct{}
	// freeTyping ends what hold has done to who types.
	freeTyping func()
	closed     bool
}

// Info describes a session.
type Info struct {
	Name       string
	Shell      string // its path in the container; empty before the first
	Pid        int    // in the container; 0 without a shell
	Cwd        string
	Generation uint64
	Steps      uint64 // the id of the newest step
	Running    bool
	Size       Size
	Service    []byte // the command, for a background service
}

func newSession(name, dir string, host Host, want Launch, generation uint64) (*Session, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of session: %w", err)
	}
	screen, err := newSpool(filepath.Join(dir, "screen"), screenLimit)
	if err != nil {
		return nil, err
	}
	return &Session{name: name, dir: dir, host: host, want: want, generation: generation, screen: screen}, nil
}

// Name returns the session's name.
func (s *Session) Name() string { return s.name }

// Info describes the session as it is now.
func (s *Session) Info() Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := Info{Name: s.name, Cwd: s.cwd, Generation: s.generation, Steps: s.last, Running: s.current != nil, Size: s.want.Size, Service: s.service}
	if l := s.line; l != nil {
		i.Shell, i.Pid = l.Path, l.Inner
		if dir := directory(l.Pid); dir != "" {
			i.Cwd = dir
		}
		if size, err := l.pty.size(); err == nil {
			i.Size = size
		}
	}
	return i
}

// Start begins a step. It starts a shell if there is none. It fails with
// ErrFailedPrecondition while another step runs.
func (s *Session) Start(ctx context.Context, spec StepSpec) (*Step, error) {
	l, err := s.lockReady(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	token, err := shell.NewToken()
	if err != nil {
		return nil, err
	}
	text, err := l.Dialect.Step(string(spec.Command), token, &s.state)
	if err != nil {
		return nil, err
	}
	id := s.last + 1
	out, err := newSpool(filepath.Join(s.dir, strconv.FormatUint(id, 10)), spec.OutputLimit)
	if err != nil {
		return nil, err
	}
	st := newStep(s.name, id, s.generation, spec, out, time.Now())
	st.token, st.status.NewShell = token, s.lost
	s.last, s.lost = id, false
	s.keepLocked(st)
	s.current = st
	l.expect(st.token)
	l.send(text)
	go s.watch(st)
	return st, nil
}

// attempts is how many shells are started for one step that end at once.
const attempts = 3

// lockReady returns a living shell that can be given a step. On success mu is
// the caller's.
func (s *Session) lockReady(ctx context.Context) (*line, error) {
	for range attempts {
		if err := s.ensure(ctx); err != nil {
			return nil, err
		}
		if err := s.waitFree(ctx); err != nil {
			return nil, err
		}
		if err := s.idleLocked(); err != nil {
			s.mu.Unlock()
			return nil, err
		}
		if l := s.line; l != nil && !l.gone() {
			return l, nil
		}
		s.mu.Unlock()
	}
	return nil, fmt.Errorf("shell of session %q has just ended: try again: %w", s.name, errdefs.ErrUnavailable)
}

// waitFree takes mu at a moment when the session is not held.
func (s *Session) waitFree(ctx context.Context) error {
	for {
		s.mu.Lock()
		if !s.held {
			return nil
		}
		release := s.release
		s.mu.Unlock()
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Session) idleLocked() error {
	switch {
	case s.closed:
		return fmt.Errorf("session %q is closed: %w", s.name, errdefs.ErrNotFound)
	case s.current != nil:
		return fmt.Errorf("session %q is busy with step %d: wait for it, send it input, interrupt it, or use another session: %w",
			s.name, s.current.id, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// keepLocked adds a step and forgets the oldest.
func (s *Session) keepLocked(st *Step) {
	s.steps = append(s.steps, st)
	for len(s.steps) > keptSteps {
		if err := s.steps[0].out.remove(); err != nil {
			log.L.WithError(err).Warn("remove output of step")
		}
		s.steps = s.steps[1:]
	}
}

// Step finds a step by its id; 0 is the newest.
func (s *Session) Step(id uint64) (*Step, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id == 0 {
		id = s.last
	}
	for _, st := range s.steps {
		if st.id == id {
			return st, nil
		}
	}
	return nil, fmt.Errorf("step %d of session %q: only the last %d are kept: %w", id, s.name, keptSteps, errdefs.ErrNotFound)
}

// Send types input.
func (s *Session) Send(ctx context.Context, p []byte) error {
	for {
		if err := s.waitFree(ctx); err != nil {
			return err
		}
		l, st := s.line, s.current
		s.mu.Unlock()
		if l == nil {
			return fmt.Errorf("session %q has no shell: %w", s.name, errdefs.ErrFailedPrecondition)
		}
		n, err := l.typeIn(ctx, p)
		if p = p[n:]; errors.Is(err, errHeld) {
			continue // the rest goes to the same shell, or to none
		}
		if st != nil && err == nil {
			st.typed()
		}
		return err
	}
}

// Signal sends a signal to what runs in the foreground, as the terminal's keys
// do.
func (s *Session) Signal(ctx context.Context, sig unix.Signal) error {
	if err := s.waitFree(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if s.line == nil {
		return fmt.Errorf("session %q has no shell: %w", s.name, errdefs.ErrFailedPrecondition)
	}
	return s.line.signalForeground(sig)
}

// Resize sets the size of the terminal's window.
func (s *Session) Resize(ctx context.Context, size Size) error {
	if err := s.waitFree(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	s.want.Size = size
	if s.line == nil {
		return nil
	}
	return s.line.pty.resize(size)
}

// Screen is what came from the terminal, in steps and between them.
func (s *Session) Screen() *Spool { return s.screen }

// printed takes what comes from the terminal.
func (s *Session) printed(l *line, p []byte) {
	_, _ = s.screen.Write(p) // never fails
	s.mu.Lock()
	st := s.current
	present := s.line == l
	s.mu.Unlock()
	if st != nil && present {
		st.print(p)
	}
}

// Open starts the shell if there is none.
func (s *Session) Open(ctx context.Context) error { return s.ensure(ctx) }

// ensure starts a shell if there is none.
func (s *Session) ensure(ctx context.Context) error {
	if there, err := s.hasShell(ctx); there || err != nil {
		return err
	}
	release, err := s.host.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if there, err := s.hasShell(ctx); there || err != nil {
		return err // somebody else was quicker
	}
	s.mu.Lock()
	want, state := s.want, s.state
	if s.cwd != "" {
		want.Cwd = s.cwd
	}
	s.mu.Unlock()
	ch, err := s.host.StartShell(ctx, want)
	if err != nil {
		return err
	}
	l, err := newLine(ch, s)
	if err != nil {
		return errors.Join(err, ch.close())
	}
	l.serve()
	first, err := l.begin(ctx, state)
	if err != nil {
		return errors.Join(fmt.Errorf("start shell %q: %w", ch.Path, err), l.hangUp(nil))
	}
	// What it has printed, like a banner, belongs to no step.
	if err := l.pty.drain(); err != nil {
		log.G(ctx).WithError(err).WithField("session", s.name).Warn("read terminal of new shell")
	}
	s.mu.Lock()
	if !s.closed {
		s.line, s.state = l, *first
		s.mu.Unlock()
		if l.gone() {
			// Its end may have been told before it was the session's.
			s.exited(l)
		}
		return nil
	}
	s.mu.Unlock()
	return errors.Join(fmt.Errorf("session %q is closed: %w", s.name, errdefs.ErrNotFound), l.hangUp(nil))
}

// hasShell says whether there is a living shell. It waits until everything is
// done about one that has ended.
func (s *Session) hasShell(ctx context.Context) (bool, error) {
	for {
		s.mu.Lock()
		l, closed := s.line, s.closed
		s.mu.Unlock()
		switch {
		case closed:
			return false, fmt.Errorf("session %q is closed: %w", s.name, errdefs.ErrNotFound)
		case l == nil:
			return false, nil
		case !l.gone():
			return true, nil
		}
		select {
		case <-l.settled:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// close ends the shell and whatever runs on its terminal.
func (s *Session) close() error {
	return s.end(func(st *Status) { st.ShellExited = true })
}

// abandon ends a session whose processes have gone with the state that the
// container was in.
func (s *Session) abandon() error {
	return s.end(func(st *Status) { st.Stale = true })
}

func (s *Session) end(last func(*Status)) error {
	s.mu.Lock()
	l, st, steps := s.line, s.current, s.steps
	s.line, s.current, s.steps, s.closed = nil, nil, nil, true
	if s.held {
		s.freeLocked()
	}
	s.mu.Unlock()
	var errs []error
	if l != nil {
		errs = append(errs, l.hangUp(func() error { return s.keep(l, func([]byte) {}) }))
	}
	if st != nil {
		st.end(last)
	}
	for _, kept := range steps {
		if kept == st {
			// Who waits for it still reads what it has printed.
			errs = append(errs, kept.out.unlink())
		} else {
			errs = append(errs, kept.out.remove())
		}
	}
	s.screen.end()
	errs = append(errs, s.screen.remove(), os.RemoveAll(s.dir))
	return errors.Join(errs...)
}

func (s *Session) freeLocked() {
	s.held = false
	if s.freeTyping != nil {
		s.freeTyping()
		s.freeTyping = nil
	}
	close(s.release)
}
