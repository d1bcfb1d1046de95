package waypoint

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// Tree is the tree of one container, with where the live containers stand.
type Tree struct {
	Container Container
	Nodes     *statefork.Tree
	// Forks are the live containers that were started at one of the nodes.
	Forks []statefork.Fork
}

// Branch is a node together with all that comes from it.
type Branch struct {
	statefork.Node
	// Head says that the live container descends from this node.
	Head     bool             `json:"head"`
	Forks    []statefork.Fork `json:"forks,omitempty"`
	Children []Branch         `json:"children,omitempty"`
}

// Branches returns the tree in its nested form, from the roots.
func (t *Tree) Branches() []Branch { return t.branches(t.Nodes.Roots()) }

func (t *Tree) branches(nodes []statefork.Node) []Branch {
	list := []Branch{}
	for _, n := range nodes {
		b := Branch{Node: n, Head: n.ID == t.Container.Head}
		for _, f := range t.Forks {
			if f.From == n.ID {
				b.Forks = append(b.Forks, f)
			}
		}
		b.Children = t.branches(t.Nodes.Children(n.ID))
		list = append(list, b)
	}
	return list
}

// Rootless are the forks whose node was removed.
func (t *Tree) Rootless() []statefork.Fork {
	var forks []statefork.Fork
	for _, f := range t.Forks {
		if len(t.Nodes.Path(f.From)) == 0 {
			forks = append(forks, f)
		}
	}
	return forks
}

// MarshalJSON gives the container, the nested form, and the forks whose node
// was removed.
func (t *Tree) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Container Container        `json:"container"`
		Roots     []Branch         `json:"roots"`
		Forks     []statefork.Fork `json:"forks,omitempty"`
	}{t.Container, t.Branches(), t.Rootless()})
}

// Tree returns a container's tree; the container need not run.
func (c *Client) Tree(ctx context.Context, ref string) (*Tree, error) {
	ctx = c.scope(ctx)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	return c.treeOf(ctx, rec)
}

func (c *Client) treeOf(ctx context.Context, rec containers.Container) (*Tree, error) {
	sn, err := c.snapshotter(rec)
	if err != nil {
		return nil, err
	}
	infos, err := nodesOf(ctx, sn, rec.ID)
	if err != nil {
		return nil, err
	}
	head, err := headOf(ctx, sn, rec)
	if err != nil {
		return nil, err
	}
	forks, err := c.forksOf(ctx, rec.ID)
	if err != nil {
		return nil, err
	}
	status, err := c.status(ctx, rec.ID)
	if err != nil {
		return nil, err
	}
	t := statefork.NewTree(toNodes(infos))
	return &Tree{Container: describe(rec, status, head, t.Len()), Nodes: t, Forks: forks}, nil
}

// node finds one of a container's own nodes, with its snapshot.
func (c *Client) node(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container, ref string) (statefork.Node, snapshots.Info, error) {
	infos, err := nodesOf(ctx, sn, rec.ID)
	if err != nil {
		return statefork.Node{}, snapshots.Info{}, err
	}
	return pick(infos, rec, ref)
}

// reach finds one of a container's own nodes or, for a fork, one of those that
// it descends from. Its own go first.
func (c *Client) reach(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container, ref string) (statefork.Node, snapshots.Info, error) {
	n, info, err := c.node(ctx, sn, rec, ref)
	_, origin := SplitRef(rec.Labels[LabelForkedFrom])
	if origin == "" || !errdefs.IsNotFound(err) {
		return n, info, err
	}
	above, aerr := ancestry(ctx, sn, origin)
	if aerr != nil {
		return n, info, aerr
	}
	if n, info, aerr = pick(above, rec, ref); errdefs.IsNotFound(aerr) {
		aerr = err
	}
	return n, info, aerr
}

func pick(infos []snapshots.Info, rec containers.Container, ref string) (statefork.Node, snapshots.Info, error) {
	n, err := statefork.NewTree(toNodes(infos)).Find(ref)
	if err != nil {
		return n, snapshots.Info{}, statefork.WithHint(
			fmt.Errorf("find in container %q: %w", rec.ID, err),
			fmt.Sprintf("see \"statefork tree %s\"", rec.ID))
	}
	i := slices.IndexFunc(infos, func(info snapshots.Info) bool { return info.Labels[api.LabelNode] == n.ID })
	return n, infos[i], nil
}

// ancestry is a node and all that it descends from, of whichever container.
func ancestry(ctx context.Context, sn snapshots.Snapshotter, id string) ([]snapshots.Info, error) {
	var path []snapshots.Info
	seen := map[string]bool{}
	for id != "" && !seen[id] {
		seen[id] = true
		infos, err := walk(ctx, sn, fmt.Sprintf("kind==committed,labels.%q==%q", api.LabelNode, id))
		if err != nil || len(infos) == 0 {
			return path, err
		}
		path = append(path, infos[0])
		id = infos[0].Labels[api.LabelParent]
	}
	return path, nil
}

// nodesOf reads a container's nodes from their snapshots.
func nodesOf(ctx context.Context, sn snapshots.Snapshotter, id string) ([]snapshots.Info, error) {
	return walk(ctx, sn, fmt.Sprintf("kind==committed,labels.%q==%q", api.LabelContainer, id))
}

