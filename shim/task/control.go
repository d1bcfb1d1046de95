package task

import (
	"context"
	"encoding/json"
	"fmt"

	eventsapi "github.com/containerd/containerd/api/events"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/statefork/statefork/runtime/container"
)

var statuses = map[container.Status]tasktypes.Status{
	container.StatusCreated: tasktypes.Status_CREATED,
	container.StatusRunning: tasktypes.Status_RUNNING,
	container.StatusPausing: tasktypes.Status_PAUSING,
	container.StatusPaused:  tasktypes.Status_PAUSED,
	container.StatusStopped: tasktypes.Status_STOPPED,
}

// State returns what is known of a process.
func (s *Service) State(ctx context.Context, r *taskapi.StateRequest) (*taskapi.StateResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	st, err := c.State(r.ExecID)
	if err != nil {
		return nil, err
	}
	id := r.ExecID
	if id == "" {
		id = r.ID
	}
	return &taskapi.StateResponse{
		ID:         id,
		Bundle:     c.Bundle(),
		Pid:        uint32(st.Pid),
		Status:     statuses[st.Status],
		Stdin:      st.Stdio.Stdin,
		Stdout:     st.Stdio.Stdout,
		Stderr:     st.Stdio.Stderr,
		Terminal:   st.Stdio.Terminal,
		ExitStatus: uint32(st.Exit.Status),
		ExitedAt:   exitedAt(st.Exit),
		ExecID:     r.ExecID,
	}, nil
}

// Pids lists the processes of a container.
func (s *Service) Pids(ctx context.Context, r *taskapi.PidsRequest) (*taskapi.PidsResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	infos, err := c.Pids()
	if err != nil {
		return nil, err
	}
	resp := &taskapi.PidsResponse{}
	for _, i := range infos {
		p := &tasktypes.ProcessInfo{Pid: uint32(i.Pid)}
		if i.ExecID != "" {
			p.Info, err = typeurl.MarshalAnyToProto(&options.ProcessDetails{ExecID: i.ExecID})
			if err != nil {
				return nil, fmt.Errorf("encode details of pid %d: %w", i.Pid, err)
			}
		}
		resp.Processes = append(resp.Processes, p)
	}
	return resp, nil
}

// Pause freezes a container.
func (s *Service) Pause(ctx context.Context, r *taskapi.PauseRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	if err := c.Pause(ctx); err != nil {
		return nil, err
	}
	s.events.send(&eventsapi.TaskPaused{ContainerID: r.ID})
	return &emptypb.Empty{}, nil
}

// Resume lets a paused container go on.
func (s *Service) Resume(ctx context.Context, r *taskapi.ResumeRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	if err := c.Resume(ctx); err != nil {
		return nil, err
	}
	s.events.send(&eventsapi.TaskResumed{ContainerID: r.ID})
	return &emptypb.Empty{}, nil
}

// ResizePty sets the size of a process' terminal.
func (s *Service) ResizePty(ctx context.Context, r *taskapi.ResizePtyRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.ResizePty(r.ExecID, uint16(r.Width), uint16(r.Height))
}

// CloseIO lets go of a process' stdin.
func (s *Service) CloseIO(ctx context.Context, r *taskapi.CloseIORequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.CloseIO(r.ExecID)
}

// Update changes a container's limits.
func (s *Service) Update(ctx context.Context, r *taskapi.UpdateTaskRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	resources := &specs.LinuxResources{}
	if err := json.Unmarshal(r.Resources.GetValue(), resources); err != nil {
		return nil, fmt.Errorf("decode resources: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return &emptypb.Empty{}, c.Update(ctx, resources)
}

// Stats returns the metrics of a container's cgroup.
func (s *Service) Stats(ctx context.Context, r *taskapi.StatsRequest) (*taskapi.StatsResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	stats, err := c.Stats()
	if err != nil {
		return nil, err
	}
	any, err := typeurl.MarshalAnyToProto(stats)
	if err != nil {
		return nil, fmt.Errorf("encode metrics: %w", err)
	}
	return &taskapi.StatsResponse{Stats: any}, nil
}
