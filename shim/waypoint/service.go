// Package waypoint serves the shim's own ttrpc service: checkpoint and restore
// in place, as one transaction over a container's processes, its root mount and
// containerd's snapshots.
//
// # The transaction
//
// A checkpoint has three phases, which the journal in the task's bundle names
// while they last: dump (the tree is frozen, then dead), seal (the active
// snapshot becomes the node, and a successor with the same key is prepared),
// restore (the tree is back). What each failure leaves, and who repairs it:
//
//	failure                     left behind                      repaired by
//	dump fails                  tree runs on, no images          nobody needs to
//	Commit fails                active snapshot as it was        container.Checkpoint: old root, restore from the images
//	between Commit and Prepare  key missing, node says head-of   reconcile: Prepare again, before any other operation
//	restore fails               node whole, tree dead            one more try; then the task exits
//	shim dies after the dump    images in the active snapshot    statefork recover: a new task from them
//	containerd restarts         nothing: calls wait for it       retry until it is back
//
// A restore rehearses first: it prepares and mounts the node's root under
// another key and takes that down again. Only then it ends the present tree,
// commits the active snapshot under a name that says what it was abandoned for,
// prepares the key from the node, and at the end drops what was abandoned. The
// same reconcile completes it.
package waypoint

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"github.com/statefork/statefork/runtime/container"
	"github.com/statefork/statefork/shim/api"
)

// Containers finds the containers that the shim runs.
type Containers interface {
	// Container returns the container with the given id, or ErrNotFound. It
	// waits for one that is being created.
	Container(ctx context.Context, id string) (*container.Container, error)
}

// Service implements api.WaypointService.
type Service struct {
	namespace  string
	containers Containers
	daemon     *daemon
}

var _ api.WaypointService = (*Service)(nil)

// NewService returns the service for the given containerd namespace. address
// is containerd's gRPC socket; it is dialled when first needed.
func NewService(namespace, address string, containers Containers) *Service {
	return &Service{namespace: namespace, containers: containers, daemon: newDaemon(address)}
}

// RegisterTTRPC puts the service on the task's socket.
func (s *Service) RegisterTTRPC(server *ttrpc.Server) error {
	api.RegisterWaypointService(server, s)
	return nil
}

// Close ends the connection to containerd.
func (s *Service) Close() error { return s.daemon.Close() }

// Checkpoint implements api.WaypointService.
func (s *Service) Checkpoint(ctx context.Context, req *api.CheckpointRequest) (*api.CheckpointResponse, error) {
	resp, err := s.checkpoint(s.context(ctx), req)
	return resp, edge("checkpoint container", req.ContainerId, err)
}

// Restore implements api.WaypointService.
func (s *Service) Restore(ctx context.Context, req *api.RestoreRequest) (*api.RestoreResponse, error) {
	resp, err := s.restore(s.context(ctx), req)
	return resp, edge("restore container", req.ContainerId, err)
}

// List implements api.WaypointService.
func (s *Service) List(ctx context.Context, req *api.ListRequest) (*api.ListResponse, error) {
	resp, err := s.list(s.context(ctx), req)
	return resp, edge("list nodes of container", req.ContainerId, err)
}

// context gives calls to containerd their namespace.
func (s *Service) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, s.namespace)
}

// edge says what a failed call was about. The shim's interceptor turns it into
// an RPC status.
func edge(doing, id string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %q: %w", doing, id, err)
}

// acquire waits until the container is free for an operation, and reads its
// record then: the operation before may have changed it.
func (s *Service) acquire(ctx context.Context, id string) (_ *container.Container, _ *record, release func(), _ error) {
	c, err := s.containers.Container(ctx, id)
	if err != nil {
		return nil, nil, nil, err
	}
	release, err = c.Acquire(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	rec, err := s.daemon.record(ctx, id)
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	return c, rec, release, nil
}

func (s *Service) list(ctx context.Context, req *api.ListRequest) (*api.ListResponse, error) {
	c, err := s.containers.Container(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	rec, err := s.daemon.record(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	nodes, err := rec.nodes(ctx)
	if err != nil {
		return nil, err
	}
	j, err := readJournal(c.Bundle())
	if err != nil {
		return nil, err
	}
	resp := &api.ListResponse{Nodes: nodes, Generation: c.Generation(), Phase: j.Phase}
	active, err := rec.snapshots.Stat(ctx, rec.key)
	switch {
	case err == nil:
		if resp.Head, err = rec.head(ctx, active); err != nil {
			return nil, err
		}
	case errdefs.IsNotFound(err):
		// an operation is between Commit and Prepare: no head for the moment
	default:
		return nil, err
	}
	return resp, nil
}

// timings are those of an operation whose request came at begin.
func timings(t container.Timings, begin time.Time) *api.Timings {
	us := func(d time.Duration) uint64 { return uint64(d.Microseconds()) }
	return &api.Timings{
		Total:    us(time.Since(begin)),
		Frozen:   us(t.Frozen),
		Dump:     us(t.Dump),
		Snapshot: us(t.Seal),
		Restore:  us(t.Restore),
	}
}

func externals(list []container.External) []*api.External {
	out := make([]*api.External, 0, len(list))
	for _, e := range list {
		out = append(out, &api.External{Kind: e.Kind, Name: e.Name})
	}
	return out
}