// walkPatience is how long a snapshotter may be away: containerd finds one that
// was restarted within a second or two.
const walkPatience = 5 * time.Second

// walk lists snapshots. containerd gives the errors of a walk no class, so that
// a snapshotter is away is learned from another call.
func walk(ctx context.Context, sn snapshots.Snapshotter, filters ...string) ([]snapshots.Info, error) {
	deadline := time.Now().Add(walkPatience)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for again := true; ; {
		var infos []snapshots.Info
		err := sn.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			infos = append(infos, info)
			return nil
		}, filters...)
		if err == nil {
			return infos, nil
		}
		if _, serr := sn.Stat(ctx, "none"); errdefs.IsUnavailable(serr) {
			err = fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
		} else if !again {
			return nil, fmt.Errorf("walk snapshots: %w", err)
		} else {
			again = false // it may have come back between the two calls
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("walk snapshots: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("walk snapshots: %w", errors.Join(err, ctx.Err()))
		case <-tick.C:
		}
	}
}

func toNodes(infos []snapshots.Info) []statefork.Node {
	var nodes []statefork.Node
	for _, info := range infos {
		if n := api.NodeFromSnapshot(info); n != nil {
			nodes = append(nodes, toNode(n))
		}
	}
	return nodes
}

func toNode(n *api.Node) statefork.Node {
	return statefork.Node{
		ID:         n.GetId(),
		Name:       n.GetName(),
		Parent:     n.GetParent(),
		Container:  n.GetContainerId(),
		Snapshot:   n.GetSnapshot(),
		Created:    n.GetCreatedAt().AsTime(),
		ImageBytes: n.GetImageBytes(),
		Labels:     n.GetLabels(),
	}
}

// headOf is the node that the container's active snapshot descends from. A
// missing snapshot is no error: a checkpoint may be between two steps.
func headOf(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container) (string, error) {
	info, err := sn.Stat(ctx, rec.SnapshotKey)
	if errdefs.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("stat snapshot %q: %w", rec.SnapshotKey, err)
	}
	head := info.Labels[api.LabelFrom]
	if head == "" {
		return "", nil
	}
	// After a restore that failed it goes on from the state that was set aside
	// for it, which stands between the two.
	aside, err := walk(ctx, sn, fmt.Sprintf("labels.%q==%q,labels.%q", api.LabelNode, head, api.LabelAbandoned))
	if err != nil || len(aside) == 0 {
		return head, err
	}
	return aside[0].Labels[api.LabelParent], nil
}

// forksOf are the containers whose record says that they come from id.
func (c *Client) forksOf(ctx context.Context, id string) ([]statefork.Fork, error) {
	recs, err := c.ctrd.ContainerService().List(ctx, fmt.Sprintf("labels.%q", LabelForkedFrom))
	if err != nil {
		return nil, fmt.Errorf("list forks: %w", err)
	}
	var forks []statefork.Fork
	for _, r := range recs {
		from, node := SplitRef(r.Labels[LabelForkedFrom])
		if from != id {
			continue
		}
		s, err := c.status(ctx, r.ID)
		if err != nil {
			return nil, err
		}
		forks = append(forks, statefork.Fork{ID: r.ID, Name: r.Labels[nerdctlName], From: node, Status: s.Status})
	}
	slices.SortFunc(forks, func(a, b statefork.Fork) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID))
	})
	return forks, nil
}

// survey is what one walk over each snapshotter tells of all containers.
type survey struct {
	nodes map[string]int         // by container
	heads map[snapshotRef]string // by active snapshot
}

type snapshotRef struct{ snapshotter, key string }

func snapshotOf(r containers.Container) snapshotRef { return snapshotRef{r.Snapshotter, r.SnapshotKey} }

func (c *Client) survey(ctx context.Context, recs []containers.Container) (survey, error) {
	s := survey{nodes: map[string]int{}, heads: map[snapshotRef]string{}}
	done := map[string]bool{"": true}
	for _, r := range recs {
		if done[r.Snapshotter] {
			continue
		}
		done[r.Snapshotter] = true
		infos, err := walk(ctx, c.ctrd.SnapshotService(r.Snapshotter),
			fmt.Sprintf("labels.%q", api.LabelContainer), fmt.Sprintf("labels.%q", api.LabelAbandoned),
			fmt.Sprintf("kind==active,labels.%q", api.LabelFrom))
		if err != nil {
			return s, fmt.Errorf("survey snapshotter %q: %w", r.Snapshotter, err)
		}
		s.add(r.Snapshotter, infos)
	}
	return s, nil
}

// add counts the nodes and finds the heads in one snapshotter; see headOf.
func (s *survey) add(snapshotter string, infos []snapshots.Info) {
	aside := map[string]string{}
	for _, info := range infos {
		if _, ok := info.Labels[api.LabelAbandoned]; ok {
			aside[info.Labels[api.LabelNode]] = info.Labels[api.LabelParent]
		} else if n := api.NodeFromSnapshot(info); n != nil {
			s.nodes[n.ContainerId]++
		}
	}
	for _, info := range infos {
		if info.Kind != snapshots.KindActive {
			continue
		}
		head := info.Labels[api.LabelFrom]
		if before, ok := aside[head]; ok && head != "" {
			head = before
		}
		s.heads[snapshotRef{snapshotter, info.Name}] = head
	}
}
