package task

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	eventsapi "github.com/containerd/containerd/api/events"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/statefork/statefork/runtime/container"
)

// StateRoot returns the directory below which the states of a namespace's
// containers are, or nothing if each is in its bundle.
func StateRoot(opts *options.Options, namespace string) string {
	if opts.GetRoot() == "" {
		return ""
	}
	return filepath.Join(opts.Root, namespace)
}

// Create makes a container with its init, which waits for Start.
func (s *Service) Create(ctx context.Context, r *taskapi.CreateTaskRequest) (_ *taskapi.CreateTaskResponse, retErr error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, err
	}
	opts, err := decodeOptions(r.Options)
	if err != nil {
		return nil, err
	}
	if err := s.reserve(r.ID); err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			s.forget(r.ID)
		}
	}()
	// The delete action, another process, needs them.
	if err := runc.WriteOptions(r.Bundle, opts); err != nil {
		return nil, fmt.Errorf("keep runtime options: %w", err)
	}
	c, err := container.Create(ctx, container.Config{
		ID:            r.ID,
		Namespace:     ns,
		Bundle:        r.Bundle,
		Root:          StateRoot(opts, ns),
		Mounts:        mount.FromProto(r.Rootfs),
		Stdio:         container.Stdio{Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, Terminal: r.Terminal},
		IoUID:         int(opts.IoUid),
		IoGID:         int(opts.IoGid),
		SystemdCgroup: opts.SystemdCgroup,
		NoPivotRoot:   opts.NoPivotRoot,
		NoNewKeyring:  opts.NoNewKeyring,
		Checkpoint:    r.Checkpoint,
		Observer:      &observer{events: s.events, request: r},
	})
	if err != nil {
		return nil, err
	}
	s.put(r.ID, c)
	return &taskapi.CreateTaskResponse{Pid: uint32(c.Pid())}, nil
}

// Start starts init or an exec'd process.
func (s *Service) Start(ctx context.Context, r *taskapi.StartRequest) (*taskapi.StartResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	pid, err := c.Start(ctx, r.ExecID)
	if err != nil {
		return nil, err
	}
	return &taskapi.StartResponse{Pid: uint32(pid)}, nil
}

// Exec adds a process to a container.
func (s *Service) Exec(ctx context.Context, r *taskapi.ExecProcessRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	spec := &specs.Process{}
	if err := json.Unmarshal(r.Spec.GetValue(), spec); err != nil {
		return nil, fmt.Errorf("decode process of exec %q: %w: %w", r.ExecID, err, errdefs.ErrInvalidArgument)
	}
	spec.Terminal = r.Terminal
	err = c.Exec(ctx, container.ExecConfig{
		ID:    r.ExecID,
		Spec:  spec,
		Stdio: container.Stdio{Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, Terminal: r.Terminal},
	})
	if err != nil {
		return nil, err
	}
	s.events.send(&eventsapi.TaskExecAdded{ContainerID: r.ID, ExecID: r.ExecID})
	return &emptypb.Empty{}, nil
}

// Kill signals a process.
func (s *Service) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.Kill(ctx, r.ExecID, unix.Signal(r.Signal), r.All)
}

// Wait waits for the end of a process.
func (s *Service) Wait(ctx context.Context, r *taskapi.WaitRequest) (*taskapi.WaitResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	e, err := c.Wait(ctx, r.ExecID)
	if err != nil {
		return nil, err
	}
	return &taskapi.WaitResponse{ExitStatus: uint32(e.Status), ExitedAt: exitedAt(e)}, nil
}

// Delete forgets a process that has ended, with init the whole container.
func (s *Service) Delete(ctx context.Context, r *taskapi.DeleteRequest) (*taskapi.DeleteResponse, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	state, err := c.State(r.ExecID)
	if err != nil {
		return nil, err
	}
	e, err := c.Delete(ctx, r.ExecID)
	if err != nil {
		return nil, err
	}
	if r.ExecID == "" {
		s.forget(r.ID)
		s.events.send(&eventsapi.TaskDelete{
			ContainerID: r.ID,
			Pid:         uint32(state.Pid),
			ExitStatus:  uint32(e.Status),
			ExitedAt:    exitedAt(e),
		})
	}
	return &taskapi.DeleteResponse{Pid: uint32(state.Pid), ExitStatus: uint32(e.Status), ExitedAt: exitedAt(e)}, nil
}

// Checkpoint dumps a container's processes into r.Path. Without options it runs
// on: clients set the option to exit only for runc's own runtime.
func (s *Service) Checkpoint(ctx context.Context, r *taskapi.CheckpointTaskRequest) (*emptypb.Empty, error) {
	c, err := s.Container(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	if r.Path == "" {
		return nil, fmt.Errorf("checkpoint container %q: no path given: %w", r.ID, errdefs.ErrInvalidArgument)
	}
	opts := &options.CheckpointOptions{}
	if r.Options.GetTypeUrl() != "" {
		if err := typeurl.UnmarshalTo(r.Options, opts); err != nil {
			return nil, fmt.Errorf("decode checkpoint options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	return &emptypb.Empty{}, c.DumpTo(ctx, r.Path, opts.Exit)
}

// exitedAt is the time of an exit, absent for a process that never ran.
func exitedAt(e container.Exit) *timestamppb.Timestamp {
	if e.At.IsZero() {
		return nil
	}
	return timestamppb.New(e.At)
}
