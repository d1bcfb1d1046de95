package waypoint

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/runtime/container"
	"github.com/statefork/statefork/shim/api"
)

// sealTimeout bounds how long a container that lives only in its images waits
// for containerd before it goes on with the root it had.
const sealTimeout = 2 * time.Minute

// sealing is what one checkpoint does to the snapshots.
type sealing struct {
	rec *record
	// active is the snapshot to seal, and parent the visible parent that its
	// successor gets: the image's chain if the snapshotter keeps the lineage
	// itself, otherwise the node.
	active snapshots.Info
	parent string
	node   *api.Node
}

func (s *Service) checkpoint(ctx context.Context, req *api.CheckpointRequest) (*api.CheckpointResponse, error) {
	begin := time.Now()
	c, rec, release, err := s.acquire(ctx, req.ContainerId)
	if err != nil {
		return nil, err
	}
	defer release()
	w, seal, err := rec.prepareSealing(ctx, req)
	if err != nil {
		return nil, err
	}
	// Nothing in a directory of the active snapshot can be worth keeping while
	// its container runs: it is left of an operation that was recovered from.
	if err := os.RemoveAll(w.Images()); err != nil {
		return nil, fmt.Errorf("remove stale process images: %w", err)
	}
	j := &journal{Op: "checkpoint", Node: seal.node.Id, Key: rec.key, Images: w.Images(), bundle: c.Bundle()}
	t, ext, err := c.Checkpoint(ctx, container.CheckpointOptions{
		Images: w.Images(),
		Seal:   seal.run,
		Phase:  j.enter,
	})
	if err := errors.Join(err, j.clear()); err != nil {
		return nil, err
	}
	return &api.CheckpointResponse{Node: seal.node, Timings: timings(t, begin), External: externals(ext)}, nil
}

// prepareSealing checks everything about the snapshots that can be checked
// while the container runs.
func (r *record) prepareSealing(ctx context.Context, req *api.CheckpointRequest) (layer.Writable, *sealing, error) {
	var w layer.Writable
	mounts, err := r.activeMounts(ctx)
	if err != nil {
		return w, nil, err
	}
	if w, err = layer.FromMounts(mounts); err != nil {
		return w, nil, err
	}
	active, err := r.snapshots.Stat(ctx, r.key)
	if err != nil {
		return w, nil, fmt.Errorf("stat active snapshot: %w", err)
	}
	if err := r.checkName(ctx, req.Name); err != nil {
		return w, nil, err
	}
	head, err := r.head(ctx, active)
	if err != nil {
		return w, nil, err
	}
	id, err := randomHex(6)
	if err != nil {
		return w, nil, err
	}
	s := &sealing{rec: r, active: active, parent: active.Parent, node: &api.Node{
		Id:          id,
		Name:        req.Name,
		Parent:      head,
		ContainerId: r.id,
		Snapshot:    api.SnapshotName(r.id, id),
		Labels:      req.Labels,
	}}
	if !w.KeepsLineage() {
		s.parent = s.node.Snapshot
	}
	s.node.Images = w.Images()
	return w, s, nil
}

// head returns the id of the node that the active snapshot descends from. After
// a failed restore of a stopped container the state that was set aside for it
// stands between the two.
func (r *record) head(ctx context.Context, active snapshots.Info) (string, error) {
	from := active.Labels[api.LabelFrom]
	if from == "" {
		return "", nil
	}
	aside, err := r.snapshots.Stat(ctx, api.AbandonedName(r.key, from))
	if errdefs.IsNotFound(err) {
		return from, nil
	}
	if err != nil {
		return "", fmt.Errorf("find head: %w", err)
	}
	return aside.Labels[api.LabelParent], nil
}

// checkName refuses a name that cannot be used or is in use.
func (r *record) checkName(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	if err := api.ValidateName(name); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	nodes, err := r.nodes(ctx)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if n.Name == name {
			return fmt.Errorf("node name %q is in use by node %s: choose another or remove that node: %w", name, n.Id, errdefs.ErrAlreadyExists)
		}
	}
	return nil
}

func randomHex(bytes int) (string, error) {
	b := make([]byte, bytes)
	if _, err := rand.Read(b); err != nil {
		return "", fmt.Errorf("make id: %w", err)
	}
	return hex.EncodeToString(b), nil
}

