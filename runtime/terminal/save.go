package terminal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// Sessions in a checkpoint.
//
// CRIU dumps the shells like all other processes. Their terminals are of the
// container's devpts: CRIU makes them again with their settings, and hands out
// the masters. Their pipes lead to us: a restore is given other ends. What CRIU
// does not keep is saved beside its images:
//
//	what was typed and is not read yet
//	what is in the command pipe, and the part of a report that has been read
//	where the running step is, and its output so far
//
// A checkpoint in place goes on with the same pipes and the same steps. A
// restore to a node, and a fork, make everything anew from what was saved.

// savedFile lies with the process images.
const savedFile = "sessions.json"

type saved struct {
	Services uint64         `json:"services"`
	Sessions []savedSession `json:"sessions"`
}

type savedSession struct {
	Name    string      `json:"name"`
	Want    Launch      `json:"want"`
	State   shell.State `json:"state"`
	Cwd     string      `json:"cwd"`
	Last    uint64      `json:"last"`
	Lost    bool        `json:"lost,omitempty"`
	Service []byte      `json:"service,omitempty"`
	Line    *savedLine  `json:"line,omitempty"`
	Step    *savedStep  `json:"step,omitempty"`
}

type savedLine struct {
	Path     string        `json:"path"`
	Dialect  shell.Dialect `json:"dialect"`
	Inner    int           `json:"pid"`
	Terminal int           `json:"terminal"` // its index
	Commands string        `json:"commands"` // "pipe:[inode]"
	Reports  string        `json:"reports"`
	Replaced bool          `json:"replaced,omitempty"`
	// Unread holds the command pipe, a write each; Partial the beginning of a
	// report; Typed the terminal's input.
	Unread  [][]byte `json:"unread,omitempty"`
	Partial []byte   `json:"partial,omitempty"`
	Typed   []byte   `json:"typed,omitempty"`
}

type savedStep struct {
	Spec     StepSpec      `json:"spec"`
	Token    string        `json:"token"`
	Elapsed  time.Duration `json:"elapsed"`
	Quiet    time.Duration `json:"quiet"`
	TimedOut bool          `json:"timed_out,omitempty"`
	NewShell bool          `json:"new_shell,omitempty"`
	Output   int64         `json:"output"`
}

// Pipe is a container's end of a pipe that leads to a shell.
type Pipe struct {
	Key  string // "pipe:[inode]", as the images call it
	File *os.File
}

// Held are the sessions of a container that is being checkpointed or restored:
// nothing is typed or started in them until Free.
type Held struct {
	set      *Set
	sessions []*Session
	pipes    []Pipe
	// typed is what Save has taken from the terminals.
	typed map[*line][]byte
}

// Hold holds all sessions, and waits until each shell has read what it was
// given. Free must be called.
func (t *Set) Hold(ctx context.Context) (*Held, error) {
	h := &Held{set: t, typed: map[*line][]byte{}}
	for _, s := range t.List() {
		if err := s.hold(ctx); err != nil {
			h.Free()
			return nil, err
		}
		h.sessions = append(h.sessions, s)
	}
	return h, nil
}

// Free lets the sessions go on.
func (h *Held) Free() {
	for _, p := range h.pipes {
		p.File.Close()
	}
	h.pipes = nil
	for _, s := range h.sessions {
		s.free()
	}
	h.sessions = nil
}

// lines returns the sessions' shells.
func (h *Held) lines() []*line {
	var all []*line
	for _, s := range h.sessions {
		if s.line != nil {
			all = append(all, s.line)
		}
	}
	return all
}

// Pipes returns the container's ends of the pipes of the running shells. They
// are open until Free: a restore in place goes on with them.
func (h *Held) Pipes() ([]Pipe, error) {
	if h.pipes != nil {
		return h.pipes, nil
	}
	for _, l := range h.lines() {
		for _, end := range []struct {
			ours  *os.File
			flags int
		}{{l.Commands, os.O_RDONLY}, {l.Reports, os.O_WRONLY}} {
			p, err := otherEnd(end.ours, end.flags)
			if err != nil {
				return nil, err
			}
			h.pipes = append(h.pipes, p)
		}
	}
	return h.pipes, nil
}

