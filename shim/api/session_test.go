package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
)

// recorder answers all session calls, and keeps what it was asked.
type recorder struct {
	WaypointService
	mu    sync.Mutex
	asked []string // guarded by mu
	// hang is closed when the call that waits is to return.
	hang chan struct{}
}

func (r *recorder) called(ctx context.Context, container, what string, args ...any) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		ns = err.Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, fmt.Sprintf("%s %s/%s %v", what, ns, container, args))
}

func (r *recorder) OpenSession(ctx context.Context, q *OpenSessionRequest) (*OpenSessionResponse, error) {
	r.called(ctx, q.ContainerId, "open", q.Session, q.Shell)
	return &OpenSessionResponse{Session: &Session{Name: q.Session}}, nil
}

func (r *recorder) ListSessions(ctx context.Context, q *ListSessionsRequest) (*ListSessionsResponse, error) {
	r.called(ctx, q.ContainerId, "list")
	return &ListSessionsResponse{Sessions: []*Session{{Name: "a"}, {Name: "b"}}}, nil
}

func (r *recorder) CloseSession(ctx context.Context, q *CloseSessionRequest) (*CloseSessionResponse, error) {
	r.called(ctx, q.ContainerId, "close", q.Session)
	if q.Session == "nope" {
		return nil, errgrpc.ToGRPC(fmt.Errorf("session %q: %w", q.Session, errdefs.ErrNotFound))
	}
	return &CloseSessionResponse{}, nil
}

func (r *recorder) StartStep(ctx context.Context, q *StartStepRequest) (*StepResponse, error) {
	r.called(ctx, q.ContainerId, "start", q.Session, string(q.Command))
	return &StepResponse{Session: q.Session, Step: 4, Ended: true, ExitCode: 3}, nil
}

func (r *recorder) WaitStep(ctx context.Context, q *WaitStepRequest) (*StepResponse, error) {
	r.called(ctx, q.ContainerId, "wait", q.Session, q.Step)
	switch q.Step {
	case 1:
		return &StepResponse{Stale: true, Generation: 7}, nil
	case 2:
		<-r.hang
	}
	return &StepResponse{Step: q.Step}, nil
}

func (r *recorder) SendInput(ctx context.Context, q *SendInputRequest) (*SendInputResponse, error) {
	r.called(ctx, q.ContainerId, "send", q.Session, string(q.Input))
	return &SendInputResponse{}, nil
}

func (r *recorder) SignalSession(ctx context.Context, q *SignalSessionRequest) (*SignalSessionResponse, error) {
	r.called(ctx, q.ContainerId, "signal", q.Session, q.Signal)
	return &SignalSessionResponse{}, nil
}

func (r *recorder) ResizeSession(ctx context.Context, q *ResizeSessionRequest) (*ResizeSessionResponse, error) {
	r.called(ctx, q.ContainerId, "resize", q.Session, q.Columns, q.Rows)
	return &ResizeSessionResponse{}, nil
}

func (r *recorder) ReadScreen(ctx context.Context, q *ReadScreenRequest) (*ReadScreenResponse, error) {
	r.called(ctx, q.ContainerId, "read", q.Session, q.Offset)
	return &ReadScreenResponse{Output: []byte("x"), Offset: 5, Closed: true}, nil
}

func TestSessionCalls(t *testing.T) {
	r := &recorder{}
	state, stop := serve(t, func(s *ttrpc.Server) { RegisterWaypointService(s, r) })
	defer stop()
	c, ctx := dial(t, state), t.Context()

	opened, err := c.OpenSession(ctx, &OpenSessionRequest{Session: "s", Shell: "dash"})
	if err != nil || opened.Name != "s" {
		t.Errorf("OpenSession = %v, %v", opened, err)
	}
	list, err := c.ListSessions(ctx)
	if err != nil || len(list) != 2 || list[1].Name != "b" {
		t.Errorf("ListSessions = %v, %v", list, err)
	}
	step, err := c.StartStep(ctx, &StartStepRequest{Session: "s", Command: []byte("exit 3")})
	if err != nil || step.Step != 4 || step.ExitCode != 3 || !step.Ended {
		t.Errorf("StartStep = %v, %v", step, err)
	}
	step, err = c.WaitStep(ctx, &WaitStepRequest{Session: "s", Step: 9})
	if err != nil || step.Step != 9 {
		t.Errorf("WaitStep = %v, %v", step, err)
	}
	screen, err := c.ReadScreen(ctx, &ReadScreenRequest{Session: "s", Offset: EndOffset})
	if err != nil || string(screen.Output) != "x" || screen.Offset != 5 || !screen.Closed {
		t.Errorf("ReadScreen = %v, %v", screen, err)
	}
	if err := errors.Join(c.SendInput(ctx, "s", []byte("y\n")), c.SignalSession(ctx, "s", 2), c.ResizeSession(ctx, "s", 80, 24), c.CloseSession(ctx, "s")); err != nil {
		t.Error(err)
	}
	want := []string{
		"open ns1/c1 [s dash]", "list ns1/c1 []", "start ns1/c1 [s exit 3]", "wait ns1/c1 [s 9]", "read ns1/c1 [s 9223372036854775807]",
		"send ns1/c1 [s y\n]", "signal ns1/c1 [s 2]", "resize ns1/c1 [s 80 24]", "close ns1/c1 [s]",
	}
	if !slices.Equal(r.asked, want) {
		t.Errorf("the service was asked %q, want %q", r.asked, want)
	}
}

func TestSessionErrors(t *testing.T) {
	r := &recorder{hang: make(chan struct{})}
	state, stop := serve(t, func(s *ttrpc.Server) { RegisterWaypointService(s, r) })
	c := dial(t, state)
	if err := c.CloseSession(t.Context(), "nope"); !errdefs.IsNotFound(err) {
		t.Errorf("CloseSession = %v, want not found", err)
	}
	_, err := c.WaitStep(t.Context(), &WaitStepRequest{Step: 1})
	if !errors.Is(err, ErrStale) || !errdefs.IsAborted(err) || !strings.Contains(err.Error(), "restored to a node") {
		t.Errorf("WaitStep of a stale step = %v, want %v", err, ErrStale)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err = c.WaitStep(ctx, &WaitStepRequest{Step: 2}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitStep without time = %v, want %v", err, context.DeadlineExceeded)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err = c.WaitStep(ctx, &WaitStepRequest{Step: 2}); !errors.Is(err, context.Canceled) {
		t.Errorf("WaitStep, cancelled = %v, want %v", err, context.Canceled)
	}
	// The connection has survived that.
	if _, err = c.WaitStep(t.Context(), &WaitStepRequest{Step: 3}); err != nil {
		t.Errorf("WaitStep = %v", err)
	}
	// A shim that dies in a call.
	failed := make(chan error, 1)
	go func() {
		_, err := c.WaitStep(t.Context(), &WaitStepRequest{Step: 2})
		failed <- err
	}()
	stop()
	err = <-failed
	close(r.hang)
	if !errors.Is(err, ErrGone) || !errdefs.IsUnavailable(err) {
		t.Errorf("WaitStep of a shim that dies = %v, want %v", err, ErrGone)
	}
}
