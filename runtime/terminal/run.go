package terminal

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

const (
	// inputQuiet is how long nothing must be printed before it is looked
	// whether the foreground waits for input, and between two looks.
	inputQuiet = 100 * time.Millisecond
	// signalGrace is what a program gets to end after a signal.
	signalGrace = 2 * time.Second
	// killGrace is the time between two SIGKILL.
	killGrace = 200 * time.Millisecond
	// signalsToGroup is how many signals what runs in the foreground gets before
	// the shell, which goes on starting other programs, is ended itself.
	signalsToGroup = 6
)

// reported ends the step that a report is about. What the step printed is there
// before: the shell wrote the report after it.
func (s *Session) reported(l *line, token string, state *shell.State) {
	if err := l.pty.drain(); err != nil {
		log.L.WithError(err).WithField("session", s.name).Warn("read terminal")
	}
	cwd := directory(l.Pid)
	if cwd == "" {
		cwd = state.Dir // it has just ended
	}
	s.mu.Lock()
	st := s.current
	if s.line != l || st == nil || st.token != token {
		s.mu.Unlock()
		return
	}
	s.current, s.state, s.cwd = nil, *state, cwd
	s.mu.Unlock()
	st.end(func(st *Status) { st.ExitCode, st.ExitKnown, st.Cwd = state.Status, true, cwd })
}

// exited ends what a shell has left when it ended by itself. While the session
// is held its end may be that of the whole tree, which another one follows.
func (s *Session) exited(l *line) {
	if err := s.waitFree(context.Background()); err != nil {
		return
	}
	present := s.line == l
	s.mu.Unlock()
	if !present {
		return
	}
	if err := l.drain(); err != nil {
		log.L.WithError(err).WithField("session", s.name).Debug("read terminal of ended shell")
	}
	how := waited(l.Exit, l.Pid)
	// While it is held a session keeps its line.
	if err := s.waitFree(context.Background()); err != nil {
		return
	}
	if s.line != l {
		s.mu.Unlock()
		return
	}
	st, cwd := s.current, s.cwd
	s.line, s.current, s.lost = nil, nil, true
	s.mu.Unlock()
	if err := s.leave(l); err != nil {
		log.L.WithError(err).WithField("session", s.name).Warn("keep terminal of ended shell")
	}
	if err := l.close(); err != nil {
		log.L.WithError(err).WithField("session", s.name).Debug("close terminal of ended shell")
	}
	if st != nil {
		st.end(func(st *Status) {
			if !st.mute {
				st.ExitCode, st.ExitKnown, st.Signal = how.code, how.known, how.signal
			}
			st.ShellExited, st.Cwd = true, cwd
		})
	}
}

// leave keeps the terminal of a shell that has ended. What is printed there still
// belongs to the session.
func (s *Session) leave(l *line) error { return s.keep(l, func(p []byte) { s.printed(l, p) }) }

// watch looks after a running step: its limits, and whether it waits for input.
func (s *Session) watch(st *Step) {
	timer := time.NewTimer(inputQuiet)
	defer timer.Stop()
	signals, next := 0, time.Time{} // next is when to send another
	for {
		select {
		case <-st.ended:
			return
		case <-timer.C:
		}
		switch {
		case !st.expired(signals):
			s.look(st)
		case signals > 0 && s.recall(st):
			// What ran has ended, and its shell does not say so.
		case !time.Now().Before(next) && s.expire(st, signals):
			grace := signalGrace
			if signals++; signals > 2 {
				grace = killGrace
			}
			next = time.Now().Add(grace)
		}
		timer.Reset(st.until(inputQuiet, signals))
	}
}

// recall asks a shell for its report if it waits for a command although the step
// has not ended, and says whether it does.
func (s *Session) recall(st *Step) bool {
	l := s.lineOf(st)
	if l == nil || !l.forgetful() {
		return false
	}
	s.remind(l, st)
	return true
}

// lineOf returns the shell that runs a step; nil if the step is over, or must be
// left alone.
func (s *Session) lineOf(st *Step) *line {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != st || s.held {
		return nil
	}
	return s.line
}

// expired says whether a limit is reached. Once it was there is no way back.
func (s *Step) expired(signals int) bool {
	if signals > 0 {
		return true
	}
	return s.spec.Timeout > 0 && time.Since(s.begun()) >= s.spec.Timeout ||
		s.spec.IdleTimeout > 0 && s.quiet() >= s.spec.IdleTimeout
}

func (s *Step) begun() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Started
}

// until returns when to look at the step again: not later than its limits.
func (s *Step) until(next time.Duration, signals int) time.Duration {
	if signals > 0 {
		return next
	}
	if s.spec.Timeout > 0 && time.Since(s.begun()) < s.spec.Timeout {
		next = min(next, s.spec.Timeout-time.Since(s.begun()))
	}
	if s.spec.IdleTimeout > 0 && s.quiet() < s.spec.IdleTimeout {
		next = min(next, s.spec.IdleTimeout-s.quiet())
	}
	return max(next, time.Millisecond)
}

// expire ends what a step runs, harder with each signal that did not help. It
// says whether it could.
func (s *Session) expire(st *Step, signals int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != st || s.line == nil || s.held {
		return false
	}
	st.change(func(st *Status) { st.TimedOut = true })
	sig := [...]unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGKILL}[min(signals, 2)]
	var err error
	if signals < signalsToGroup {
		err = s.line.signalForeground(sig)
	} else {
		err = s.line.signal(sig)
	}
	if err != nil {
		log.L.WithError(err).WithField("session", s.name).Warn("end step at its limit")
	}
	return true
}

