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
	"fmt"
	"os"
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
	// containers maps ids to containers; nil while one is being created.
	// Protected by mu.
	containers map[string]*container.Container
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
		containers: map[string]*container.Container{},
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

// Container returns the container with the given id.
func (s *Service) Container(id string) (*container.Container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, fmt.Errorf("container %q is not created: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// reserve takes an id for a container that is being created.
func (s *Service) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.containers[id]; ok {
		return fmt.Errorf("container %q: %w", id, errdefs.ErrAlreadyExists)
	}
	s.containers[id] = nil
	return nil
}

func (s *Service) put(id string, c *container.Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.containers[id] = c
}

func (s *Service) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.containers, id)
}

// Connect returns the pids of the shim and of a container's init.
func (s *Service) Connect(_ context.Context, r *taskapi.ConnectRequest) (*taskapi.ConnectResponse, error) {
	resp := &taskapi.ConnectResponse{ShimPid: uint32(os.Getpid())}
	if c, err := s.Container(r.ID); err == nil {
		resp.TaskPid = uint32(c.Pid())
	}
	return resp, nil
}

// Shutdown ends the shim, unless it still has containers.
func (s *Service) Shutdown(context.Context, *taskapi.ShutdownRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.containers) == 0 {
		s.shutdown.Shutdown()
	}
	return &emptypb.Empty{}, nil
}
