package waypoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/statefork/statefork/runtime/container"
	"github.com/statefork/statefork/runtime/rootfs"
	"github.com/statefork/statefork/shim/api"
)

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t.UTC()) }

func (s *Service) restore(ctx context.Context, req *api.RestoreRequest) (*api.RestoreResponse, error) {
	begin := time.Now()
	c, rec, release, err := s.acquire(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	defer release()
	if _, err := rec.activeMounts(ctx); err != nil {
		return nil, err
	}
	node, info, err := rec.node(ctx, req.Node)
	if err != nil {
		return nil, err
	}
	j := &journal{Op: "restore", Node: node.Id, Key: rec.key, Images: node.Images, bundle: c.Bundle()}
	res, err := rec.rollBack(ctx, c, j, node, info)
	if err := errors.Join(err, j.clear()); err != nil {
		return nil, err
	}
	resp := &api.RestoreResponse{
		Node:       node,
		Timings:    timings(res.Timings, begin),
		External:   externals(res.External),
		Generation: c.Generation(),
	}
	for id, pid := range res.EndedExecs {
		resp.EndedExecs = append(resp.EndedExecs, &api.Exec{ExecId: id, Pid: uint32(pid)})
	}
	return resp, nil
}

// rollBack moves the container to the node. The key of its active snapshot
// stays what it was: clients take it for granted that it is the container's id.
func (r *record) rollBack(ctx context.Context, c *container.Container, j *journal, node *api.Node, info snapshots.Info) (*container.Restored, error) {
	suffix, err := randomHex(6)
	if err != nil {
		return nil, err
	}
	if err := r.rehearse(ctx, r.key+"-"+suffix, node, info, c.Bundle()); err != nil {
		return nil, err
	}
	abandoned := api.AbandonedName(r.key, suffix)
	res, err := c.Restore(ctx, container.RestoreOptions{
		Images: node.Images,
		Phase:  j.enter,
		Switch: func(ctx context.Context) ([]mount.Mount, error) {
			ctx, cancel := context.WithTimeout(ctx, sealTimeout)
			defer cancel()
			if err := r.abandon(ctx, abandoned, suffix, node.Id); err != nil {
				return nil, err
			}
			return r.prepare(ctx, r.key, node, info, nil)
		},
	})
	if err != nil {
		return nil, err
	}
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), sealTimeout)
	defer cancel()
	if err := r.discard(done, abandoned); err != nil {
		// Nothing depends on it, and it goes with the container at the latest.
		log.G(ctx).WithError(err).WithField("snapshot", abandoned).Warn("drop the abandoned state")
	}
	return res, nil
}

// discard removes a committed snapshot that nothing went on from. Asking for it
// first shows our snapshotter that containerd knows of it: else, for all that
// the snapshotter knows, its commit was taken back, and the garbage collection
// only makes it the active snapshot again that it was.
func (r *record) discard(ctx context.Context, name string) error {
	if _, err := r.snapshots.Stat(ctx, name); err != nil {
		return fmt.Errorf("stat snapshot %q: %w", name, err)
	}
	return r.remove(ctx, name)
}

// rehearse prepares and mounts a root from the node and takes it down again:
// what is going to fail shall fail while the present state is still there.
func (r *record) rehearse(ctx context.Context, key string, node *api.Node, info snapshots.Info, bundle string) (retErr error) {
	mounts, err := r.prepare(ctx, key, node, info, nil)
	if err != nil {
		return err
	}
	defer func() {
		retErr = errors.Join(retErr, r.remove(context.WithoutCancel(ctx), key))
	}()
	dir, err := os.MkdirTemp(bundle, "rehearsal-")
	if err != nil {
		return fmt.Errorf("make mountpoint: %w", err)
	}
	defer func() {
		retErr = errors.Join(retErr, rootfs.Unmount(dir), os.Remove(dir))
	}()
	return rootfs.Mount(mounts, dir)
}

// abandon frees the active snapshot's key. Committing is as quick as removing
// but destroys nothing, so that the way to the node can be taken again from
// wherever it was interrupted: see reconcile. The id is like a node's, by which
// our snapshotter knows a commit that is repeated.
func (r *record) abandon(ctx context.Context, name, id, nodeID string) error {
	labels := map[string]string{
		api.LabelNode:        id,
		api.LabelGCContainer: r.id,
		api.LabelHeadOf:      r.key,
		api.LabelAbandoned:   nodeID,
		api.LabelCreated:     time.Now().UTC().Format(time.RFC3339Nano),
	}
	if err := r.commit(ctx, name, labels); err != nil {
		return fmt.Errorf("set the abandoned state aside: %w", err)
	}
	return nil
}

func (r *record) remove(ctx context.Context, key string) error {
	err := persist(ctx, func() error { return r.snapshots.Remove(ctx, key) })
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove snapshot %q: %w", key, err)
	}
	return nil
}
