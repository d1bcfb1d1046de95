package waypoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/shim/api"
)

const (
	// startWait is how long the call that starts a step waits for it: most have
	// ended then, and of the others it is soon known which step they are.
	startWait = 200 * time.Millisecond
	// inputPoll bounds a call when input is looked for: between two calls the
	// step may have begun to wait, which the shim tells only as it happens.
	inputPoll = 2 * time.Second
	// inputSettle is after which the shim has looked again whether a step waits
	// for input. What it says before may be from before the last input.
	inputSettle = 400 * time.Millisecond
)

// StepRef names a step. A restore of the container to a node begins a new
// generation, and leaves the steps of the one before behind.
type StepRef struct {
	Session    string `json:"session"`
	Step       uint64 `json:"step"`
	Generation uint64 `json:"generation"`
}

func (r StepRef) name() string { return cmp.Or(r.Session, MainSession) }

// StepResult is what became of a step, or where it is if StillRunning is set.
type StepResult struct {
	StepRef
	// ExitCode is the shell's $?: 128 plus the signal for what a signal has
	// ended. It counts if ExitKnown is set.
	ExitCode  int  `json:"exit_code"`
	ExitKnown bool `json:"exit_known"`
	// Signal is the name of the one that has ended the shell itself, or empty.
	Signal string `json:"signal,omitempty"`
	// TimedOut says that the step was ended at one of its time limits.
	TimedOut bool `json:"timed_out"`
	// StillRunning says that the step has not ended.
	StillRunning bool `json:"still_running"`
	// WaitingForInput says that the step waits for the terminal.
	WaitingForInput bool `json:"waiting_for_input"`
	// Truncated says that Output is not all: DroppedBytes are missing at
	// DroppedAt, counted in Output.
	Truncated bool `json:"truncated"`
	// ShellExited says that the session's shell has ended; the next step gets
	// another. NewShell says that this one did.
	ShellExited bool          `json:"shell_exited"`
	NewShell    bool          `json:"new_shell"`
	Duration    time.Duration `json:"duration_ns"`
	// Cwd is the shell's directory after the step.
	Cwd string `json:"cwd,omitempty"`
	// OutputBytes is how much was printed, OutputOffset where Output begins in
	// that, and NextOffset where to read on.
	OutputBytes  uint64 `json:"output_bytes"`
	OutputOffset uint64 `json:"output_offset"`
	NextOffset   uint64 `json:"next_offset"`
	DroppedBytes uint64 `json:"dropped_bytes"`
	DroppedAt    uint64 `json:"dropped_at,omitempty"`
	// SkippedBytes is how much of that had gone before it could be read, and so
	// has not been streamed either.
	SkippedBytes uint64 `json:"skipped_bytes,omitempty"`
	Output       []byte `json:"output"`
	// Text is Output as UTF-8, in which U+FFFD stands for each byte that is none.
	Text string `json:"text"`
}

// FollowOptions say how a step is waited for.
type FollowOptions struct {
	// Output gets what the step prints, as it comes.
	Output io.Writer
	// Wait is after which time to return with StillRunning; 0 waits for the end
	// and less than 0 does not wait.
	Wait time.Duration
	// ReturnOnInput has the call return with WaitingForInput when the program
	// waits for the terminal: for callers with nobody who would type.
	ReturnOnInput bool
	// Known is told the step as soon as its number is known.
	Known func(StepRef)
}

// ExecOptions are a command and how it runs.
type ExecOptions struct {
	// Session is by default MainSession. It is made if there is none.
	Session string
	// Command is text for the session's shell.
	Command string
	// Timeout limits the step, IdleTimeout the time in which it prints nothing;
	// 0 is no limit. At its limit a step is ended.
	Timeout, IdleTimeout time.Duration
	// OutputLimit is how many bytes of output are kept, by default 16 MiB: half
	// of them are the first, half the last.
	OutputLimit uint64
	// Background runs the command as a service in a session of its own, which
	// the result names. Exec does not wait for its end, unless Wait says so.
	Background bool
	FollowOptions
}

// WaitOptions name a step.
type WaitOptions struct {
	// Session is by default MainSession.
	Session string
	// Step is by default the newest one.
	Step uint64
	// Generation is that of the step; a step that a restore has left behind is
	// refused. Nil is the present one.
	Generation *uint64
	// Offset is from where on the output is wanted.
	Offset uint64
	// OutputLimit is how many bytes the result has, by default 16 MiB.
	OutputLimit uint64
	FollowOptions
}

// Exec runs a command in a session and waits for it. The end of ctx ends the
// waiting, not the step: there is a result with the error then, if it is known
// which step it is. It fails with ErrFailedPrecondition while another step of
// the session runs, and with api.ErrStale if the container is restored to
// a node under it. While the container is checkpointed it takes as long as that.
func (s *Sessions) Exec(ctx context.Context, o ExecOptions) (*StepResult, error) {
	if o.Background && o.Wait == 0 {
		o.Wait = -1
	}
	f := s.follower(o.FollowOptions, newKept(o.OutputLimit, 0))
	f.edge = true
	r, err := s.shim.StartStep(ctx, &api.StartStepRequest{
		Session: o.Session, Command: []byte(o.Command),
		TimeoutMs: milliseconds(o.Timeout), IdleTimeoutMs: milliseconds(o.IdleTimeout),
		OutputLimit: o.OutputLimit, Background: o.Background,
		WaitMs: milliseconds(min(f.poll(), startWait)),
	})
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("start step, which may have begun: %w", err)
	}
	if err != nil {
		return nil, s.explain(err)
	}
	return f.follow(ctx, r)
}

