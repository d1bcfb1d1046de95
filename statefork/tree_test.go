package statefork

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func node(id, parent, name string, second int) Node {
	return Node{ID: id, Parent: parent, Name: name, Created: time.Unix(int64(second), 0)}
}

func ids(nodes []Node) string {
	var s []string
	for _, n := range nodes {
		s = append(s, n.ID)
	}
	return fmt.Sprint(s)
}

func TestTree(t *testing.T) {
	nodes := []Node{
		node("a1a1a1", "", "base", 1), node("b2b2b2", "a1a1a1", "", 3), node("b2b2c3", "a1a1a1", "tried", 2),
		node("d4d4d4", "b2b2b2", "", 4), node("e5e5e5", "removed", "", 5),
	}
	rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	tree := NewTree(nodes)
	for _, tt := range []struct{ name, got, want string }{
		{"roots", ids(tree.Roots()), "[a1a1a1 e5e5e5]"},
		{"children", ids(tree.Children("a1a1a1")), "[b2b2c3 b2b2b2]"},
		{"children of none", ids(tree.Children("")), "[]"},
		{"nodes", ids(tree.Nodes()), "[a1a1a1 b2b2c3 b2b2b2 d4d4d4 e5e5e5]"},
		{"path", ids(tree.Path("d4d4d4")), "[a1a1a1 b2b2b2 d4d4d4]"},
		{"path of none", ids(tree.Path("nowhere")), "[]"},
	} {
		if tt.got != tt.want {
			t.Errorf("%s = %s, want %s", tt.name, tt.got, tt.want)
		}
	}
}

func TestTreeCircle(t *testing.T) {
	// c is the oldest of the circle c -> b -> a -> c; d hangs below it.
	tree := NewTree([]Node{node("a", "b", "", 3), node("b", "c", "", 2), node("c", "a", "", 1), node("d", "b", "", 4), node("e", "e", "", 5)})
	if got, want := ids(tree.Nodes()), "[c b a d e]"; got != want {
		t.Errorf("nodes = %s, want %s", got, want)
	}
	if got, want := ids(tree.Path("a")), "[c b a]"; got != want {
		t.Errorf("path = %s, want %s", got, want)
	}
}

func TestFind(t *testing.T) {
	tree := NewTree([]Node{
		node("a1a1a1", "", "base", 1), node("b2b2b2", "a1a1a1", "", 2), node("b2b2c3", "a1a1a1", "a1a", 3),
		node("c4c4c4", "", "twice", 4), node("d5d5d5", "", "twice", 5),
	})
	tests := []struct {
		ref, want string
		is        func(error) bool
	}{
		{"a1a1a1", "a1a1a1", nil},
		{"base", "a1a1a1", nil},
		{"b2b2c", "b2b2c3", nil},
		{"a1a", "b2b2c3", nil}, // a name goes before a prefix
		{"a1a1", "a1a1a1", nil},
		{"a1", "", errdefs.IsNotFound},
		{"", "", errdefs.IsNotFound},
		{"zzz", "", errdefs.IsNotFound},
		{"b2b", "", errdefs.IsInvalidArgument},
		{"twice", "", errdefs.IsInvalidArgument},
	}
	for _, tt := range tests {
		n, err := tree.Find(tt.ref)
		if n.ID != tt.want || (tt.is == nil) != (err == nil) || (err != nil && !tt.is(err)) {
			t.Errorf("Find(%q) = %q, %v; want %q", tt.ref, n.ID, err, tt.want)
		}
	}
}

// FuzzTree checks for any parents, circles too, that each node is in the order
// once, and after the one that its path names as its parent.
func FuzzTree(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3})
	f.Add([]byte{1, 2, 0, 9, 3})
	f.Fuzz(func(t *testing.T, parents []byte) {
		var nodes []Node
		for i, p := range parents {
			nodes = append(nodes, node(fmt.Sprint("n", i), fmt.Sprint("n", p), "", i))
		}
		tree := NewTree(nodes)
		order := tree.Nodes()
		if len(order) != len(nodes) || tree.Len() != len(nodes) {
			t.Fatalf("%d of %d nodes in %s", len(order), len(nodes), ids(order))
		}
		for i, n := range order {
			path := tree.Path(n.ID)
			if len(path) == 0 || path[len(path)-1].ID != n.ID {
				t.Fatalf("path of %s = %s", n.ID, ids(path))
			}
			if len(path) == 1 {
				continue
			}
			above := path[len(path)-2].ID
			if j := slices.IndexFunc(order, func(m Node) bool { return m.ID == above }); j < 0 || j >= i {
				t.Fatalf("%s stands at %d, its parent %s at %d", n.ID, i, above, j)
			}
		}
	})
}

func TestHint(t *testing.T) {
	err := fmt.Errorf("outer: %w", WithHint(fmt.Errorf("inner: %w", io.EOF), "read less"))
	if got := Hint(err); got != "read less" {
		t.Errorf("Hint = %q", got)
	}
	if err.Error() != "outer: inner: EOF" || !errors.Is(err, io.EOF) {
		t.Errorf("error = %v", err)
	}
	if WithHint(nil, "x") != nil || Hint(io.EOF) != "" {
		t.Error("hint out of nothing")
	}
}
