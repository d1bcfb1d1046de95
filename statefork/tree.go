package statefork

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// minPrefix is how many digits of an id are needed to name a node.
const minPrefix = 3

// Tree is all nodes of one container.
type Tree struct {
	nodes map[string]Node
	// children of a node, oldest first; under "" are the roots.
	children map[string][]string
}

// NewTree makes a tree of nodes in any order. A node whose parent is not among
// them, because it was removed or is another container's, is a root.
func NewTree(nodes []Node) *Tree {
	t := &Tree{nodes: make(map[string]Node, len(nodes)), children: map[string][]string{}}
	for _, n := range nodes {
		t.nodes[n.ID] = n
	}
	for id := range t.nodes {
		p := t.above(id)
		t.children[p] = append(t.children[p], id)
	}
	for _, ids := range t.children {
		slices.SortFunc(ids, t.older)
	}
	return t
}

// above is the parent of a node in this tree. Labels can be edited by others,
// so that a node may name a descendant: such a circle is cut at its oldest.
func (t *Tree) above(id string) string {
	p := t.nodes[id].Parent
	if _, ok := t.nodes[p]; !ok {
		return ""
	}
	oldest := id
	seen := map[string]bool{}
	for at := p; ; at = t.nodes[at].Parent {
		if at == id {
			break
		}
		if _, ok := t.nodes[at]; !ok || seen[at] {
			return p
		}
		seen[at] = true
		if t.older(at, oldest) < 0 {
			oldest = at
		}
	}
	if oldest == id {
		return ""
	}
	return p
}

func (t *Tree) older(a, b string) int {
	if c := t.nodes[a].Created.Compare(t.nodes[b].Created); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

// Len is the number of nodes.
func (t *Tree) Len() int { return len(t.nodes) }

// Roots are the nodes without a parent in the tree, oldest first.
func (t *Tree) Roots() []Node { return t.list(t.children[""]) }

// Children of a node, oldest first.
func (t *Tree) Children(id string) []Node {
	if id == "" {
		return nil
	}
	return t.list(t.children[id])
}

func (t *Tree) list(ids []string) []Node {
	nodes := make([]Node, 0, len(ids))
	for _, id := range ids {
		nodes = append(nodes, t.nodes[id])
	}
	return nodes
}

// Nodes are all nodes, each after its parent.
func (t *Tree) Nodes() []Node {
	nodes := make([]Node, 0, len(t.nodes))
	todo := t.Roots()
	for len(todo) > 0 {
		n := todo[0]
		nodes = append(nodes, n)
		todo = append(t.Children(n.ID), todo[1:]...)
	}
	return nodes
}

// Path is the way from a root to the node, both included; it is empty for an
// unknown node.
func (t *Tree) Path(id string) []Node {
	var path []Node
	for {
		n, ok := t.nodes[id]
		if !ok {
			break
		}
		path = append(path, n)
		if id = t.above(id); id == "" {
			break
		}
	}
	slices.Reverse(path)
	return path
}

// Find returns the node that ref means: its id, its name, or the first digits
// of its id, three at least. An id goes before a name, a name before a prefix.
// It fails with ErrNotFound, or with ErrInvalidArgument for more than one.
func (t *Tree) Find(ref string) (Node, error) {
	if n, ok := t.nodes[ref]; ok {
		return n, nil
	}
	var found []string
	for id, n := range t.nodes {
		if n.Name != "" && n.Name == ref {
			found = append(found, id)
		}
	}
	if len(found) == 0 && len(ref) >= minPrefix {
		for id := range t.nodes {
			if strings.HasPrefix(id, ref) {
				found = append(found, id)
			}
		}
	}
	slices.SortFunc(found, t.older)
	switch len(found) {
	case 0:
		return Node{}, fmt.Errorf("node %q: %w", ref, errdefs.ErrNotFound)
	case 1:
		return t.nodes[found[0]], nil
	}
	return Node{}, fmt.Errorf("node %q may be %s: %w", ref, strings.Join(found, " or "), errdefs.ErrInvalidArgument)
}
