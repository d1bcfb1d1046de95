package waypoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal"
	"github.com/statefork/statefork/shim/api"
)

const (
	// maxWait bounds how long a call about a step waits: a client that has gone
	// must not leave calls behind for ever.
	maxWait = time.Minute
	// settle is how long a step that has just printed is given to end.
	settle = 5 * time.Millisecond
	// maxOutput is how much output one answer has: a message may have 4 MiB.
	maxOutput = 1 << 20
)

// OpenSession implements api.WaypointService.
func (s *Service) OpenSession(ctx context.Context, req *api.OpenSessionRequest) (*api.OpenSessionResponse, error) {
	resp, err := s.openSession(ctx, req)
	return resp, edge("open session in container", req.ContainerId, err)
}

func (s *Service) openSession(ctx context.Context, req *api.OpenSessionRequest) (*api.OpenSessionResponse, error) {
	set, err := s.sessions(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	size, err := size(req.Columns, req.Rows)
	if err != nil {
		return nil, err
	}
	sess, err := set.Open(ctx, req.Session, terminal.Launch{
		Shell: req.Shell, Cwd: req.Cwd, User: req.User, Env: req.Env, Size: size,
	})
	if err != nil {
		return nil, err
	}
	return &api.OpenSessionResponse{Session: describe(sess)}, nil
}

// ListSessions implements api.WaypointService.
func (s *Service) ListSessions(ctx context.Context, req *api.ListSessionsRequest) (*api.ListSessionsResponse, error) {
	set, err := s.sessions(ctx, req.ContainerId)
	if err != nil {
		return nil, edge("list sessions of container", req.ContainerId, err)
	}
	resp := &api.ListSessionsResponse{}
	for _, sess := range set.List() {
		resp.Sessions = append(resp.Sessions, describe(sess))
	}
	return resp, nil
}

// CloseSession implements api.WaypointService.
func (s *Service) CloseSession(ctx context.Context, req *api.CloseSessionRequest) (*api.CloseSessionResponse, error) {
	set, err := s.sessions(ctx, req.ContainerId)
	if err == nil {
		err = set.Close(req.Session)
	}
	if err != nil {
		return nil, edge("close session in container", req.ContainerId, err)
	}
	return &api.CloseSessionResponse{}, nil
}

// StartStep implements api.WaypointService.
func (s *Service) StartStep(ctx context.Context, req *api.StartStepRequest) (*api.StepResponse, error) {
	resp, err := s.startStep(ctx, req)
	return resp, edge("run step in container", req.ContainerId, err)
}

func (s *Service) startStep(ctx context.Context, req *api.StartStepRequest) (*api.StepResponse, error) {
	set, err := s.sessions(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	spec := terminal.StepSpec{
		Command:     req.Command,
		Timeout:     milliseconds(req.TimeoutMs),
		IdleTimeout: milliseconds(req.IdleTimeoutMs),
		OutputLimit: int64(req.OutputLimit),
	}
	var st *terminal.Step
	if req.Background {
		_, st, err = set.StartService(ctx, req.Session, spec)
	} else {
		var sess *terminal.Session
		if sess, err = set.Open(ctx, req.Session, terminal.Launch{}); err == nil {
			st, err = sess.Start(ctx, spec)
		}
	}
	if err != nil {
		return nil, err
	}
	if req.Background {
		return stepResponse(st.Status()), nil
	}
	return await(ctx, st, req.WaitMs, 0)
}

// WaitStep implements api.WaypointService.
func (s *Service) WaitStep(ctx context.Context, req *api.WaitStepRequest) (*api.StepResponse, error) {
	resp, err := s.waitStep(ctx, req)
	return resp, edge("wait for step in container", req.ContainerId, err)
}

func (s *Service) waitStep(ctx context.Context, req *api.WaitStepRequest) (*api.StepResponse, error) {
	set, err := s.sessions(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	if !req.AnyGeneration && req.Generation != set.Generation() {
		return &api.StepResponse{Stale: true, Generation: set.Generation()}, nil
	}
	sess, err := set.Get(req.Session)
	if err != nil {
		return nil, err
	}
	st, err := sess.Step(req.Step)
	if err != nil {
		return nil, err
	}
	if req.NoOutput {
		return await(ctx, st, req.WaitMs, -1)
	}
	return await(ctx, st, req.WaitMs, int64(req.Offset))
}

// await waits for a step as long as the request says, and reads its output from
// the offset on, unless that is less than 0.
func await(ctx context.Context, st *terminal.Step, waitMs uint64, offset int64) (*api.StepResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, min(milliseconds(waitMs), maxWait))
	defer cancel()
	status := st.Wait(ctx, offset)
	if offset >= 0 && !status.Ended && status.Output > offset {
		// Most commands end soon after they print: one answer has it all then.
		soon, cancel := context.WithTimeout(ctx, settle)
		defer cancel()
		status = st.Wait(soon, -1)
	}
	resp := stepResponse(status)
	if offset < 0 || status.Stale {
		return resp, nil
	}
	size := max(0, min(maxOutput, status.Output-offset))
	buf := make([]byte, size)
	n, from, err := st.Output(buf, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	resp.Output, resp.Offset = buf[:n], uint64(from)
	return resp, nil
}

func stepResponse(st terminal.Status) *api.StepResponse {
	if st.Stale {
		return &api.StepResponse{Stale: true, Session: st.Session, Step: st.Step}
	}
	return &api.StepResponse{
		Session:         st.Session,
		Step:            st.Step,
		Generation:      st.Generation,
		Ended:           st.Ended,
		ExitCode:        uint32(st.ExitCode),
		ExitKnown:       st.ExitKnown,
		Signal:          uint32(st.Signal),
		TimedOut:        st.TimedOut,
		ShellExited:     st.ShellExited,
		NewShell:        st.NewShell,
		WaitingForInput: st.WaitingForInput,
		Cwd:             st.Cwd,
		DurationUs:      uint64(st.Duration.Microseconds()),
		OutputBytes:     uint64(st.Output),
		DroppedBytes:    uint64(st.Dropped),
	}
}

// SendInput implements api.WaypointService.
func (s *Service) SendInput(ctx context.Context, req *api.SendInputRequest) (*api.SendInputResponse, error) {
	sess, err := s.session(ctx, req.ContainerId, req.Session)
	if err == nil {
		err = sess.Send(ctx, req.Input)
	}
	if err != nil {
		return nil, edge("send input to container", req.ContainerId, err)
	}
	return &api.SendInputResponse{}, nil
}

// SignalSession implements api.WaypointService.
func (s *Service) SignalSession(ctx context.Context, req *api.SignalSessionRequest) (*api.SignalSessionResponse, error) {
	sess, err := s.session(ctx, req.ContainerId, req.Session)
	if err == nil && unix.SignalName(unix.Signal(req.Signal)) == "" {
		err = fmt.Errorf("signal %d: no such signal: %w", req.Signal, errdefs.ErrInvalidArgument)
	}
	if err == nil {
		err = sess.Signal(ctx, unix.Signal(req.Signal))
	}
	if err != nil {
		return nil, edge("signal session in container", req.ContainerId, err)
	}
	return &api.SignalSessionResponse{}, nil
}

// ResizeSession implements api.WaypointService.
func (s *Service) ResizeSession(ctx context.Context, req *api.ResizeSessionRequest) (*api.ResizeSessionResponse, error) {
	err := s.resizeSession(ctx, req)
	if err != nil {
		return nil, edge("resize session in container", req.ContainerId, err)
	}
	return &api.ResizeSessionResponse{}, nil
}

func (s *Service) resizeSession(ctx context.Context, req *api.ResizeSessionRequest) error {
	size, err := size(req.Columns, req.Rows)
	if err != nil {
		return err
	}
	sess, err := s.session(ctx, req.ContainerId, req.Session)
	if err != nil {
		return err
	}
	return sess.Resize(ctx, size)
}

// ReadScreen implements api.WaypointService.
func (s *Service) ReadScreen(ctx context.Context, req *api.ReadScreenRequest) (*api.ReadScreenResponse, error) {
	resp, err := s.readScreen(ctx, req)
	return resp, edge("read terminal of container", req.ContainerId, err)
}

func (s *Service) readScreen(ctx context.Context, req *api.ReadScreenRequest) (*api.ReadScreenResponse, error) {
	sess, err := s.session(ctx, req.ContainerId, req.Session)
	if err != nil {
		return nil, err
	}
	screen := sess.Screen()
	total, _ := screen.Size()
	offset := min(int64(min(req.Offset, 1<<62)), total)
	ctx, cancel := context.WithTimeout(ctx, min(milliseconds(req.WaitMs), maxWait))
	defer cancel()
	screen.Wait(ctx, offset)
	total, _ = screen.Size()
	buf := make([]byte, max(0, min(maxOutput, total-offset)))
	n, from, err := screen.ReadAt(buf, offset)
	closed := screen.Ended()
	if err != nil && !errors.Is(err, io.EOF) && !closed {
		return nil, err
	}
	return &api.ReadScreenResponse{Output: buf[:n], Offset: uint64(from), Closed: closed}, nil
}

func (s *Service) sessions(ctx context.Context, id string) (*terminal.Set, error) {
	c, err := s.containers.Container(ctx, id)
	if err != nil {
		return nil, err
	}
	return c.Sessions(), nil
}

func (s *Service) session(ctx context.Context, id, name string) (*terminal.Session, error) {
	set, err := s.sessions(ctx, id)
	if err != nil {
		return nil, err
	}
	return set.Get(name)
}

func describe(sess *terminal.Session) *api.Session {
	i := sess.Info()
	return &api.Session{
		Name:       i.Name,
		Shell:      i.Shell,
		Pid:        uint32(i.Pid),
		Cwd:        i.Cwd,
		Generation: i.Generation,
		LastStep:   i.Steps,
		Running:    i.Running,
		Columns:    uint32(i.Size.Columns),
		Rows:       uint32(i.Size.Rows),
		Service:    i.Service,
	}
}

func size(columns, rows uint32) (terminal.Size, error) {
	const most = 1<<16 - 1
	if columns > most || rows > most {
		return terminal.Size{}, fmt.Errorf("terminal of %d by %d: at most %d are possible: %w", columns, rows, most, errdefs.ErrInvalidArgument)
	}
	return terminal.Size{Columns: uint16(columns), Rows: uint16(rows)}, nil
}

func milliseconds(n uint64) time.Duration {
	const most = uint64(1<<62) / uint64(time.Millisecond)
	return time.Duration(min(n, most)) * time.Millisecond
}
