package waypoint

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/runtime/restart"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// leaseTime is how long containerd's garbage collector spares what an
// operation has made so far, should this process die in it.
const leaseTime = 15 * time.Minute

// withLease protects what is made under the returned context, and the node's
// snapshot, until release is called.
func (c *Client) withLease(ctx context.Context, snapshotter, node string) (_ context.Context, release func(), _ error) {
	leased, done, err := c.ctrd.WithLease(ctx, leases.WithRandomID(), leases.WithExpiration(leaseTime))
	if err != nil {
		return nil, nil, fmt.Errorf("create lease: %w", err)
	}
	release = func() {
		ctx, cancel := undo(ctx)
		defer cancel()
		if err := done(ctx); err != nil {
			log.G(ctx).WithError(err).Warn("lease stays until it expires")
		}
	}
	id, _ := leases.FromContext(leased)
	err = c.ctrd.LeasesService().AddResource(ctx, leases.Lease{ID: id},
		leases.Resource{ID: node, Type: "snapshots/" + snapshotter})
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("lease snapshot %q: %w", node, err)
	}
	return leased, release, nil
}

// imagesOf returns the directory of a node's process images.
func imagesOf(info snapshots.Info) (string, error) {
	dir := info.Labels[api.LabelImages]
	if !filepath.IsAbs(dir) {
		return "", fmt.Errorf("node %q has no process images: %w", info.Labels[api.LabelNode], errdefs.ErrFailedPrecondition)
	}
	if _, err := os.Stat(dir); err != nil {
		return "", fmt.Errorf("find process images of node %q: %w: %w", info.Labels[api.LabelNode], err, errdefs.ErrFailedPrecondition)
	}
	return dir, nil
}

// parentOf says on what to prepare an active snapshot at a node. A snapshotter
// that keeps the lineage finds the node by label, and its visible parent stays
// the image's; for another one the node is the parent.
func parentOf(info snapshots.Info) string {
	if layer.LineageKept(info.Labels[api.LabelImages]) {
		return info.Parent
	}
	return info.Name
}

// inherited are the labels by which a snapshotter maps user ids; they must be
// the same on every snapshot of a container.
var inherited = []string{snapshots.LabelSnapshotUIDMapping, snapshots.LabelSnapshotGIDMapping}

// prepareAt prepares key as an active snapshot at a node, for a container.
func prepareAt(ctx context.Context, sn snapshots.Snapshotter, key string, info snapshots.Info, container string) error {
	labels := map[string]string{
		api.LabelFrom:        info.Labels[api.LabelNode],
		api.LabelGCContainer: container,
	}
	for _, k := range inherited {
		if v, ok := info.Labels[k]; ok {
			labels[k] = v
		}
	}
	if _, err := sn.Prepare(ctx, key, parentOf(info), snapshots.WithLabels(labels)); err != nil {
		return fmt.Errorf("prepare snapshot %q at node %q: %w", key, info.Labels[api.LabelNode], err)
	}
	return nil
}

// startAt gives a container that does not run a new task at a node.
func (c *Client) startAt(ctx context.Context, rec containers.Container, n statefork.Node, info snapshots.Info) (res *Result, err error) {
	err = lookAgain(ctx, func() error {
		res, err = c.tryStartAt(ctx, rec, n, info)
		return err
	})
	return res, err
}

// takeKey prepares a container's key, which is free, at a node.
func takeKey(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container, info snapshots.Info) error {
	err := prepareAt(ctx, sn, rec.SnapshotKey, info, rec.ID)
	if forgotten(ctx, sn, rec, err) {
		log.G(ctx).WithField("snapshot", rec.SnapshotKey).Warn("remove an active snapshot that only containerd knows")
		err = errors.Join(err, sn.Remove(ctx, rec.SnapshotKey))
	}
	return overtaken(err)
}

