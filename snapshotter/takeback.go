package snapshotter

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
)

// Commits that containerd may take back.
//
// containerd commits here in the middle of a transaction of its own. If that
// does not end well (its caller has gone, it was killed, its disk is full), the
// snapshot is still active to containerd, under the old key, and the committed
// one is nobody's: the next garbage collection would remove a container's root,
// and the process images beside it. No answer of ours can exclude that, since
// the answer itself may not arrive.
//
// So the commit of a node is tentative until containerd shows that it knows of
// it. Until then
//
//	the old key still reads as the active snapshot   Stat, Mounts, Usage
//	a change of the old key takes the commit back    Commit, Update, Remove
//	removing the node does so too                    Remove
//
// Reading changes nothing, since it may come from one who looked at containerd's
// records just before the commit. containerd gives every key and name a number
// of its own, so that nothing else is ever called by the old key.
//
// Going on from the node, or from its snapshot, is the proof that ends all this:
// what stands on a layer keeps it. Stat is a proof too, but a read should not
// cost a write: it is only kept in memory, for a Remove. A node that is removed
// without any proof is an active snapshot until it is removed under the old key,
// which the next garbage collection does.
//
// This is for nodes only. What else is committed are layers of images, which
// can be unpacked again.

// tentative is what is kept of a commit by the key of the active snapshot.
type tentative struct {
	Node   string            // the node's id
	Labels map[string]string // of the active snapshot
}

// tentativeCommit returns the commit of an active snapshot that may be taken
// back, and the name it was committed as.
func (t *tx) tentativeCommit(key string) (_ tentative, name string, _ error) {
	b := t.commits.Get([]byte(key))
	if b == nil {
		return tentative{}, "", fmt.Errorf("snapshot %q: %w", key, errdefs.ErrNotFound)
	}
	var c tentative
	if err := json.Unmarshal(b, &c); err != nil {
		return tentative{}, "", fmt.Errorf("read commit of %q: %w", key, err)
	}
	n := t.nodes.Get([]byte(c.Node))
	if n == nil {
		return tentative{}, "", fmt.Errorf("node %q that %q was committed as: %w", c.Node, key, errdefs.ErrInternal)
	}
	return c, string(n), nil
}

// rememberCommit makes the commit of a node tentative. before is the active
// snapshot.
func (t *tx) rememberCommit(id uint64, node string, before snapshots.Info) error {
	b, err := json.Marshal(tentative{Node: node, Labels: before.Labels})
	if err != nil {
		return err
	}
	if err := t.commits.Put([]byte(before.Name), b); err != nil {
		return fmt.Errorf("write commit of %q: %w", before.Name, err)
	}
	r, err := t.layer(id)
	if err != nil {
		return err
	}
	r.key = before.Name
	return t.putLayer(id, r)
}

// confirm makes the commit of a layer final, if it was one that could be taken
// back.
func (t *tx) confirm(id uint64) error {
	r, err := t.layer(id)
	if err != nil || r.key == "" {
		return err
	}
	if err := t.commits.Delete([]byte(r.key)); err != nil {
		return fmt.Errorf("make commit of %q final: %w", r.key, err)
	}
	r.key = ""
	return t.putLayer(id, r)
}

func (t *tx) confirmSnapshot(sid string) error {
	id, err := parseID(sid)
	if err != nil {
		return err
	}
	return t.confirm(id)
}

// takeBackNode undoes the commit of a node if it is tentative, and says whether
// it was.
func (t *tx) takeBackNode(ctx context.Context, name string) (bool, error) {
	sid, _, _, err := storage.GetInfo(ctx, name)
	if err != nil {
		return false, err
	}
	id, err := parseID(sid)
	if err != nil {
		return false, err
	}
	r, err := t.layer(id)
	if err != nil || r.key == "" {
		return false, err
	}
	return true, t.takeBack(ctx, r.key)
}

