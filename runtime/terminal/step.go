package terminal

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// StepSpec is what to run, and for how long.
type StepSpec struct {
	// Command is text for the shell: any, of any length.
	Command []byte
	// Timeout limits the whole step, IdleTimeout the time without output; 0 is
	// no limit. What then runs in the foreground gets SIGINT, SIGTERM and
	// SIGKILL, one after the other.
	Timeout, IdleTimeout time.Duration
	// OutputLimit is how many bytes of output are kept; 0 is the default.
	OutputLimit int64
}

// Status is where a step is, and at its end what became of it.
type Status struct {
	Session    string
	Step       uint64
	Generation uint64
	// Ended says that the rest will not change any more.
	Ended bool
	// ExitCode is the shell's $?: 128 plus the signal for what a signal has
	// ended. It is valid if ExitKnown is set: how a replaced shell has ended is
	// lost on kernels before 6.15, if the container's init reaps it.
	ExitCode  int
	ExitKnown bool
	// Signal is the one that has ended the shell itself, 0 if none.
	Signal unix.Signal
	// TimedOut says that a limit was reached, and that the step was ended for it.
	TimedOut bool
	// ShellExited says that the shell has ended in this step.
	ShellExited bool
	// NewShell says that the step got a new shell, because the one before ended.
	NewShell bool
	// WaitingForInput says that the foreground waits for the terminal.
	WaitingForInput bool
	// Stale says that a restore has left the step behind.
	Stale bool
	// Cwd is the shell's directory after the step.
	Cwd      string
	Started  time.Time
	Duration time.Duration
	// Output is the number of bytes that were printed, Dropped how many of them
	// are not kept.
	Output, Dropped int64

	// mute says that the shell was ended because it did not report any more.
	mute bool
}

// Step is one command of a session.
type Step struct {
	id    uint64
	spec  StepSpec
	token string
	out   *Spool
	// ended is closed with the step.
	ended chan struct{}
	// reminded counts how often the shell was asked for its report, the last
	// time at remindedAt. Only watch uses them.
	reminded   int
	remindedAt time.Time

	mu sync.Mutex
	// status is complete but for the output's size. Guarded by mu.
	status Status
	// changed is closed, and made anew, when status changes. Guarded by mu.
	changed chan struct{}
	// printed is when output came last, input when it was typed. Guarded by mu.
	printed, input time.Time
}

func newStep(session string, id, generation uint64, spec StepSpec, out *Spool, begun time.Time) *Step {
	return &Step{
		id: id, spec: spec, out: out,
		ended:   make(chan struct{}),
		changed: make(chan struct{}),
		printed: begun,
		status:  Status{Session: session, Step: id, Generation: generation, Started: begun},
	}
}

// ID numbers the steps of a session from 1.
func (s *Step) ID() uint64 { return s.id }

// Status returns the present status.
func (s *Step) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	if !st.Ended {
		st.Duration = time.Since(st.Started)
	}
	st.Output, st.Dropped = s.out.Size()
	return st
}

// Output reads kept output from an offset on; see Spool.ReadAt.
func (s *Step) Output(p []byte, offset int64) (n int, from int64, err error) {
	return s.out.ReadAt(p, offset)
}

// Wait returns when the step has ended, when it begins to wait for input, when
// there is output beyond the offset more, or when ctx is done: whatever comes
// first. An offset of less than 0 waits for no output.
func (s *Step) Wait(ctx context.Context, more int64) Status {
	was, first := false, true
	for {
		s.mu.Lock()
		changed := s.changed
		s.mu.Unlock()
		var grown <-chan struct{}
		if more >= 0 {
			grown = s.out.grown(more)
		}
		st := s.Status()
		if first {
			was, first = st.WaitingForInput, false
		}
		if st.Ended || st.WaitingForInput && !was || more >= 0 && st.Output > more {
			return st
		}
		was = st.WaitingForInput
		select {
		case <-changed:
		case <-grown:
		case <-ctx.Done():
			return s.Status()
		}
	}
}

// print takes the step's output.
func (s *Step) print(p []byte) {
	s.mu.Lock()
	s.printed = time.Now()
	s.mu.Unlock()
	_, _ = s.out.Write(p) // never fails
}

// change changes the status of a step that has not ended.
func (s *Step) change(fn func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Ended {
		return
	}
	before := s.status
	fn(&s.status)
	if s.status != before {
		s.changedLocked()
	}
}

func (s *Step) changedLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// end ends the step.
func (s *Step) end(fn func(*Status)) {
	s.change(func(st *Status) {
		fn(st)
		st.Ended = true
		st.WaitingForInput = false
		st.Duration = time.Since(st.Started)
		close(s.ended)
	})
}

// typed says that input came: whoever waited for it does not any more, or not
// for the same.
func (s *Step) typed() {
	s.mu.Lock()
	s.input = time.Now()
	s.mu.Unlock()
	s.change(func(st *Status) { st.WaitingForInput = false })
}

// still returns how long nothing was printed or typed.
func (s *Step) still() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(time.Since(s.printed), time.Since(s.input))
}

// quiet returns how long nothing was printed.
func (s *Step) quiet() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.printed)
}