// tryStartAt is startAt as far as containerd stands still. If it fails,
// everything is as it was before.
func (c *Client) tryStartAt(ctx context.Context, rec containers.Container, n statefork.Node, info snapshots.Info) (_ *Result, retErr error) {
	begin := time.Now()
	images, err := imagesOf(info)
	if err != nil {
		return nil, err
	}
	cont, err := c.ctrd.LoadContainer(ctx, rec.ID)
	if err != nil {
		return nil, fmt.Errorf("load container %q: %w", rec.ID, err)
	}
	if err := deleteStopped(ctx, cont); err != nil {
		return nil, err
	}
	leased, release, err := c.withLease(ctx, rec.Snapshotter, info.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	sn := c.ctrd.SnapshotService(rec.Snapshotter)
	var made undoStack
	defer func() { retErr = made.unwind(ctx, retErr) }()
	abandoned, err := abandon(leased, sn, rec, info, &made)
	if err != nil {
		return nil, err
	}
	if err := takeKey(leased, sn, rec, info); err != nil {
		return nil, err
	}
	made.push(func(ctx context.Context) error { return sn.Remove(ctx, rec.SnapshotKey) })
	snapshotted := time.Since(begin)
	if err := c.startTask(leased, cont, rec, images, ""); err != nil {
		return nil, err
	}
	// Else the restart monitor would stop a container that was stopped by hand.
	if err := setLabels(ctx, cont, restartLabels(rec.Labels)); err != nil {
		log.G(ctx).WithError(err).WithField("container", rec.ID).Warn("restart labels are not updated")
	}
	// The abandoned state goes last: a failure up to here brings it back. Our
	// snapshotter frees it at once if it was asked for before: see its takeback.go.
	if abandoned != "" {
		_, err := sn.Stat(ctx, abandoned)
		if err == nil {
			err = sn.Remove(ctx, abandoned)
		}
		if err != nil && !errdefs.IsNotFound(err) {
			log.G(ctx).WithError(err).WithField("snapshot", abandoned).Warn("abandoned state stays")
		}
	}
	total := time.Since(begin)
	return &Result{
		Container: rec.ID, Node: n, Started: true,
		Timings:  Timings{Total: total, Snapshot: snapshotted, Restore: total - snapshotted},
		External: externalOf(rec),
	}, nil
}

// abandon frees the key of a stopped container's active snapshot: clients take
// it for granted that it is the container's id, so the state at the node gets
// the same. What was in it is committed, destroying nothing, and pushed on made
// to be prepared again. It returns "" if there was nothing under the key.
func abandon(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container, at snapshots.Info, made *undoStack) (string, error) {
	key := rec.SnapshotKey
	was, err := sn.Stat(ctx, key)
	if errdefs.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("stat snapshot %q: %w", key, err)
	}
	head, err := headOf(ctx, sn, rec)
	if err != nil {
		return "", err
	}
	// It gets an id as a node has one, so that it can be gone on from under the
	// same visible parent; without a container's label it is no node.
	id := randomHex(6)
	name := api.AbandonedName(key, id)
	err = sn.Commit(ctx, name, key, snapshots.WithLabels(map[string]string{
		api.LabelGCContainer: rec.ID,
		api.LabelHeadOf:      key,
		api.LabelAbandoned:   at.Labels[api.LabelNode],
		api.LabelCreated:     time.Now().UTC().Format(time.RFC3339Nano),
		api.LabelNode:        id,
		api.LabelParent:      head,
	}))
	if err != nil {
		return "", overtaken(fmt.Errorf("set the abandoned state of %q aside: %w", rec.ID, err))
	}
	made.push(func(ctx context.Context) error {
		parent, labels := name, maps.Clone(was.Labels)
		if layer.LineageKept(at.Labels[api.LabelImages]) {
			parent = was.Parent
			labels[api.LabelFrom] = id
		}
		_, err := sn.Prepare(ctx, key, parent, snapshots.WithLabels(labels))
		return err
	})
	return name, nil
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

func setLabels(ctx context.Context, cont containerd.Container, labels map[string]string) error {
	if len(labels) == 0 {
		return nil
	}
	if _, err := cont.SetLabels(ctx, labels); err != nil {
		return fmt.Errorf("set labels of container %q: %w", cont.ID(), err)
	}
	return nil
}

// restartLabels say that a container with a restart policy is wanted running.
func restartLabels(labels map[string]string) map[string]string {
	set := map[string]string{}
	if _, ok := labels[restart.StatusLabel]; ok {
		set[restart.StatusLabel] = string(containerd.Running)
	}
	if _, ok := labels[restart.ExplicitlyStoppedLabel]; ok {
		set[restart.ExplicitlyStoppedLabel] = "false"
	}
	return set
}

// deleteStopped removes the task that an earlier run has left.
func deleteStopped(ctx context.Context, cont containerd.Container) error {
	t, err := cont.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("load task %q: %w", cont.ID(), err)
	}
	if _, err := t.Delete(ctx); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete stopped task %q: %w", cont.ID(), err)
	}
	return nil
}

// startTask creates a task from process images and starts it. On failure no
// task is left.
func (c *Client) startTask(ctx context.Context, cont containerd.Container, rec containers.Container, images, logURI string) error {
	create, err := ioOf(rec, logURI)
	if err != nil {
		return err
	}
	var t containerd.Task
	// containerd may not have taken a dead shim's task off its list yet.
	err = lookAgain(ctx, func() error {
		t, err = cont.NewTask(ctx, create, containerd.WithRestoreImagePath(images))
		if errdefs.IsAlreadyExists(err) {
			return overtaken(err)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("create task %q: %w", rec.ID, err)
	}
	if err := t.Start(ctx); err != nil {
		err = fmt.Errorf("start task %q: %w", rec.ID, err)
		ctx, cancel := undo(ctx)
		defer cancel()
		if _, derr := t.Delete(ctx, containerd.WithProcessKill); derr != nil && !errdefs.IsNotFound(derr) {
			err = errors.Join(err, fmt.Errorf("delete task %q: %w", rec.ID, derr))
		}
		return err
	}
	return nil
}

// ioOf chooses where a task's output goes: the URI that was given, or nerdctl's
// logger, or nowhere. Whether there is a terminal must agree with the spec.
func ioOf(rec containers.Container, logURI string) (cio.Creator, error) {
	spec, err := specOf(rec)
	if err != nil {
		return nil, err
	}
	if logURI == "" {
		logURI = rec.Labels[nerdctlLogURI]
	}
	cfg := cio.Config{Terminal: spec.Process != nil && spec.Process.Terminal}
	if logURI != "" && logURI != "none" {
		u, err := url.Parse(logURI)
		if err != nil || u.Scheme == "" {
			return nil, fmt.Errorf("log uri %q has no scheme: %w", logURI, errdefs.ErrInvalidArgument)
		}
		cfg.Stdout = u.String()
		if !cfg.Terminal {
			cfg.Stderr = cfg.Stdout
		}
	}
	return func(string) (cio.IO, error) { return detached(cfg), nil }, nil
}

// detached is the io of a task to which this process holds no stream.
type detached cio.Config

func (d detached) Config() cio.Config { return cio.Config(d) }
func (detached) Cancel()              {}
func (detached) Wait()                {}
func (detached) Close() error         { return nil }
