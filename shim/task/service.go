// Package task serves containerd's Task API, version 3, over containers that
// run in the shim's own process.
//
// One shim can serve several containers: those of one pod. For each, containerd
// calls Create, Start, and at the end Delete; Shutdown comes after each Delete
// and ends the shim once it has no container left. Errors keep their classes up
// to UnaryServerInterceptor, the one place where they become RPC statuses.
package task

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/statefork/statefork/runtime/container"
)

// Service implements the Task API.
type Service struct {
	events   *eventQueue
	shutdown shutdown.Service

	mu sync.Mutex
	// containers maps ids to containers. Protected by mu.
	containers map[string]*entry
}

// entry is a container that is created, or is being created.
type entry struct {
	// made is closed when the creation has ended, well or not.
	made chan struct{}
	// c is nil before that. Protected by Service.mu.
	c *container.Container
}

var (
	_ taskapi.TTRPCTaskService      = (*Service)(nil)
	_ shim.TTRPCService             = (*Service)(nil)
	_ shim.TTRPCServerUnaryOptioner = (*Service)(nil)
)

// NewService returns a service without containers. ctx names the namespace in
// which events are published; they are published to the last before sd is done.
func NewService(ctx context.Context, publisher events.Publisher, sd shutdown.Service) *Service {
	s := &Service{
		events:     newEventQueue(),
		shutdown:   sd,
		containers: map[string]*entry{},
	}
	go s.events.run(context.WithoutCancel(ctx), publisher)
	sd.RegisterCallback(s.events.close)
	return s
}

// RegisterTTRPC puts the service on the shim's socket.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	taskapi.RegisterTTRPCTaskService(server, s)
	return nil
}

// UnaryServerInterceptor turns the errors of all services on the shim's socket
// into RPC statuses.
func (s *Service) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		resp, err := method(ctx, unmarshal)
		if err != nil {
			log.G(ctx).WithError(err).WithField("method", info.FullMethod).Debug("call failed")
			return nil, errgrpc.ToGRPC(err)
		}
		return resp, nil
	}
}

// Container returns the container with the given id. It waits for one that is
// being created: containerd, when it has been killed in the midst of that and
// starts again, takes a shim that knows of no container for a leaked one.
func (s *Service) Container(ctx context.Context, id string) (*container.Container, error) {
	s.mu.Lock()
	e := s.containers[id]
	s.mu.Unlock()
	if e != nil {
		if err := e.wait(ctx); err != nil {
			return nil, fmt.Errorf("container %q: %w", id, err)
		}
	}
	if c := s.made(id); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("container %q is not created: %w", id, errdefs.ErrNotFound)
}

// made returns the container with the given id if it is there.
func (s *Service) made(id string) *container.Container {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.containers[id]; e != nil {
		return e.c
	}
	return nil
}

func (e *entry) wait(ctx context.Context) error {
	select {
	case <-e.made:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for its creation: %w", ctx.Err())
	}
}

// reserve takes an id for a container that is being created. The creation ends
// with put or forget.
func (s *Service) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.containers[id]; ok {
		return fmt.Errorf("container %q: %w", id, errdefs.ErrAlreadyExists)
	}
	s.containers[id] = &entry{made: make(chan struct{})}
	return nil
}

func (s *Service) put(id string, c *container.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.containers[id]
	e.c = c
	close(e.made)
}

func (s *Service) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.containers[id]; e != nil && e.c == nil {
		close(e.made)
	}
	delete(s.containers, id)
}

// entries are all that there are now.
func (s *Service) entries() []*entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.containers))
}

// Connect returns the pids of the shim and of a container's init. It waits for
// nothing: by it containerd finds out whether the shim is alive.
func (s *Service) Connect(_ context.Context, r *taskapi.ConnectRequest) (*taskapi.ConnectResponse, error) {
	resp := &taskapi.ConnectResponse{ShimPid: uint32(os.Getpid())}
	if c := s.made(r.ID); c != nil {
		resp.TaskPid = uint32(c.Pid())
	}
	return resp, nil
}

// Shutdown ends the shim, unless it still has containers. A container that is
// being created counts only if that succeeds.
func (s *Service) Shutdown(ctx context.Context, _ *taskapi.ShutdownRequest) (*emptypb.Empty, error) {
	for _, e := range s.entries() {
		if err := e.wait(ctx); err != nil {
			return nil, fmt.Errorf("shut down while a container is created: %w", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.containers) == 0 {
		s.shutdown.Shutdown()
	}
	return &emptypb.Empty{}, nil
}

// Abandoned says that nobody can ask for any of the containers any more: each
// has ended, and its bundle is gone.
func (s *Service) Abandoned() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.containers {
		if e.c == nil {
			return false
		}
		if st, err := e.c.State(""); err != nil || st.Status != container.StatusStopped {
			return false
		}
		if _, err := os.Stat(e.c.Bundle()); !errors.Is(err, os.ErrNotExist) {
			return false
		}
	}
	return true
}
