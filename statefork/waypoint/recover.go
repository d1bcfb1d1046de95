package waypoint

import (
	"context"
	"fmt"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// Recover brings back a container whose shim died in the middle of a
// checkpoint or restore, as it was at the freeze. What is found tells how far
// the operation had come:
//
//	whole images in the active snapshot   the dump was done, the commit was not: start from them
//	the key is missing                    the commit was done: prepare the key from that node, start there
//	nothing was written since the head    the restore was not done: start at the head
//
// Anything else means that the container ran on after its last node, so what it
// did since is only in its files, and the user has to choose.
func (c *Client) Recover(ctx context.Context, ref string) (*Result, error) {
	ctx = c.scope(ctx)
	begin := time.Now()
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	sn, err := c.snapshotter(rec)
	if err != nil {
		return nil, err
	}
	status, err := c.status(ctx, rec.ID)
	if err != nil {
		return nil, err
	}
	if status.running() {
		return nil, fmt.Errorf("container %q is running, there is nothing to recover: %w", rec.ID, errdefs.ErrFailedPrecondition)
	}
	var images string
	var n statefork.Node
	err = lookAgain(ctx, func() error {
		images, n, err = c.interrupted(ctx, sn, rec)
		return err
	})
	if err != nil {
		return nil, err
	}
	cont, err := c.ctrd.LoadContainer(ctx, rec.ID)
	if err != nil {
		return nil, fmt.Errorf("load container %q: %w", rec.ID, err)
	}
	if err := c.startOver(ctx, cont, rec, images); err != nil {
		return nil, err
	}
	return &Result{Container: rec.ID, Node: n, Started: true, Timings: Timings{Total: time.Since(begin)}, External: externalOf(rec)}, nil
}

func (c *Client) startOver(ctx context.Context, cont containerd.Container, rec containers.Container, images string) error {
	if err := deleteStopped(ctx, cont); err != nil {
		return err
	}
	return c.startTask(ctx, cont, rec, images, "")
}

// interrupted finds the images to go on from, and the node that they belong to
// or descend from. It makes sure that the active snapshot is there.
func (c *Client) interrupted(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container) (images string, n statefork.Node, err error) {
	info, err := settled(ctx, sn, rec)
	if errdefs.IsNotFound(err) {
		return c.complete(ctx, sn, rec)
	}
	if err != nil {
		return "", n, err
	}
	mounts, err := sn.Mounts(ctx, rec.SnapshotKey)
	if err != nil {
		return "", n, overtaken(fmt.Errorf("get mounts of active snapshot of %q: %w", rec.ID, err))
	}
	w, err := layer.FromMounts(mounts)
	if err != nil {
		return "", n, err
	}
	head, err := headOf(ctx, sn, rec)
	if err != nil {
		return "", n, err
	}
	if head != "" {
		if n, info, err = c.reach(ctx, sn, rec, head); err != nil {
			return "", n, err
		}
	}
	if w.Interrupted() {
		return w.Images(), n, nil
	}
	empty, err := w.Empty()
	if err != nil {
		return "", n, err
	}
	if head == "" || !empty {
		return "", n, statefork.WithHint(
			fmt.Errorf("container %q was not interrupted in a checkpoint: %w", rec.ID, errdefs.ErrFailedPrecondition),
			"start it, or restore it to a node")
	}
	images, err = imagesOf(info)
	return images, n, err
}

// complete prepares a key that is missing because an operation stopped between
// its Commit and its Prepare.
func (c *Client) complete(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container) (string, statefork.Node, error) {
	var n statefork.Node
	last, err := lastCommitOf(ctx, sn, rec.SnapshotKey)
	if err != nil {
		return "", n, err
	}
	id := last.Labels[api.LabelNode]
	if target := last.Labels[api.LabelAbandoned]; target != "" {
		id = target
	}
	n, info, err := c.reach(ctx, sn, rec, id)
	if err != nil {
		return "", n, err
	}
	err = prepareAt(ctx, sn, rec.SnapshotKey, info, rec.ID)
	if forgotten(ctx, sn, rec, err) {
		return "", n, statefork.WithHint(
			fmt.Errorf("snapshotter %q does not have the active snapshot of %q: %w", rec.Snapshotter, rec.ID, errdefs.ErrFailedPrecondition),
			"restore it to a node")
	}
	if err != nil {
		return "", n, overtaken(err)
	}
	log.G(ctx).WithField("node", n.ID).Info("completed an interrupted operation")
	images, err := imagesOf(info)
	return images, n, err
}

// lastCommitOf returns the newest of the snapshots that were committed from an
// active one.
func lastCommitOf(ctx context.Context, sn snapshots.Snapshotter, key string) (snapshots.Info, error) {
	var last snapshots.Info
	err := sn.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind == snapshots.KindCommitted && info.Created.After(last.Created) {
			last = info
		}
		return nil
	}, fmt.Sprintf("labels.%q==%q", api.LabelHeadOf, key))
	if err != nil {
		return last, fmt.Errorf("list snapshots: %w", err)
	}
	if last.Name == "" {
		return last, fmt.Errorf("snapshot %q is missing and nothing was committed from it: %w", key, errdefs.ErrNotFound)
	}
	return last, nil
}
