package waypoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// MainSession is the session that is meant when none is named.
const MainSession = "main"

const (
	// pollWait is how long one call to the shim waits; it allows a minute.
	pollWait = 30 * time.Second
	// sendPiece bounds what one message carries, of which ttrpc takes 4 MiB.
	sendPiece = 1 << 20
)

// Sessions are the sessions of one running container: persistent shells, each
// on a terminal of its own, which its shim keeps. All calls go straight to the
// shim. It may be used by many goroutines; it ends with the container's task.
type Sessions struct {
	shim *api.Client
	rec  containers.Container
}

// Size of a terminal's window in characters.
type Size struct {
	Columns uint32 `json:"columns"`
	Rows    uint32 `json:"rows"`
}

// Session is one persistent shell.
type Session struct {
	Name string `json:"name"`
	// Shell is its path in the container; empty if it has ended and the next
	// step will start another.
	Shell string `json:"shell,omitempty"`
	// PID is the shell's in the container.
	PID        uint32 `json:"pid,omitempty"`
	Cwd        string `json:"cwd,omitempty"`
	Generation uint64 `json:"generation"`
	// LastStep is the id of the newest step, 0 if there is none; Running says
	// that it has not ended.
	LastStep uint64 `json:"last_step"`
	Running  bool   `json:"running"`
	Size     Size   `json:"size"`
	// Service is the command of a background service that the session was made
	// for, or empty.
	Service string `json:"service,omitempty"`
}

// OpenOptions say how a session begins. Of a session that is there already only
// the size can be wanted.
type OpenOptions struct {
	// Session is the name, by default MainSession.
	Session string
	// Shell is the name or path of a shell in the container: by default bash if
	// there is one, else sh.
	Shell string
	// Cwd and User are the container's own by default.
	Cwd, User string
	// Env is added to the container's own environment: "NAME=value".
	Env  []string
	Size Size
}

// Sessions connects to the shim of a running container.
func (c *Client) Sessions(ctx context.Context, ref string) (*Sessions, error) {
	ctx = c.scope(ctx)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	shim, err := c.dial(ctx, rec)
	if err != nil {
		return nil, err
	}
	return &Sessions{shim: shim, rec: rec}, nil
}

// Container is the id of the container.
func (s *Sessions) Container() string { return s.rec.ID }

// Close ends the connection; the sessions go on.
func (s *Sessions) Close() error { return s.shim.Close() }

// Open starts a session's shell, unless it is there.
func (s *Sessions) Open(ctx context.Context, o OpenOptions) (*Session, error) {
	resp, err := s.shim.OpenSession(ctx, &api.OpenSessionRequest{
		Session: o.Session, Shell: o.Shell, Cwd: o.Cwd, User: o.User, Env: o.Env,
		Columns: o.Size.Columns, Rows: o.Size.Rows,
	})
	if err != nil {
		return nil, s.explain(err)
	}
	return new(toSession(resp)), nil
}

// List returns the sessions by name.
func (s *Sessions) List(ctx context.Context) ([]Session, error) {
	resp, err := s.shim.ListSessions(ctx)
	if err != nil {
		return nil, s.explain(err)
	}
	list := make([]Session, 0, len(resp))
	for _, r := range resp {
		list = append(list, toSession(r))
	}
	return list, nil
}

func toSession(r *api.Session) Session {
	return Session{
		Name: r.GetName(), Shell: r.GetShell(), PID: r.GetPid(), Cwd: r.GetCwd(),
		Generation: r.GetGeneration(), LastStep: r.GetLastStep(), Running: r.GetRunning(),
		Size:    Size{Columns: r.GetColumns(), Rows: r.GetRows()},
		Service: string(r.GetService()),
	}
}

// CloseSession ends a session, its shell and what runs on its terminal.
func (s *Sessions) CloseSession(ctx context.Context, session string) error {
	return s.explain(s.shim.CloseSession(ctx, session))
}

// Send types on a session's terminal. It waits while the terminal is full and
// nothing reads from it.
func (s *Sessions) Send(ctx context.Context, session string, input []byte) error {
	for len(input) > 0 {
		n := piece(input)
		if err := s.shim.SendInput(ctx, session, input[:n]); err != nil {
			return s.explain(err)
		}
		input = input[n:]
	}
	return nil
}

