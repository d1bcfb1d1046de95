package terminal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// Revival are the sessions of a node that is about to be restored.
type Revival struct {
	set   *Set
	dir   string
	saved saved
	// channels have the new terminals and pipes by the session's name.
	channels map[string]*Channel
	left     []*os.File // masters
	ends     []End
}

// Revive reads the sessions of the process images in dir and makes terminals and
// pipes for them.
// One of Resume and Close must be called.
func (t *Set) Revive(dir string) (_ *Revival, retErr error) {
	r := &Revival{set: t, dir: dir, channels: map[string]*Channel{}}
	b, err := os.ReadFile(filepath.Join(dir, savedFile))
	if errors.Is(err, os.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r.saved)
	}
	if err != nil {
		return nil, fmt.Errorf("read sessions of process images: %w", err)
	}
	defer func() {
		if retErr != nil {
			r.Close()
		}
	}()
	for _, sv := range r.saved.Left {
		master, err := r.makeTerminal(sv)
		if err != nil {
			return nil, err
		}
		r.left = append(r.left, master)
	}
	for _, s := range r.saved.Sessions {
		if s.Line == nil {
			continue
		}
		if err := r.makeChannel(s); err != nil {
			return nil, fmt.Errorf("make terminal and pipes of session %q: %w", s.Name, err)
		}
	}
	return r, nil
}

// makeChannel makes a session's terminal and pipes, and puts back what was in
// the pipes.
func (r *Revival) makeChannel(s savedSession) error {
	ch := &Channel{Path: s.Line.Path, Dialect: s.Line.Dialect, Inner: s.Line.Inner}
	r.channels[s.Name] = ch
	var err error
	if ch.Master, err = r.makeTerminal(s.Line.Terminal); err != nil {
		return err
	}
	commands, commandsW, err := NewPipe(Writing)
	if err != nil {
		return err
	}
	ch.Commands = commandsW
	r.ends = append(r.ends, End{Key: s.Line.Commands, File: commands})
	reports, reportsW, err := NewPipe(Reading)
	if err != nil {
		return err
	}
	ch.Reports = reports
	r.ends = append(r.ends, End{Key: s.Line.Reports, File: reportsW})
	if err := setPackets(ch); err != nil {
		return err
	}
	for _, p := range s.Line.Unread {
		if _, err := ch.Commands.Write(p); err != nil {
			return err
		}
	}
	return nil
}

// makeTerminal makes a terminal in the place of one that was saved.
func (r *Revival) makeTerminal(sv savedTerminal) (master *os.File, _ error) {
	master, slave, err := Open(sv.Size, sv.Owner)
	if err != nil {
		return nil, err
	}
	r.ends = append(r.ends, End{Key: sv.Key, File: slave})
	if err := setMode(slave, &sv.Mode); err != nil {
		return nil, errors.Join(err, master.Close())
	}
	return master, nil
}

// Ends returns the container's ends of them.
func (r *Revival) Ends() []End { return r.ends }

// Close gives up what Resume has not used.
func (r *Revival) Close() {
	for _, e := range r.ends {
		e.File.Close()
	}
	for _, ch := range r.channels {
		_ = ch.close() // nothing was done with it yet
	}
	for _, m := range r.left {
		m.Close()
	}
	r.ends, r.channels, r.left = nil, nil, nil
}

// Rollback makes the node's sessions those of a container that was restored in
// place. The sessions that there were before are gone, and who waits for their
// steps is told so: a new generation begins.
func (r *Revival) Rollback(find func(inner int) (pid int, err error)) error {
	t := r.set
	t.mu.Lock()
	before := t.sessions
	t.sessions = map[string]*Session{}
	t.generation++
	t.mu.Unlock()
	var errs []error
	for _, s := range before {
		errs = append(errs, s.abandon())
	}
	return errors.Join(append(errs, t.closeLeft(), r.Resume(find))...)
}

// Resume makes the node's sessions those of a container that has just begun.
func (r *Revival) Resume(find func(inner int) (pid int, err error)) error {
	defer r.Close() // what is not used
	r.set.mu.Lock()
	r.set.services = r.saved.Services
	r.set.mu.Unlock()
	var errs []error
	for _, m := range r.left {
		errs = append(errs, r.set.addLeft(m, func([]byte) {}))
	}
	r.left = nil
	for _, sv := range r.saved.Sessions {
		if err := r.resume(sv, find); err != nil {
			errs = append(errs, fmt.Errorf("bring back session %q: %w", sv.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (r *Revival) resume(sv savedSession, find func(int) (int, error)) error {
	s, err := r.make(sv)
	if err != nil {
		return err
	}
	if sv.Line == nil {
		return nil
	}
	ch := r.channels[sv.Name]
	delete(r.channels, sv.Name)
	l, err := s.reach(ch, find)
	if err != nil {
		s.loseShell()
		return err
	}
	l.replaced.Store(sv.Line.Replaced)
	s.mu.Lock()
	st := s.current
	s.mu.Unlock()
	if st != nil {
		l.expect(st.token)
	}
	l.reading.Lock()
	l.feed(sv.Line.Partial)
	l.reading.Unlock()
	err = l.pty.putInput(sv.Line.Typed)
	s.goOn(l)
	if st != nil {
		go s.watch(st)
	}
	return err
}

// make makes a session as it was. There may be one already, for who wants to
// open it waits for the container.
func (r *Revival) make(sv savedSession) (*Session, error) {
	t := r.set
	t.mu.Lock()
	s, err := t.sessions[sv.Name], error(nil)
	if s == nil {
		s, err = t.makeLocked(sv.Name, sv.Want)
	}
	t.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.want, s.state, s.cwd, s.last, s.lost, s.service = sv.Want, sv.State, sv.Cwd, sv.Last, sv.Lost, sv.Service
	if sv.Step == nil {
		return s, nil
	}
	return s, s.reviveStepLocked(sv.Step, spoolFile(r.dir, sv.Name))
}

// loseShell is for a session whose shell was there and cannot be reached.
func (s *Session) loseShell() {
	s.mu.Lock()
	st, cwd := s.current, s.cwd
	s.current, s.lost = nil, true
	s.mu.Unlock()
	if st != nil {
		st.end(func(st *Status) { st.ShellExited, st.Cwd = true, cwd })
	}
}

func (s *Session) reviveStepLocked(sv *savedStep, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	out, err := continueSpool(filepath.Join(s.dir, strconv.FormatUint(s.last, 10)), sv.Spec.OutputLimit, sv.Output, io.Reader(f))
	if err != nil {
		return err
	}
	now := time.Now()
	st := newStep(s.name, s.last, s.generation, sv.Spec, out, now.Add(-sv.Elapsed))
	st.token, st.printed = sv.Token, now.Add(-sv.Quiet)
	st.status.TimedOut, st.status.NewShell = sv.TimedOut, sv.NewShell
	s.steps = append(s.steps, st)
	s.current = st
	return nil
}