// look finds out why a step does nothing: whether it waits for input, and
// whether its shell does not know of it any more.
func (s *Session) look(st *Step) {
	if st.still() < inputQuiet {
		st.change(func(st *Status) { st.WaitingForInput = false })
		return
	}
	l := s.lineOf(st)
	if l == nil || s.recall(st) {
		return
	}
	if time.Since(st.remindedAt) > reminderLife {
		st.reminded = 0 // the last one was answered, or not needed
	}
	waits, err := waitsForInput(l.pty)
	if err != nil {
		return // the terminal has just gone
	}
	if waits && l.replaced.Load() && s.adopt(l, st) {
		return
	}
	if waits && st.still() < inputQuiet {
		return // something has come since
	}
	st.change(func(st *Status) { st.WaitingForInput = waits })
}

const (
	// reminders is how often a shell is asked for a report that has not come.
	reminders = 3
	// reminderLife is how long one counts: a shell may take its time for a
	// report that cannot be used.
	reminderLife = 5 * time.Second
)

// remind asks a shell that waits for its next command for the report of the
// last one: interrupts in quick succession can take it back to its top level
// twice. A shell that cannot answer ("set -n"; its builtins redefined beyond
// help) is ended, and how the step has ended is then not known.
func (s *Session) remind(l *line, st *Step) {
	st.remindedAt = time.Now()
	if st.reminded++; st.reminded > reminders {
		log.L.WithField("session", s.name).WithField("step", st.id).Warn("shell does not report any more: end it")
		st.change(func(st *Status) { st.mute = true })
		if err := l.signal(unix.SIGKILL); err != nil {
			log.L.WithError(err).WithField("session", s.name).Warn("end shell")
		}
		return
	}
	text, err := l.Dialect.Again(st.token)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == st && s.line == l && !s.held {
		l.send(text)
	}
}

// adopt ends a step whose shell has become another interactive shell ("exec
// bash"), and has the next step run in one like it: with its directory and its
// environment, which are what "exec" has handed over. For a shell that we cannot
// drive ("exec zsh") it is one like the first.
func (s *Session) adopt(l *line, st *Step) bool {
	path, ok := interactiveShell(l.Pid)
	if !ok {
		return false
	}
	env, err := environment(l.Pid)
	if err != nil {
		return false
	}
	cwd := directory(l.Pid)
	s.mu.Lock()
	if s.line != l || s.current != st || s.held {
		s.mu.Unlock()
		return false
	}
	s.want.Env = env
	if path != "" {
		s.want.Shell = path
	}
	s.state, s.cwd = shell.State{}, cwd
	s.line, s.current, s.lost = nil, nil, true
	s.mu.Unlock()
	if err := l.hangUp(func() error { return s.leave(l) }); err != nil {
		log.L.WithError(err).WithField("session", s.name).Warn("end replaced shell")
	}
	st.end(func(st *Status) { st.ExitKnown, st.ShellExited, st.Cwd = true, true, cwd })
	return true
}

// interactiveShell says whether a process is a shell that reads commands from
// its terminal, and which; the path is empty if it is none that we can drive.
func interactiveShell(pid int) (path string, ok bool) {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return "", false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return "", false
	}
	args := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	if len(args) == 0 {
		return "", false
	}
	name := strings.TrimPrefix(filepath.Base(args[0]), "-")
	if shell.ForPath(name) == shell.Unknown && name != "sh" && name != "zsh" {
		return "", false
	}
	plain := func(a string) bool { return strings.HasPrefix(a, "-") && !strings.HasPrefix(a, "-c") }
	if slices.ContainsFunc(args[1:], func(a string) bool { return !plain(a) }) {
		return "", false
	}
	switch {
	case name == "zsh":
		return "", true
	case filepath.Base(exe) == "busybox":
		return name, true // what it is depends on the name
	}
	return exe, true
}

func environment(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil, err
	}
	var env []string
	for v := range bytes.SplitSeq(bytes.TrimSuffix(b, []byte{0}), []byte{0}) {
		env = append(env, string(v))
	}
	return env, nil
}

// hold has everything that would change the shell's channels wait, and waits
// for what is under way. The container is acquired.
func (s *Session) hold(ctx context.Context) error {
	if err := s.waitFree(ctx); err != nil {
		return err
	}
	s.held, s.release = true, make(chan struct{})
	l := s.line
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	if err := s.holdLine(ctx, l); err != nil {
		s.free()
		return err
	}
	return nil
}

func (s *Session) holdLine(ctx context.Context, l *line) error {
	free, err := l.holdTyping(ctx)
	if err != nil {
		return fmt.Errorf("somebody types in session %q: %w", s.name, err)
	}
	s.mu.Lock()
	if s.held {
		s.freeTyping = free
	} else {
		free() // the session was closed
	}
	s.mu.Unlock()
	select {
	case <-l.commands.written():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("shell of session %q does not read its command: %w", s.name, ctx.Err())
	}
}

// free lets what hold holds up go on.
func (s *Session) free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held {
		s.freeLocked()
	}
}