// takeBack undoes the tentative commit of a key, if there is one.
func (t *tx) takeBack(ctx context.Context, key string) error {
	c, name, err := t.tentativeCommit(key)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	b := t.snapshots.Bucket([]byte(name))
	if b == nil {
		return fmt.Errorf("snapshot %q of node %q: %w", name, c.Node, errdefs.ErrInternal)
	}
	// MetaStore can only turn active snapshots into committed ones. As an active
	// one it gets the old key, and as that it is made active again.
	if err := b.Put(keyKind, []byte{byte(snapshots.KindActive)}); err != nil {
		return fmt.Errorf("take back commit of %q: %w", key, err)
	}
	sid, err := storage.CommitActive(ctx, name, key, snapshots.Usage{}, snapshots.WithLabels(c.Labels))
	if err != nil {
		return fmt.Errorf("take back commit of %q: %w", key, err)
	}
	if err := t.snapshots.Bucket([]byte(key)).Put(keyKind, []byte{byte(snapshots.KindActive)}); err != nil {
		return fmt.Errorf("take back commit of %q: %w", key, err)
	}
	id, err := parseID(sid)
	if err != nil {
		return err
	}
	return t.unseal(id)
}

// unseal takes back what seal and rememberCommit have recorded of a layer.
func (t *tx) unseal(id uint64) error {
	r, err := t.layer(id)
	if err != nil {
		return err
	}
	if r.refs > 0 {
		return fmt.Errorf("layer %d of the unconfirmed node %q is stood on: %w", id, r.node, errdefs.ErrInternal)
	}
	if err := t.nodes.Delete([]byte(r.node)); err != nil {
		return fmt.Errorf("delete node %q: %w", r.node, err)
	}
	if err := t.commits.Delete([]byte(r.key)); err != nil {
		return fmt.Errorf("delete commit of %q: %w", r.key, err)
	}
	return t.putLayer(id, record{from: r.from})
}

// info returns what is known of a snapshot, also by a key whose commit may be
// taken back.
func (t *tx) info(ctx context.Context, key string) (uint64, snapshots.Info, error) {
	sid, info, _, err := storage.GetInfo(ctx, key)
	if errdefs.IsNotFound(err) {
		c, name, terr := t.tentativeCommit(key)
		if errdefs.IsNotFound(terr) {
			return 0, snapshots.Info{}, err
		}
		if terr != nil {
			return 0, snapshots.Info{}, terr
		}
		sid, info, _, err = storage.GetInfo(ctx, name)
		info.Name, info.Kind, info.Labels = key, snapshots.KindActive, c.Labels
	}
	if err != nil {
		return 0, snapshots.Info{}, err
	}
	id, err := parseID(sid)
	return id, info, err
}

// snapshot returns an active snapshot or a view as storage.GetSnapshot does,
// also by a key whose commit may be taken back.
func (t *tx) snapshot(ctx context.Context, key string) (storage.Snapshot, error) {
	snap, err := storage.GetSnapshot(ctx, key)
	if !errdefs.IsNotFound(err) {
		return snap, err
	}
	_, name, terr := t.tentativeCommit(key)
	if errdefs.IsNotFound(terr) {
		return storage.Snapshot{}, err
	}
	if terr != nil {
		return storage.Snapshot{}, terr
	}
	id, info, _, err := storage.GetInfo(ctx, name)
	if err != nil {
		return storage.Snapshot{}, err
	}
	snap = storage.Snapshot{ID: id, Kind: snapshots.KindActive}
	for info.Parent != "" {
		if id, info, _, err = storage.GetInfo(ctx, info.Parent); err != nil {
			return storage.Snapshot{}, err
		}
		snap.ParentIDs = append(snap.ParentIDs, id)
	}
	return snap, nil
}

// known are the names of nodes that containerd has asked for by name.
type known struct {
	mu    sync.Mutex
	names map[string]struct{}
}

func (k *known) add(info snapshots.Info) {
	if info.Kind != snapshots.KindCommitted || info.Labels[layer.LabelNode] == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.names == nil {
		k.names = map[string]struct{}{}
	}
	k.names[info.Name] = struct{}{}
}

func (k *known) has(name string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.names[name]
	return ok
}

func (k *known) drop(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.names, name)
}
