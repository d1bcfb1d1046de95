package snapshotter

import (
	"context"
	"fmt"
	"regexp"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
)

// The private lineage. What a snapshot shows is stacked of
//
//	its own layer
//	the layers of the node it goes on from, and of that node's own lineage
//	what its visible parent shows
//
// All layers of one private lineage have the same visible parent. A layer in
// it stays until nothing stands on it any more, even after containerd removed
// its snapshot; the visible parent cannot go earlier, because the snapshots
// that need the layer are its children in containerd's eyes.

// lower is one layer below a snapshot.
type lower struct {
	id    uint64
	empty bool
}

const nodeIDLength = 12

var nodeIDRE = regexp.MustCompile(`^[0-9a-f]{12}$`)

// node finds the layer of a node and the visible parent of its snapshot.
func (t *tx) node(ctx context.Context, node string) (uint64, string, error) {
	name := t.nodes.Get([]byte(node))
	if name == nil {
		return 0, "", fmt.Errorf("node %q: %w", node, errdefs.ErrNotFound)
	}
	sid, info, _, err := storage.GetInfo(ctx, string(name))
	if err != nil {
		return 0, "", fmt.Errorf("read snapshot of node %q: %w", node, err)
	}
	id, err := parseID(sid)
	return id, info.Parent, err
}

// descend records a new layer that goes on from a node, or from nothing but
// its visible parent if node is empty.
func (t *tx) descend(ctx context.Context, id uint64, node, parent string) (record, error) {
	if node == "" {
		return record{}, t.putLayer(id, record{})
	}
	from, nodeParent, err := t.node(ctx, node)
	if err != nil {
		return record{}, err
	}
	if nodeParent != parent {
		return record{}, fmt.Errorf("parent %q is not the visible parent %q of node %q: %w",
			parent, nodeParent, node, errdefs.ErrInvalidArgument)
	}
	below, err := t.layer(from)
	if err != nil {
		return record{}, err
	}
	below.refs++
	if err := t.putLayer(from, below); err != nil {
		return record{}, err
	}
	if err := t.confirm(from); err != nil {
		return record{}, err
	}
	r := record{from: from}
	return r, t.putLayer(id, r)
}

// lowers lists what lies below a snapshot, topmost first: the lineage of its
// record, then its visible parents, each with its own lineage.
func (t *tx) lowers(r record, parents []string) ([]lower, error) {
	all, err := t.lineage(nil, r.from)
	if err != nil {
		return nil, err
	}
	for _, p := range parents {
		id, err := parseID(p)
		if err != nil {
			return nil, err
		}
		if all, err = t.lineage(all, id); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// below returns the layer of an active snapshot or a view, and its lowers.
func (t *tx) below(snap storage.Snapshot) (uint64, []lower, error) {
	id, err := parseID(snap.ID)
	if err != nil {
		return 0, nil, err
	}
	r, err := t.layer(id)
	if err != nil {
		return 0, nil, err
	}
	below, err := t.lowers(r, snap.ParentIDs)
	return id, below, err
}

func (t *tx) lineage(all []lower, id uint64) ([]lower, error) {
	for id != 0 {
		r, err := t.layer(id)
		if err != nil {
			return nil, err
		}
		if r.from >= id {
			return nil, fmt.Errorf("layer %d goes on from the later layer %d: %w", id, r.from, errdefs.ErrInternal)
		}
		all = append(all, lower{id: id, empty: r.empty})
		id = r.from
	}
	return all, nil
}

// checkNodeID refuses a node id that cannot be given to a new node.
func (t *tx) checkNodeID(node string) error {
	if !nodeIDRE.MatchString(node) {
		return fmt.Errorf("label %q: node id %q is not 12 hexadecimal digits: %w", layer.LabelNode, node, errdefs.ErrInvalidArgument)
	}
	if name := t.nodes.Get([]byte(node)); name != nil {
		return fmt.Errorf("node %q is snapshot %q: %w", node, name, errdefs.ErrAlreadyExists)
	}
	return nil
}

// seal records that the layer of a snapshot is no longer written to.
func (t *tx) seal(id uint64, name, node string, empty bool) error {
	r, err := t.layer(id)
	if err != nil {
		return err
	}
	r.empty, r.node = empty, node
	if node != "" {
		if err := t.nodes.Put([]byte(node), []byte(name)); err != nil {
			return fmt.Errorf("write node %q: %w", node, err)
		}
	}
	return t.putLayer(id, r)
}

// dropped is a layer whose directories are to go: all of them, or all but the
// upperdir if others stand on it.
type dropped struct {
	id       uint64
	keepData bool
}

// release ends what a removed snapshot kept. The work is proportional to the
// number of layers that go with it, which are those that only it still held.
func (t *tx) release(id uint64) ([]dropped, error) {
	r, err := t.layer(id)
	if err != nil {
		return nil, err
	}
	if r.node != "" {
		if err := t.nodes.Delete([]byte(r.node)); err != nil {
			return nil, fmt.Errorf("delete node %q: %w", r.node, err)
		}
	}
	if err := t.confirm(id); err != nil {
		return nil, err
	}
	if r.refs > 0 {
		r.removed, r.node, r.key = true, "", ""
		return []dropped{{id: id, keepData: true}}, t.putLayer(id, r)
	}
	var drop []dropped
	for {
		if err := t.layers.Delete(layerKey(id)); err != nil {
			return nil, fmt.Errorf("delete record of layer %d: %w", id, err)
		}
		drop = append(drop, dropped{id: id})
		if r.from == 0 {
			return drop, nil
		}
		id = r.from
		if r, err = t.layer(id); err != nil {
			return nil, err
		}
		r.refs--
		if r.refs > 0 || !r.removed {
			return drop, t.putLayer(id, r)
		}
	}
}

// sameLineage refuses a change of the labels that say where a snapshot stands:
// the layers were stacked by them.
func sameLineage(before, after snapshots.Info) error {
	for _, l := range []string{layer.LabelNode, layer.LabelFrom} {
		if before.Labels[l] != after.Labels[l] {
			return fmt.Errorf("label %q of snapshot %q cannot be changed: %w", l, before.Name, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}