// otherEnd opens the other end of a pipe.
func otherEnd(ours *os.File, flags int) (Pipe, error) {
	var p Pipe
	err := control(ours, func(fd int) (err error) {
		if p.Key, err = pipeKey(fd); err != nil {
			return err
		}
		p.File, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return p, fmt.Errorf("open the other end of a pipe: %w", err)
	}
	return p, nil
}

func pipeKey(fd int) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	return fmt.Sprintf("pipe:[%d]", st.Ino), nil
}

// Save writes the sessions of a frozen container into the directory of its
// process images. It takes out what was typed; PutBack gives that back if the
// container runs on after all.
func (h *Held) Save(dir string) error {
	var all saved
	h.set.mu.Lock()
	all.Services = h.set.services
	h.set.mu.Unlock()
	for _, s := range h.sessions {
		one, err := h.save(s, dir)
		if err != nil {
			return errors.Join(fmt.Errorf("save session %q: %w", s.name, err), h.PutBack())
		}
		all.Sessions = append(all.Sessions, one)
	}
	b, err := json.Marshal(all)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, savedFile), b, 0o600)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("save sessions: %w", err), h.PutBack())
	}
	return nil
}

func (h *Held) save(s *Session, dir string) (savedSession, error) {
	if s.line != nil {
		// What has been printed and reported belongs to the time before.
		if err := s.line.drain(); err != nil {
			return savedSession{}, err
		}
	}
	s.mu.Lock()
	out := savedSession{
		Name: s.name, Want: s.want, State: s.state, Cwd: s.cwd,
		Last: s.last, Lost: s.lost, Service: s.service,
	}
	l, st := s.line, s.current
	s.mu.Unlock()
	if l != nil {
		var err error
		if out.Line, err = h.saveLine(l); err != nil {
			return out, err
		}
	}
	if st != nil {
		var err error
		if out.Step, err = saveStep(st, spoolFile(dir, s.name)); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (h *Held) saveLine(l *line) (*savedLine, error) {
	out := &savedLine{Path: l.Path, Dialect: l.Dialect, Inner: l.Inner, Replaced: l.replaced.Load(), Partial: l.partial()}
	var err error
	if out.Terminal, err = l.pty.index(); err != nil {
		return nil, err
	}
	pipes, err := h.Pipes()
	if err != nil {
		return nil, err
	}
	for i, other := range h.lines() {
		if other == l {
			out.Commands, out.Reports = pipes[2*i].Key, pipes[2*i+1].Key
			if out.Unread, err = peekPipe(pipes[2*i].File); err != nil {
				return nil, err
			}
		}
	}
	if out.Typed, err = l.pty.takeInput(); err != nil {
		return nil, err
	}
	h.typed[l] = out.Typed
	return out, nil
}

func spoolFile(dir, session string) string { return filepath.Join(dir, "session-"+session+".out") }

func saveStep(st *Step, file string) (*savedStep, error) {
	status := st.Status()
	out := &savedStep{
		Spec: st.spec, Token: st.token, Elapsed: status.Duration, Quiet: st.quiet(),
		TimedOut: status.TimedOut, NewShell: status.NewShell, Output: status.Output,
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	return out, errors.Join(st.out.copyTo(f), f.Close())
}

// peekPipe copies what is in a pipe and leaves it there. In packet mode each
// element is a packet.
func peekPipe(r *os.File) ([][]byte, error) {
	pr, pw, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer pr.Close()
	defer pw.Close()
	size, err := unix.FcntlInt(r.Fd(), unix.F_GETPIPE_SZ, 0)
	if err == nil {
		_, err = unix.FcntlInt(pw.Fd(), unix.F_SETPIPE_SZ, size)
	}
	if err != nil {
		return nil, fmt.Errorf("size pipe: %w", err)
	}
	n, err := unix.Tee(int(r.Fd()), int(pw.Fd()), size, unix.SPLICE_F_NONBLOCK)
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	if err != nil {
		return nil, os.NewSyscallError("tee", err)
	}
	var all [][]byte
	buf := make([]byte, size)
	for left := int(n); left > 0; {
		m, err := unix.Read(int(pr.Fd()), buf)
		if err != nil {
			return nil, os.NewSyscallError("read", err)
		}
		all = append(all, append([]byte(nil), buf[:m]...))
		left -= m
	}
	return all, nil
}

// PutBack gives the terminals what Save has taken from them.
func (h *Held) PutBack() error {
	var errs []error
	for l, typed := range h.typed {
		errs = append(errs, l.pty.putInput(typed))
	}
	h.typed = nil
	return errors.Join(errs...)
}

// Resume goes on with the sessions after a checkpoint in place: each shell is
// another process of the host on another terminal. masters are the terminals'
// by index; those that are used are taken out. find finds a process of the
// container.
func (h *Held) Resume(masters map[int]*os.File, find func(inner int) (pid int, err error)) error {
	var errs []error
	for _, s := range h.sessions {
		old := s.line
		if old == nil {
			continue
		}
		typed := h.typed[old]
		if err := s.resume(old, masters, find, typed); err != nil {
			errs = append(errs, fmt.Errorf("go on with session %q: %w", s.name, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Session) resume(old *line, masters map[int]*os.File, find func(int) (int, error), typed []byte) error {
	index, err := old.pty.index()
	if err != nil {
		return err
	}
	ch := &Channel{Path: old.Path, Dialect: old.Dialect, Inner: old.Inner}
	if ch.Commands, err = duplicate(old.Commands); err == nil {
		ch.Reports, err = duplicate(old.Reports)
	}
	if err != nil {
		return err
	}
	master := masters[index]
	delete(masters, index)
	l, err := s.reach(ch, master, find)
	if err != nil {
		return err
	}
	l.replaced.Store(old.replaced.Load())
	if err := old.close(); err != nil {
		return err
	}
	l.parser = old.parser // it may have the beginning of a report
	return s.goOn(l, typed)
}

// reach completes a channel to a restored shell.
func (s *Session) reach(ch *Channel, master *os.File, find func(int) (int, error)) (*line, error) {
	if master == nil {
		return nil, fmt.Errorf("its terminal was not restored: %w", errdefs.ErrDataLoss)
	}
	pid, err := find(ch.Inner)
	if err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	ch.Pid, ch.Exit = pid, os.NewFile(uintptr(fd), "pidfd")
	if ch.Master, err = waitable(master); err != nil {
		return nil, err
	}
	return newLine(ch, s)
}

// waitable makes reads of a file wait in the runtime instead of the kernel, so
// that closing it ends them. It consumes f.
func waitable(f *os.File) (*os.File, error) {
	defer f.Close()
	err := control(f, func(fd int) error { return os.NewSyscallError("fcntl", unix.SetNonblock(fd, true)) })
	if err != nil {
		return nil, err
	}
	return duplicate(f)
}

// goOn makes a restored line the session's.
func (s *Session) goOn(l *line, typed []byte) error {
	err := l.pty.putInput(typed)
	s.mu.Lock()
	s.line = l
	s.mu.Unlock()
	l.serve()
	return err
}

// duplicate makes another file of an open one. Closing the first ends the reads
// of it and leaves the other's.
func duplicate(f *os.File) (dup *os.File, err error) {
	err = control(f, func(fd int) error {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		dup = os.NewFile(uintptr(n), f.Name())
		return nil
	})
	return dup, err
}

// Revival are the sessions of a node that is about to be restored.
type Revival struct {
	set   *Set
	dir   string
	saved saved
	// channels have the new pipes by the session's name.
	channels map[string]*Channel
	pipes    []Pipe
}

// Revive reads the sessions of the process images in dir and makes their pipes.
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
	for _, s := range r.saved.Sessions {
		if s.Line == nil {
			continue
		}
		if err := r.makePipes(s); err != nil {
			return nil, fmt.Errorf("make pipes of session %q: %w", s.Name, err)
		}
	}
	return r, nil
}

// makePipes makes a session's pipes and puts back what was in them.
func (r *Revival) makePipes(s savedSession) error {
	commands, commandsW, err := NewPipe(Writing)
	if err != nil {
		return err
	}
	reports, reportsW, err := NewPipe(Reading)
	if err != nil {
		return errors.Join(err, commands.Close(), commandsW.Close())
	}
	ch := &Channel{Path: s.Line.Path, Dialect: s.Line.Dialect, Inner: s.Line.Inner, Commands: commandsW, Reports: reports}
	r.channels[s.Name] = ch
	r.pipes = append(r.pipes, Pipe{Key: s.Line.Commands, File: commands}, Pipe{Key: s.Line.Reports, File: reportsW})
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

// Pipes returns the container's ends of the pipes.
func (r *Revival) Pipes() []Pipe { return r.pipes }

// Close gives the revival up.
func (r *Revival) Close() {
	for _, p := range r.pipes {
		p.File.Close()
	}
	for _, ch := range r.channels {
		ch.Commands.Close()
		ch.Reports.Close()
	}
	r.pipes, r.channels = nil, nil
}

// Rollback makes the node's sessions those of a container that was restored in
// place. The sessions that there were before are gone, and who waits for their
// steps is told so: a new generation begins.
func (r *Revival) Rollback(masters map[int]*os.File, find func(inner int) (pid int, err error)) error {
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
	return errors.Join(append(errs, r.Resume(masters, find))...)
}

// Resume makes the node's sessions those of a container that has just begun.
func (r *Revival) Resume(masters map[int]*os.File, find func(inner int) (pid int, err error)) error {
	defer func() {
		for _, p := range r.pipes {
			p.File.Close()
		}
		r.pipes = nil
	}()
	r.set.mu.Lock()
	r.set.services = r.saved.Services
	r.set.mu.Unlock()
	var errs []error
	for _, sv := range r.saved.Sessions {
		if err := r.resume(sv, masters, find); err != nil {
			errs = append(errs, fmt.Errorf("bring back session %q: %w", sv.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (r *Revival) resume(sv savedSession, masters map[int]*os.File, find func(int) (int, error)) error {
	t := r.set
	t.mu.Lock()
	s, err := t.makeLocked(sv.Name, sv.Want)
	t.mu.Unlock()
	if err != nil {
		return err
	}
	s.state, s.cwd, s.last, s.lost, s.service = sv.State, sv.Cwd, sv.Last, sv.Lost, sv.Service
	if sv.Step != nil {
		if err := s.reviveStep(sv.Step, spoolFile(r.dir, sv.Name)); err != nil {
			return err
		}
	}
	if sv.Line == nil {
		return nil
	}
	master := masters[sv.Line.Terminal]
	delete(masters, sv.Line.Terminal)
	ch := r.channels[sv.Name]
	delete(r.channels, sv.Name)
	l, err := s.reach(ch, master, find)
	if err != nil {
		return err
	}
	l.replaced.Store(sv.Line.Replaced)
	if s.current != nil {
		l.parser.Expect(s.current.token)
	}
	if err := l.feed(sv.Line.Partial); err != nil {
		return err
	}
	if err := s.goOn(l, sv.Line.Typed); err != nil {
		return err
	}
	if s.current != nil {
		go s.watch(s.current)
	}
	return nil
}

func (s *Session) reviveStep(sv *savedStep, file string) error {
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
