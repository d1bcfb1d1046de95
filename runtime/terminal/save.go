package terminal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// Sessions in a checkpoint.
//
// CRIU dumps the shells like all other processes. Their terminals and pipes are
// ours: a restore is given the same ones again, or others. What CRIU does not
// keep is saved beside its images:
//
//	the terminal's settings and size
//	what was typed and is not read yet
//	what is in the command pipe, and the part of a report that has been read
//	where the running step is, and its output so far
//
// A checkpoint in place goes on with the same terminals, pipes and steps. A
// restore to a node, and a fork, make everything anew from what was saved.

// savedFile lies with the process images.
const savedFile = "sessions.json"

type saved struct {
	Services uint64          `json:"services"`
	Sessions []savedSession  `json:"sessions"`
	Left     []savedTerminal `json:"left,omitempty"`
}

type savedTerminal struct {
	Key   string       `json:"key"`
	Mode  unix.Termios `json:"mode"`
	Size  Size         `json:"size"`
	Owner int          `json:"owner"` // a user id
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
	Terminal savedTerminal `json:"terminal"`
	// The keys of the pipes.
	Commands string `json:"commands"`
	Reports  string `json:"reports"`
	Replaced bool   `json:"replaced,omitempty"`
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

// End is the container's end of what leads to a shell: a terminal or a pipe.
type End struct {
	// Key is what the images call it: "tty[rdev:dev]", which a dump has to be
	// told of as external, or "pipe:[inode]".
	Key  string
	File *os.File
}

// Terminals returns those keys that a dump has to be told of.
func Terminals(ends []End) []string {
	var keys []string
	for _, e := range ends {
		if strings.HasPrefix(e.Key, "tty") {
			keys = append(keys, e.Key)
		}
	}
	return keys
}

// Held are the sessions of a container that is being checkpointed or restored:
// nothing is typed or started in them until Free.
type Held struct {
	set      *Set
	sessions []*Session
	left     []*pty
	ends     []End // of each line three: terminal, commands, reports; then of left
}

// Hold holds all sessions, and waits until each shell has read what it was
// given. Free must be called.
func (t *Set) Hold(ctx context.Context) (*Held, error) {
	h := &Held{set: t}
	for _, s := range t.List() {
		if err := s.hold(ctx); err != nil {
			h.Free()
			return nil, err
		}
		h.sessions = append(h.sessions, s)
	}
	var err error
	if h.left, err = t.leftInUse(); err != nil {
		h.Free()
		return nil, err
	}
	return h, nil
}

// Free lets the sessions go on.
func (h *Held) Free() {
	for _, e := range h.ends {
		e.File.Close()
	}
	h.ends = nil
	for _, s := range h.sessions {
		s.free()
	}
	h.sessions = nil
}

// lines returns the sessions' shells.
func (h *Held) lines() []*line {
	var all []*line
	for _, s := range h.sessions {
		if l := s.present(); l != nil {
			all = append(all, l)
		}
	}
	return all
}

// present returns the session's shell, which stays the same while it is held.
func (s *Session) present() *line {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.line
}

// Ends returns the container's ends of what leads to the running shells. They
// are open until Free: a checkpoint in place goes on with them.
func (h *Held) Ends() ([]End, error) {
	if h.ends != nil {
		return h.ends, nil
	}
	for _, l := range h.lines() {
		if err := h.addTerminal(l.pty); err != nil {
			return nil, err
		}
		for _, end := range []struct {
			ours  *os.File
			flags int
		}{{l.Commands, os.O_RDONLY}, {l.Reports, os.O_WRONLY}} {
			e, err := otherEnd(end.ours, end.flags)
			if err != nil {
				return nil, err
			}
			h.ends = append(h.ends, e)
		}
	}
	for _, p := range h.left {
		if err := h.addTerminal(p); err != nil {
			return nil, err
		}
	}
	return h.ends, nil
}

func (h *Held) addTerminal(p *pty) error {
	slave, err := peer(p.master, 0)
	if err != nil {
		return err
	}
	h.ends = append(h.ends, End{Key: p.device().key(), File: slave})
	return nil
}

// otherEnd opens the other end of a pipe.
func otherEnd(ours *os.File, flags int) (End, error) {
	var p End
	err := control(ours, func(fd int) (err error) {
		if p.Key, err = pipeKey(fd); err != nil {
			return err
		}
		// Not by os.OpenFile, which makes it one that does not block: a shell
		// would lose what it writes to a full pipe.
		path := fmt.Sprintf("/proc/self/fd/%d", fd)
		n, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: path, Err: err}
		}
		p.File = os.NewFile(uintptr(n), path)
		return nil
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
// process images.
func (h *Held) Save(dir string) error {
	var all saved
	h.set.mu.Lock()
	all.Services = h.set.services
	h.set.mu.Unlock()
	for _, s := range h.sessions {
		one, err := h.save(s, dir)
		if err != nil {
			return fmt.Errorf("save session %q: %w", s.name, err)
		}
		all.Sessions = append(all.Sessions, one)
	}
	for _, p := range h.left {
		one, err := saveTerminal(p)
		if err != nil {
			return fmt.Errorf("save terminal: %w", err)
		}
		all.Left = append(all.Left, one)
	}
	if len(all.Sessions) == 0 && len(all.Left) == 0 && all.Services == 0 {
		return nil // as Revive takes it to be without the file
	}
	b, err := json.Marshal(all)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, savedFile), b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("save sessions: %w", err)
	}
	return nil
}

