package waypoint

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// Remove removes a node, "C@NODE". Its children become children of its parent.
// With a snapshotter that keeps the lineage any node can go, the head of a
// running container too, because the layers below a live mount stay. With
// another one a node stays as long as snapshots are made on it, which gives
// ErrFailedPrecondition and names them.
func (c *Client) Remove(ctx context.Context, ref string) (*statefork.Node, error) {
	ctx = c.scope(ctx)
	cref, nref := SplitRef(ref)
	if nref == "" {
		return nil, statefork.WithHint(
			fmt.Errorf("%q names no node: %w", ref, errdefs.ErrInvalidArgument), "give CONTAINER@NODE")
	}
	rec, err := c.find(ctx, cref)
	if err != nil {
		return nil, err
	}
	sn, err := c.snapshotter(rec)
	if err != nil {
		return nil, err
	}
	n, info, err := c.node(ctx, sn, rec, nref)
	if err != nil {
		return nil, err
	}
	if err := refuseNeeded(ctx, sn, n, info); err != nil {
		return nil, err
	}
	children, err := walk(ctx, sn, fmt.Sprintf("kind==committed,labels.%q==%q", api.LabelParent, n.ID))
	if err != nil {
		return nil, err
	}
	if err := setParent(ctx, sn, children, n.Parent); err != nil {
		return nil, err
	}
	if err := sn.Remove(ctx, info.Name); err != nil {
		err = fmt.Errorf("remove snapshot %q: %w", info.Name, err)
		ctx, cancel := undo(ctx)
		defer cancel()
		return nil, errors.Join(err, setParent(ctx, sn, children, n.ID))
	}
	return &n, nil
}

// refuseNeeded fails when snapshots have the node as their parent.
func refuseNeeded(ctx context.Context, sn snapshots.Snapshotter, n statefork.Node, info snapshots.Info) error {
	above, err := walk(ctx, sn, fmt.Sprintf("parent==%q", info.Name))
	if err != nil || len(above) == 0 {
		return err
	}
	var names []string
	for _, a := range above {
		if child := api.NodeFromSnapshot(a); child != nil {
			names = append(names, "node "+child.Id)
		} else if id := a.Labels[api.LabelGCContainer]; id != "" {
			names = append(names, "container "+id)
		} else {
			names = append(names, "snapshot "+a.Name)
		}
	}
	return statefork.WithHint(
		fmt.Errorf("node %q is needed by %s: %w", n.ID, strings.Join(names, ", "), errdefs.ErrFailedPrecondition),
		"remove these first, or use the snapshotter statefork")
}

func setParent(ctx context.Context, sn snapshots.Snapshotter, nodes []snapshots.Info, parent string) error {
	for _, info := range nodes {
		change := snapshots.Info{Name: info.Name, Labels: map[string]string{api.LabelParent: parent}}
		if _, err := sn.Update(ctx, change, "labels."+api.LabelParent); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("set parent of snapshot %q: %w", info.Name, err)
		}
	}
	return nil
}