// piece is how much of input goes into one message: whole lines if possible,
// for the shim looks whether a line is too long for the kernel.
func piece(input []byte) int {
	if len(input) <= sendPiece {
		return len(input)
	}
	if i := bytes.LastIndexAny(input[:sendPiece], "\r\n"); i >= 0 {
		return i + 1
	}
	return sendPiece
}

// Signal sends a signal to what runs in a session's foreground.
func (s *Sessions) Signal(ctx context.Context, session string, sig syscall.Signal) error {
	if sig <= 0 {
		return fmt.Errorf("signal %d: %w", int(sig), errdefs.ErrInvalidArgument)
	}
	return s.explain(s.shim.SignalSession(ctx, session, uint32(sig)))
}

// Interrupt does what Ctrl-C does: it sends SIGINT to what runs in a session's
// foreground, whether or not that has switched the key off.
func (s *Sessions) Interrupt(ctx context.Context, session string) error {
	return s.Signal(ctx, session, syscall.SIGINT)
}

// Resize sets the size of a session's terminal.
func (s *Sessions) Resize(ctx context.Context, session string, size Size) error {
	return s.explain(s.shim.ResizeSession(ctx, session, size.Columns, size.Rows))
}

// Piece is part of what was printed.
type Piece struct {
	// Data is from Offset on. That is later than asked for if that is not kept
	// any more; Next is where to go on.
	Data   []byte `json:"data"`
	Offset uint64 `json:"offset"`
	Next   uint64 `json:"next"`
	// End says that nothing will come after Data: the step has ended, or the
	// session was closed.
	End bool `json:"end"`
}

// Output reads what a step has printed, from an offset on, without waiting. It
// returns as much as fits in a message: Data is empty at the present end. Step 0
// is the session's newest; without a generation the present one is meant.
func (s *Sessions) Output(ctx context.Context, session string, step uint64, generation *uint64, offset uint64) (*Piece, error) {
	req := waitRequest(session, step, generation)
	req.Offset = offset
	r, err := s.shim.WaitStep(ctx, req)
	if err != nil {
		return nil, s.explainStep(err, StepRef{Session: session, Step: step})
	}
	p := &Piece{Data: r.Output, Offset: r.Offset, Next: r.Offset + uint64(len(r.Output))}
	if len(r.Output) == 0 {
		p.Offset, p.Next = offset, offset
	}
	p.End = r.Ended && p.Next >= r.OutputBytes
	return p, nil
}

// Screen reads what came from a session's terminal, in steps and between them.
// It waits for something to come after the offset, for the given time at most;
// an offset beyond the end is the end.
func (s *Sessions) Screen(ctx context.Context, session string, offset uint64, wait time.Duration) (*Piece, error) {
	r, err := s.shim.ReadScreen(ctx, &api.ReadScreenRequest{
		Session: session, Offset: min(offset, api.EndOffset), WaitMs: milliseconds(min(wait, pollWait)),
	})
	if err != nil {
		return nil, s.explain(err)
	}
	return &Piece{Data: r.Output, Offset: r.Offset, Next: r.Offset + uint64(len(r.Output)), End: r.Closed}, nil
}

// milliseconds rounds up: what is wanted to be short is not to be none.
func milliseconds(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64((d + time.Millisecond - 1) / time.Millisecond)
}

// explain adds to an error of the shim what the user can do.
func (s *Sessions) explain(err error) error {
	// Steps and sessions need nothing that a shim could lack, unless it is old.
	if errdefs.IsNotImplemented(err) && statefork.Hint(err) == "" {
		return statefork.WithHint(err, "restart the container under the installed version of the shim")
	}
	return explain(err, s.rec)
}

func (s *Sessions) explainStep(err error, step StepRef) error {
	if errors.Is(err, api.ErrStale) {
		return statefork.WithHint(fmt.Errorf("wait for step %d of session %q: %w", step.Step, step.name(), err),
			fmt.Sprintf("see what it has now by \"statefork session ls %s\"", s.rec.ID))
	}
	return s.explain(err)
}