// activeMounts returns the mounts of the active snapshot. If its key is missing
// because an earlier checkpoint stopped between Commit and Prepare, that is
// completed first.
func (r *record) activeMounts(ctx context.Context) ([]mount.Mount, error) {
	var mounts []mount.Mount
	err := persist(ctx, func() (err error) {
		mounts, err = r.snapshots.Mounts(ctx, r.key)
		return err
	})
	if errdefs.IsNotFound(err) {
		return r.reconcile(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("get mounts of active snapshot %q: %w", r.key, err)
	}
	return mounts, nil
}

// reconcile prepares the missing key: from the node that was sealed from it, or
// from the one that it was abandoned for, whichever happened last.
func (r *record) reconcile(ctx context.Context) ([]mount.Mount, error) {
	last, err := r.lastCommitOf(ctx, r.key)
	if err != nil {
		return nil, err
	}
	id := last.Labels[api.LabelNode]
	if target := last.Labels[api.LabelAbandoned]; target != "" {
		id = target
	}
	n, info, err := r.node(ctx, id)
	if err != nil {
		return nil, err
	}
	log.G(ctx).WithFields(log.Fields{"key": r.key, "node": n.Id}).Warn("complete an interrupted operation")
	return r.prepare(ctx, r.key, n, info, nil)
}

// prepare makes an active snapshot that goes on from a node, and returns its
// mounts. It can be repeated.
func (r *record) prepare(ctx context.Context, key string, n *api.Node, node snapshots.Info, labels map[string]string) ([]mount.Mount, error) {
	parent := node.Name
	if layer.LineageKept(node.Labels[api.LabelImages]) {
		parent = node.Parent
	}
	return r.prepareFrom(ctx, key, parent, n.Id, labels)
}

func (r *record) prepareFrom(ctx context.Context, key, parent, nodeID string, labels map[string]string) ([]mount.Mount, error) {
	all := map[string]string{}
	maps.Copy(all, labels)
	all[api.LabelFrom] = nodeID
	all[api.LabelGCContainer] = r.id
	var mounts []mount.Mount
	err := persist(ctx, func() (err error) {
		mounts, err = r.snapshots.Prepare(ctx, key, parent, snapshots.WithLabels(all))
		if errdefs.IsAlreadyExists(err) {
			// an earlier try had its effect
			mounts, err = r.snapshots.Mounts(ctx, key)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("prepare snapshot %q: %w", key, err)
	}
	return mounts, nil
}

// run is the container's Seal: Commit with everything that the node's record
// needs in the one call, then Prepare of the same key.
func (s *sealing) run(ctx context.Context, sealed container.Sealed) ([]mount.Mount, error) {
	ctx, cancel := context.WithTimeout(ctx, sealTimeout)
	defer cancel()
	s.node.ImageBytes = sealed.ImageBytes
	s.node.CreatedAt = timestamp(sealed.At)
	r := s.rec
	if err := r.commit(ctx, s.node.Snapshot, s.labels(sealed.At)); err != nil {
		return nil, err
	}
	return r.prepareFrom(ctx, r.key, s.parent, s.node.Id, s.kept())
}

// commit commits the active snapshot. It can be repeated, as name is used for
// nothing else.
func (r *record) commit(ctx context.Context, name string, labels map[string]string) error {
	err := persist(ctx, func() error {
		err := r.snapshots.Commit(ctx, name, r.key, snapshots.WithLabels(labels))
		if errdefs.IsAlreadyExists(err) || errdefs.IsNotFound(err) {
			if _, serr := r.snapshots.Stat(ctx, name); serr == nil {
				return nil // an earlier try had its effect
			}
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("commit snapshot %q: %w", r.key, err)
	}
	return nil
}

// labels are those of the node's snapshot.
func (s *sealing) labels(at time.Time) map[string]string {
	l := map[string]string{
		api.LabelGCContainer: s.rec.id,
		api.LabelNode:        s.node.Id,
		api.LabelContainer:   s.rec.id,
		api.LabelHeadOf:      s.rec.key,
		api.LabelCreated:     at.UTC().Format(time.RFC3339Nano),
		api.LabelImages:      s.node.Images,
		api.LabelImageBytes:  strconv.FormatUint(s.node.ImageBytes, 10),
	}
	if s.node.Name != "" {
		l[api.LabelName] = s.node.Name
	}
	if s.node.Parent != "" {
		l[api.LabelParent] = s.node.Parent
	}
	for k, v := range s.node.Labels {
		l[api.LabelUserPrefix+k] = v
	}
	return l
}

// kept are the labels that others gave to the active snapshot.
func (s *sealing) kept() map[string]string {
	l := maps.Clone(s.active.Labels)
	delete(l, api.LabelNode)
	return l
}
