package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
)

// Main is the session that is meant when none is named.
const Main = "main"

// maxSessions bounds the sessions of a container, services included.
const maxSessions = 128

var nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Set are the sessions of one container.
type Set struct {
	dir  string
	host Host

	mu sync.Mutex
	// The rest is guarded by mu.

	sessions map[string]*Session
	// generation counts the restores to a node.
	generation uint64
	services   uint64 // the number of the newest service
	// left are terminals without a shell.
	left   []*leftTerminal
	closed bool
}

// NewSet returns a set without sessions, which keeps its files in dir.
func NewSet(dir string, host Host) *Set {
	return &Set{dir: dir, host: host, sessions: map[string]*Session{}}
}

// Generation counts the restores that the sessions went through.
func (t *Set) Generation() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.generation
}

// Get returns a session; "" is Main.
func (t *Set) Get(name string) (*Session, error) {
	if name == "" {
		name = Main
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.sessions[name]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("session %q: %w", name, errdefs.ErrNotFound)
}

// Open returns a session with a running shell. It makes the session if there is
// none; what l wants of one that is there is refused.
func (t *Set) Open(ctx context.Context, name string, l Launch) (*Session, error) {
	s, err := t.getOrMake(name, l)
	if err != nil {
		return nil, err
	}
	if err := s.Open(ctx); err != nil {
		return nil, errors.Join(err, t.dropUnused(s))
	}
	return s, nil
}

func (t *Set) getOrMake(name string, l Launch) (*Session, error) {
	if name == "" {
		name = Main
	}
	if !nameRE.MatchString(name) {
		return nil, fmt.Errorf("session name %q: letters, digits, \".\", \"_\" and \"-\", at most 64, are possible: %w", name, errdefs.ErrInvalidArgument)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.sessions[name]; s != nil {
		if l.Shell != "" || l.Cwd != "" || l.User != "" || len(l.Env) > 0 {
			return nil, fmt.Errorf("session %q is there, with its own shell, directory, user and environment: %w", name, errdefs.ErrAlreadyExists)
		}
		return s, nil
	}
	return t.makeLocked(name, l)
}

func (t *Set) makeLocked(name string, l Launch) (*Session, error) {
	if t.closed {
		return nil, fmt.Errorf("container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	if len(t.sessions) >= maxSessions {
		return nil, fmt.Errorf("container has %d sessions: close some: %w", len(t.sessions), errdefs.ErrResourceExhausted)
	}
	s, err := newSession(name, filepath.Join(t.dir, name), t.host, l, t.generation)
	if err != nil {
		return nil, err
	}
	s.keep = t.keepTerminal
	t.sessions[name] = s
	return s, nil
}

// dropUnused takes away a session that never had a shell.
func (t *Set) dropUnused(s *Session) error {
	s.mu.Lock()
	used := s.line != nil || s.last > 0
	s.mu.Unlock()
	if used {
		return nil
	}
	return t.Close(s.name)
}

// StartService runs a command in a session of its own, which begins where
// another session is: with its shell, directory and exported variables.
func (t *Set) StartService(ctx context.Context, from string, spec StepSpec) (*Session, *Step, error) {
	parent, err := t.Open(ctx, from, Launch{})
	if err != nil {
		return nil, nil, err
	}
	t.mu.Lock()
	t.services++
	s, err := t.makeLocked(fmt.Sprintf("service-%d", t.services), Launch{})
	t.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	parent.mu.Lock()
	want, state, cwd := parent.want, parent.state, parent.cwd
	parent.mu.Unlock()
	s.mu.Lock()
	s.want, s.state, s.cwd, s.service = want, state, cwd, spec.Command
	s.mu.Unlock()
	st, err := s.Start(ctx, spec)
	if err != nil {
		return nil, nil, errors.Join(err, t.Close(s.name))
	}
	return s, st, nil
}

// List returns the sessions by name.
func (t *Set) List() []*Session {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*Session, 0, len(t.sessions))
	for _, s := range t.sessions {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *Session) int { return strings.Compare(a.name, b.name) })
	return all
}

// Close ends a session. It waits while the container is being checkpointed.
func (t *Set) Close(name string) error {
	s, err := t.Get(name)
	if err != nil {
		return err
	}
	if err := s.waitFree(context.Background()); err != nil {
		return err
	}
	s.mu.Unlock()
	t.mu.Lock()
	if t.sessions[s.name] != s {
		t.mu.Unlock()
		return fmt.Errorf("session %q: %w", s.name, errdefs.ErrNotFound)
	}
	delete(t.sessions, s.name)
	t.mu.Unlock()
	return s.close()
}

// CloseAll ends all sessions, of a container that has ended.
func (t *Set) CloseAll() error {
	t.mu.Lock()
	t.closed = true
	all := t.sessions
	t.sessions = map[string]*Session{}
	t.mu.Unlock()
	var errs []error
	for _, s := range all {
		errs = append(errs, s.close())
	}
	return errors.Join(append(errs, t.closeLeft(), os.RemoveAll(t.dir))...)
}