func (h *Held) save(s *Session, dir string) (savedSession, error) {
	if l := s.present(); l != nil {
		// What has been printed and reported belongs to the time before, and so
		// does the echo of what was typed.
		if err := errors.Join(l.pty.settle(), l.drain()); err != nil {
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
	ends, err := h.Ends()
	if err != nil {
		return nil, err
	}
	i := 3 * slices.Index(h.lines(), l)
	out.Commands, out.Reports = ends[i+1].Key, ends[i+2].Key
	if out.Unread, err = peekPipe(ends[i+1].File); err != nil {
		return nil, err
	}
	if out.Terminal, err = saveTerminal(l.pty); err != nil {
		return nil, err
	}
	// There is no other way to see what was typed than to take it.
	if out.Typed, err = l.pty.takeInput(); err != nil {
		return nil, err
	}
	return out, l.pty.putInput(out.Typed)
}

func saveTerminal(p *pty) (out savedTerminal, err error) {
	st := p.stat()
	out.Key, out.Owner = deviceOf(st).key(), int(st.Uid)
	mode, err := mode(p.slave)
	if err != nil {
		return out, err
	}
	out.Mode = *mode
	out.Size, err = p.size()
	return out, err
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
	var n int64
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		n, err = unix.Tee(int(r.Fd()), int(pw.Fd()), size, unix.SPLICE_F_NONBLOCK)
	}
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
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, os.NewSyscallError("read", err)
		}
		all = append(all, append([]byte(nil), buf[:m]...))
		left -= m
	}
	return all, nil
}

// Resume goes on with the sessions after a checkpoint in place: each shell is
// another process of the host. find finds a process of the container.
func (h *Held) Resume(find func(inner int) (pid int, err error)) error {
	var errs []error
	for _, s := range h.sessions {
		old := s.present()
		if old == nil {
			continue
		}
		if err := s.resume(old, find); err != nil {
			errs = append(errs, fmt.Errorf("go on with session %q: %w", s.name, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Session) resume(old *line, find func(int) (int, error)) error {
	ch := &Channel{Path: old.Path, Dialect: old.Dialect, Inner: old.Inner}
	for _, f := range []struct {
		to   **os.File
		from *os.File
	}{{&ch.Master, old.Master}, {&ch.Commands, old.Commands}, {&ch.Reports, old.Reports}} {
		var err error
		if *f.to, err = duplicate(f.from); err != nil {
			return errors.Join(err, ch.close())
		}
	}
	l, err := s.reach(ch, find)
	if err != nil {
		return err
	}
	l.replaced.Store(old.replaced.Load())
	err = old.close()
	// It may have the beginning of a report.
	l.parser = old.parser
	l.token.Store(old.token.Load())
	l.column = old.column
	s.goOn(l)
	return err
}

// reach completes a channel to a restored shell. On an error it closes it.
func (s *Session) reach(ch *Channel, find func(int) (int, error)) (_ *line, retErr error) {
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, ch.close())
		}
	}()
	pid, err := find(ch.Inner)
	if err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	ch.Pid, ch.Exit = pid, os.NewFile(uintptr(fd), "pidfd")
	return newLine(ch, s)
}

// goOn makes a restored line the session's.
func (s *Session) goOn(l *line) {
	s.mu.Lock()
	s.line = l
	s.mu.Unlock()
	l.serve()
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
