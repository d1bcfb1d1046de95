package waypoint

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// Usage is what a snapshot takes on disk.
type Usage struct {
	Bytes  int64 `json:"bytes"`
	Inodes int64 `json:"inodes"`
}

// ContainerDetail is everything about one container.
type ContainerDetail struct {
	Container
	Snapshotter string `json:"snapshotter"`
	SnapshotKey string `json:"snapshot_key"`
	// Usage is that of the active snapshot; nil if it is missing.
	Usage  *Usage            `json:"usage,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	// Generation counts the restores of the running task, and Phase is the
	// operation under way; both only while a shim tells them.
	Generation uint64               `json:"generation"`
	Phase      string               `json:"phase,omitempty"`
	Forks      []statefork.Fork     `json:"forks,omitempty"`
	External   []statefork.External `json:"external,omitempty"`
}

// NodeDetail is everything about one node.
type NodeDetail struct {
	statefork.Node
	Images string `json:"images"`
	Usage  *Usage `json:"usage,omitempty"`
	// Head says that the live container descends from this node.
	Head bool `json:"head"`
	// Path are the ids from a root down to the node's parent.
	Path     []string         `json:"path,omitempty"`
	Children []string         `json:"children,omitempty"`
	Forks    []statefork.Fork `json:"forks,omitempty"`
	// External is what the container had that the node does not contain.
	External []statefork.External `json:"external,omitempty"`
}

// InspectContainer returns the details of a container, which need not run.
func (c *Client) InspectContainer(ctx context.Context, ref string) (*ContainerDetail, error) {
	ctx = c.scope(ctx)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	t, err := c.treeOf(ctx, rec)
	if err != nil {
		return nil, err
	}
	d := &ContainerDetail{
		Container:   t.Container,
		Snapshotter: rec.Snapshotter,
		SnapshotKey: rec.SnapshotKey,
		Labels:      rec.Labels,
		Forks:       t.Forks,
		External:    externalOf(rec),
	}
	if d.Usage, err = usageOf(ctx, c.ctrd.SnapshotService(rec.Snapshotter), rec.SnapshotKey); err != nil {
		return nil, err
	}
	c.askShim(ctx, rec, d)
	return d, nil
}

// askShim adds what only the shim knows; a container of which the shim does not
// answer can be inspected all the same.
func (c *Client) askShim(ctx context.Context, rec containers.Container, d *ContainerDetail) {
	shim, err := c.dial(ctx, rec)
	if err != nil {
		log.G(ctx).WithError(err).Debug("shim is not asked")
		return
	}
	defer shim.Close()
	resp, err := shim.List(ctx)
	if err != nil {
		log.G(ctx).WithError(err).Debug("shim does not tell its state")
		return
	}
	d.Generation, d.Phase = resp.Generation, resp.Phase
}

// InspectNode returns the details of a node, "C@NODE".
func (c *Client) InspectNode(ctx context.Context, ref string) (*NodeDetail, error) {
	ctx = c.scope(ctx)
	cref, nref := SplitRef(ref)
	rec, err := c.find(ctx, cref)
	if err != nil {
		return nil, err
	}
	t, err := c.treeOf(ctx, rec)
	if err != nil {
		return nil, err
	}
	sn := c.ctrd.SnapshotService(rec.Snapshotter)
	n, info, err := c.node(ctx, sn, rec, nref)
	if err != nil {
		return nil, err
	}
	d := &NodeDetail{
		Node:     n,
		Images:   info.Labels[api.LabelImages],
		Head:     t.Container.Head == n.ID,
		External: externalOf(rec),
		Forks:    slices.DeleteFunc(t.Forks, func(f statefork.Fork) bool { return f.From != n.ID }),
	}
	for _, p := range t.Nodes.Path(n.ID) {
		if p.ID != n.ID {
			d.Path = append(d.Path, p.ID)
		}
	}
	for _, child := range t.Nodes.Children(n.ID) {
		d.Children = append(d.Children, child.ID)
	}
	d.Usage, err = usageOf(ctx, sn, info.Name)
	return d, err
}

func usageOf(ctx context.Context, sn snapshots.Snapshotter, key string) (*Usage, error) {
	u, err := sn.Usage(ctx, key)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("measure snapshot %q: %w", key, err)
	}
	return &Usage{Bytes: u.Size, Inodes: u.Inodes}, nil
}