// Wait waits for a step as Exec does, and returns its output from an offset on.
func (s *Sessions) Wait(ctx context.Context, o WaitOptions) (*StepResult, error) {
	f := s.follower(o.FollowOptions, newKept(o.OutputLimit, o.Offset))
	req := waitRequest(o.Session, o.Step, o.Generation)
	// At first it is only asked which step it is.
	req.Offset = o.Offset
	r, err := s.shim.WaitStep(ctx, req)
	if err != nil {
		return nil, s.explainStep(err, StepRef{Session: o.Session, Step: o.Step})
	}
	return f.follow(ctx, r)
}

func waitRequest(session string, step uint64, generation *uint64) *api.WaitStepRequest {
	r := &api.WaitStepRequest{Session: session, Step: step, AnyGeneration: generation == nil}
	if generation != nil {
		r.Generation = *generation
	}
	return r
}

// follower waits for one step.
type follower struct {
	FollowOptions
	s        *Sessions
	kept     *kept
	deadline time.Time
	ref      StepRef
	last     *api.StepResponse
	// edge says that the shim has been seen to say that the step does not wait
	// for input; that it does then is news.
	edge bool
}

func (s *Sessions) follower(o FollowOptions, k *kept) *follower {
	f := &follower{FollowOptions: o, s: s, kept: k}
	if o.Wait > 0 {
		f.deadline = time.Now().Add(o.Wait)
	}
	return f
}

// poll is how long the next call may take.
func (f *follower) poll() time.Duration {
	d := pollWait
	if f.ReturnOnInput {
		d = inputPoll
		if !f.edge {
			d = inputSettle
		}
	}
	switch {
	case f.Wait < 0:
		return 0
	case f.Wait > 0:
		d = min(d, time.Until(f.deadline))
	}
	return max(d, 0)
}

// follow goes on from the first response to the last one.
func (f *follower) follow(ctx context.Context, r *api.StepResponse) (*StepResult, error) {
	f.ref = StepRef{Session: r.Session, Step: r.Step, Generation: r.Generation}
	if f.Known != nil {
		f.Known(f.ref)
	}
	if err := f.take(r); err != nil {
		return f.result(), err
	}
	for settled := false; !f.over(settled); {
		wait := f.poll()
		begun := time.Now()
		r, err := f.s.shim.WaitStep(ctx, &api.WaitStepRequest{
			Session: f.ref.Session, Step: f.ref.Step, Generation: f.ref.Generation,
			Offset: f.kept.next, WaitMs: milliseconds(wait),
		})
		if err != nil {
			return f.failed(err)
		}
		if err := f.take(r); err != nil {
			return f.result(), err
		}
		if r.Ended && len(r.Output) == 0 && f.kept.next < r.OutputBytes {
			return f.result(), fmt.Errorf("read output of step %d: it ends at %d of %d bytes: %w",
				f.ref.Step, f.kept.next, r.OutputBytes, errdefs.ErrDataLoss)
		}
		settled = len(r.Output) == 0 && time.Since(begun) >= inputSettle
	}
	return f.result(), nil
}

// failed has no result for a step that is not there any more.
func (f *follower) failed(err error) (*StepResult, error) {
	if errors.Is(err, api.ErrStale) || errdefs.IsNotFound(err) {
		return nil, f.s.explainStep(err, f.ref)
	}
	return f.result(), f.s.explainStep(err, f.ref)
}

// take hands on the output in a response.
func (f *follower) take(r *api.StepResponse) error {
	f.last = r
	f.edge = f.edge || !r.WaitingForInput
	p, offset := r.Output, r.Offset
	// What is there already is not to be told again.
	if have := f.kept.next; offset < have {
		p = p[min(have-offset, uint64(len(p))):]
		offset = have
	}
	f.kept.add(offset, p)
	if f.Output == nil || len(p) == 0 {
		return nil
	}
	if _, err := f.Output.Write(p); err != nil {
		return fmt.Errorf("write output of step %d: %w", f.ref.Step, err)
	}
	return nil
}

// over says whether to return. settled says that the last call was long enough
// for the shim to have looked whether the step waits for input.
func (f *follower) over(settled bool) bool {
	r := f.last
	read := f.kept.next >= r.OutputBytes
	switch {
	case r.Ended:
		return read
	case f.Wait < 0, f.Wait > 0 && !time.Now().Before(f.deadline):
		return true
	}
	return f.ReturnOnInput && r.WaitingForInput && read && (f.edge || settled)
}

// result is what the last response says, with the output up to now.
func (f *follower) result() *StepResult {
	r, k := f.last, f.kept
	res := &StepResult{
		StepRef:  f.ref,
		TimedOut: r.TimedOut, StillRunning: !r.Ended, WaitingForInput: r.WaitingForInput,
		ShellExited: r.ShellExited, NewShell: r.NewShell,
		Duration: time.Duration(r.DurationUs) * time.Microsecond, Cwd: r.Cwd,
		OutputBytes: max(r.OutputBytes, k.next), OutputOffset: k.begin, NextOffset: k.next,
		DroppedBytes: k.dropped(), SkippedBytes: k.skipped, Output: k.bytes(), Text: k.text(),
	}
	if r.Ended {
		res.ExitCode, res.ExitKnown = int(r.ExitCode), r.ExitKnown
	}
	if res.Truncated = res.DroppedBytes > 0; res.Truncated {
		res.DroppedAt = uint64(len(k.head))
	}
	if r.Signal != 0 {
		res.Signal = signalName(syscall.Signal(r.Signal))
	}
	return res
}

func signalName(sig syscall.Signal) string {
	return cmp.Or(unix.SignalName(sig), fmt.Sprintf("signal %d", int(sig)))
}
