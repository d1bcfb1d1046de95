package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/statefork/statefork/layer"
)

// chain makes an image "image" and on it the nodes 1 to n, each going on from
// the one before, and the active snapshot "head" on the last.
func chain(t *testing.T, s *Snapshotter, n int) {
	t.Helper()
	base(t, s, "image", "")
	prepare(t, s, "head", "image")
	for i := 1; i <= n; i++ {
		seal(t, s, "head", i)
		prepare(t, s, "head", "image", from(nodeID(i)))
	}
}

func TestFlatParents(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 3)
	info, err := s.Stat(t.Context(), "head")
	if err != nil {
		t.Fatal(err)
	}
	if info.Parent != "image" {
		t.Errorf("visible parent is %q, want the image", info.Parent)
	}
	m, err := s.Mounts(t.Context(), "head")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := lowersOf(m), []string{"4", "3", "2", "1"}; !slices.Equal(got, want) {
		t.Errorf("lowers are %q, want %q", got, want)
	}
	again := prepare(t, s, "fork", "image", from(nodeID(1)))
	if got, want := lowersOf(again), []string{"2", "1"}; !slices.Equal(got, want) {
		t.Errorf("lowers of a fork are %q, want %q", got, want)
	}
	view, err := s.View(t.Context(), "look", "image", from(nodeID(2)))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := lowersOf(view), []string{"3", "2", "1"}; !slices.Equal(got, want) {
		t.Errorf("lowers of a view are %q, want %q", got, want)
	}
}

// containerd may be killed after our commit and before its own; it then commits
// again, by a name that it makes anew.
func TestCommitAgain(t *testing.T) {
	ctx := t.Context()
	s := open(t, t.TempDir())
	chain(t, s, 1)
	m, err := s.Mounts(ctx, "head")
	if err != nil {
		t.Fatal(err)
	}
	upper := upperOf(m)
	write(t, filepath.Join(upper, "file"), "x") // an empty layer is not stacked
	node := asNode(nodeID(2))
	commit(t, s, "7/node", "head", node)
	commit(t, s, "7/node", "head", node)
	commit(t, s, "9/node", "head", node)
	if _, err := s.Stat(ctx, "7/node"); !errdefs.IsNotFound(err) {
		t.Errorf("the first name: got %v, want it gone", err)
	}
	info, err := s.Stat(ctx, "9/node")
	if err != nil || info.Kind != snapshots.KindCommitted || info.Parent != "image" || info.Labels[layer.LabelNode] != nodeID(2) {
		t.Errorf("the second name: got %+v, %v", info, err)
	}
	next := prepare(t, s, "head", "image", from(nodeID(2)))
	if got := lowersOf(next); len(got) != 3 || got[0] != filepath.Base(upper) {
		t.Errorf("lowers are %q, want %q first", got, filepath.Base(upper))
	}
	// The parent's link has the new name: it is what keeps the image.
	if err := s.Remove(ctx, "image"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove the image: got %v, want a refusal", err)
	}
	for _, name := range []string{"head", "9/node"} {
		remove(t, s, name)
	}
	// Anything else that is committed twice is a mistake.
	prepare(t, s, "other", "image")
	commit(t, s, "plain", "other")
	if err := s.Commit(ctx, "plain", "other"); !errdefs.IsNotFound(err) {
		t.Errorf("no node: got %v, want not found", err)
	}
}

// A snapshot with a private lineage can be a visible parent too, as when
// somebody commits a container under a name of his own.
func TestLineageBelowVisibleParent(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 2)
	write(t, filepath.Join(s.dirs.upper(4), "f"), "")
	commit(t, s, "mine", "head")
	want := []string{"4", "3", "2", "1"}
	if got := lowersOf(prepare(t, s, "on", "mine")); !slices.Equal(got, want) {
		t.Errorf("lowers are %q, want %q", got, want)
	}
	if err := s.Remove(t.Context(), "mine"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove a visible parent: got %v, want the class failed precondition", err)
	}
}

func TestRefusals(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 1)
	base(t, s, "other", "")
	prepare(t, s, "second", "image")
	prepare(t, s, "rootless", "")
	commit(t, s, "node-ff", "rootless", asNode(nodeID(0xff)))
	prepare(t, s, "from-ff", "", from(nodeID(0xff)))
	ctx := t.Context()
	try := func(_ any, err error) error { return err }
	for _, tt := range []struct {
		name string
		err  error
		is   func(error) bool
	}{
		{"prepare from an unknown node", try(s.Prepare(ctx, "k", "image", from(nodeID(7)))), errdefs.IsNotFound},
		{"prepare from a node of another image", try(s.Prepare(ctx, "k", "other", from(nodeID(1)))), errdefs.IsInvalidArgument},
		{"view from a node without its parent", try(s.View(ctx, "k", "", from(nodeID(1)))), errdefs.IsInvalidArgument},
		{"prepare an existing key", try(s.Prepare(ctx, "second", "image")), errdefs.IsAlreadyExists},
		{"prepare with mapped ids", try(s.Prepare(ctx, "k", "image", snapshots.WithLabels(map[string]string{
			snapshots.LabelSnapshotUIDMapping: "0:100000:65536"}))), errdefs.IsNotImplemented},
		{"commit a node id twice", s.Commit(ctx, "n", "second", asNode(nodeID(1))), errdefs.IsAlreadyExists},
		{"commit a bad node id", s.Commit(ctx, "n", "second", asNode("../../etc/xx")), errdefs.IsInvalidArgument},
		{"commit a missing key", s.Commit(ctx, "n", "none"), errdefs.IsNotFound},
		{"commit a lineage under another parent", s.Commit(ctx, "n", "from-ff", snapshots.WithParent("image")), errdefs.IsInvalidArgument},
		{"remove what is not there", s.Remove(ctx, "none"), errdefs.IsNotFound},
		{"remove a visible parent", s.Remove(ctx, "image"), errdefs.IsFailedPrecondition},
		{"mounts of a committed snapshot", try(s.Mounts(ctx, "image")), errdefs.IsFailedPrecondition},
		{"change the lineage of a snapshot", try(s.Update(ctx, snapshots.Info{Name: "head"}, "labels")), errdefs.IsInvalidArgument},
		{"make a node by a label", try(s.Update(ctx, snapshots.Info{Name: "image",
			Labels: map[string]string{layer.LabelNode: nodeID(9)}}, "labels."+layer.LabelNode)), errdefs.IsInvalidArgument},
	} {
		if !tt.is(tt.err) {
			t.Errorf("%s: unexpected error %v", tt.name, tt.err)
		}
	}
	// Nothing of all that may have had an effect.
	if _, err := s.Stat(ctx, "k"); !errdefs.IsNotFound(err) {
		t.Errorf("a refused snapshot is there: %v", err)
	}
	if got, want := names(t, s, "l"), []string{"1", "2", "3", "4", "5", "6", "7"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
	if _, err := s.Update(ctx, snapshots.Info{Name: "head", Labels: map[string]string{"a": "b"}}, "labels.a"); err != nil {
		t.Errorf("other labels can be changed: %v", err)
	}
}

// Nodes go in any order; what still stands on them keeps its layers, what
// nothing stands on goes.
func TestRemoveInAnyOrder(t *testing.T) {
	var orders [][]int
	var permute func(done, rest []int)
	permute = func(done, rest []int) {
		if len(rest) == 0 {
			orders = append(orders, slices.Clone(done))
		}
		for i, n := range rest {
			permute(append(slices.Clone(done), n), slices.Delete(slices.Clone(rest), i, i+1))
		}
	}
	permute(nil, []int{1, 2, 3})
	for _, order := range orders {
		s := open(t, t.TempDir())
		chain(t, s, 3)
		before, err := s.Mounts(t.Context(), "head")
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range order {
			remove(t, s, "node-"+nodeID(n))
			if _, err := s.Prepare(t.Context(), "gone", "image", from(nodeID(n))); !errdefs.IsNotFound(err) {
				t.Fatalf("%v: a removed node can still be gone on from: %v", order, err)
			}
		}
		after, err := s.Mounts(t.Context(), "head")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(lowersOf(before), lowersOf(after)) {
			t.Errorf("%v: lowers were %q, are %q", order, lowersOf(before), lowersOf(after))
		}
		if got, want := names(t, s, "m"), []string{"1", "5"}; !slices.Equal(got, want) {
			t.Errorf("%v: beside the layers there is %q, want %q", order, got, want)
		}
		remove(t, s, "head")
		remove(t, s, "image")
		if l, m := names(t, s, "l"), names(t, s, "m"); len(l)+len(m) != 0 {
			t.Errorf("%v: left over: l %q, m %q", order, l, m)
		}
	}
}

// The layers of a node that was removed stay for its descendants only as long
// as these are there.
func TestReleaseStopsAtSharedLayers(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 3)                                  // 1 image, 2 to 4 nodes, 5 head
	prepare(t, s, "fork", "image", from(nodeID(1))) // 6
	remove(t, s, "head")                            // 5 goes
	remove(t, s, "node-"+nodeID(1))                 // 2 stays for 3 and 6
	remove(t, s, "node-"+nodeID(2))                 // 3 stays for 4
	remove(t, s, "node-"+nodeID(3))                 // 4 and 3 go
	if got, want := names(t, s, "l"), []string{"1", "2", "6"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
	remove(t, s, "fork")
	if got, want := names(t, s, "l"), []string{"1"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
}

// Many forks come and go at the same time.
func TestParallelForks(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 2)
	var forks errgroup.Group
	for i := range 8 {
		forks.Go(func() error {
			ctx, key := t.Context(), fmt.Sprint("fork ", i)
			for round := range 5 {
				id := nodeID(100*(i+1) + round)
				if _, err := s.Prepare(ctx, key, "image", from(nodeID(1+i%2))); err != nil {
					return err
				}
				if err := s.Commit(ctx, id, key, asNode(id)); err != nil {
					return err
				}
				if _, err := s.View(ctx, key, "image", from(id)); err != nil {
					return err
				}
				if err := errors.Join(s.Remove(ctx, id), s.Remove(ctx, key), s.Cleanup(ctx)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := forks.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, s, "l"), []string{"1", "2", "3", "4"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
	for n := range 2 { // nothing holds them any more
		remove(t, s, "node-"+nodeID(n+1))
	}
	remove(t, s, "head")
	if got, want := names(t, s, "l"), []string{"1"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
}

func TestCommitRefusesTooDeep(t *testing.T) {
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	prepare(t, s, "head", "image")
	n := 1
	for ; n <= maxLowers-2; n++ { // image and these: one less than the limit
		seal(t, s, "head", n)
		prepare(t, s, "head", "image", from(nodeID(n)))
	}
	m, err := s.Mounts(t.Context(), "head")
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(upperOf(m), "f"), "")
	err = s.Commit(t.Context(), "deep", "head", asNode(nodeID(n)))
	if !errdefs.IsResourceExhausted(err) {
		t.Fatalf("got %v, want the class resource exhausted", err)
	}
	if !strings.Contains(err.Error(), "earlier node") {
		t.Errorf("error %q does not say what to do", err)
	}
	if _, err := s.Mounts(t.Context(), "head"); err != nil {
		t.Errorf("the refused commit had an effect: %v", err)
	}
	commit(t, s, "deep", "head") // a snapshot like others can be made of it
	view, err := s.View(t.Context(), "look", "deep")
	if err != nil {
		t.Fatal(err)
	}
	if got := len(lowersOf(view)); got != maxLowers {
		t.Errorf("view has %d lowers, want %d", got, maxLowers)
	}
}

func TestStore(t *testing.T) {
	for _, r := range []record{
		{},
		{from: 1 << 40, refs: 3, removed: true, empty: true, measured: true,
			usage: snapshots.Usage{Inodes: 12, Size: 1 << 50}, node: nodeID(5)},
	} {
		b := r.encode()
		got, err := decodeRecord(b)
		if err != nil || got != r {
			t.Errorf("wrote %+v, read %+v, %v", r, got, err)
		}
		for i := range len(b) - len(r.node) {
			if _, err := decodeRecord(b[:i]); err == nil {
				t.Errorf("read %d of %d bytes without an error", i, len(b))
			}
		}
	}
}

// Walk's function may use the snapshotter in any way.
func TestWalkAllowsChanges(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 2)
	seen := map[string]bool{}
	err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
		seen[info.Name] = true
		return s.Remove(t.Context(), info.Name)
	}, `labels."`+layer.LabelNode+`"`)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"node-" + nodeID(1): true, "node-" + nodeID(2): true}
	if !maps.Equal(seen, want) {
		t.Errorf("walked over %v, want %v", seen, want)
	}
	if err := open(t, t.TempDir()).Walk(t.Context(), nil); err != nil {
		t.Errorf("walk over nothing: %v", err)
	}
}

// To containerd's garbage collector a node that it knows nothing of is nobody's.
// If the commit was taken back it is some container's root.
func TestCollectUnknownNode(t *testing.T) {
	ctx := t.Context()
	s := open(t, t.TempDir())
	chain(t, s, 1)
	m, err := s.Mounts(ctx, "head")
	must(t, err)
	file := filepath.Join(upperOf(m), "file")
	write(t, file, "x")
	image := filepath.Join(images(t, s, "head", 1), "inventory.img")
	write(t, image, "x")
	before, err := s.Stat(ctx, "head")
	must(t, err)
	commit(t, s, "unknown", "head", asNode(nodeID(2)))
	remove(t, s, "unknown")
	after, err := s.Stat(ctx, "head")
	must(t, err)
	if after.Kind != snapshots.KindActive || after.Parent != before.Parent || !maps.Equal(after.Labels, before.Labels) {
		t.Errorf("the active snapshot is %+v, was %+v", after, before)
	}
	for _, f := range []string{file, image} {
		if b, err := os.ReadFile(f); err != nil || string(b) != "x" {
			t.Errorf("%s: %q, %v", f, b, err)
		}
	}
	if got, err := s.Mounts(ctx, "head"); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("mounts are %v, %v, want %v", got, err, m)
	}
	// It is removed like any other by the key that it has now.
	remove(t, s, "head")
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
	if _, err := s.Stat(ctx, "head"); !errdefs.IsNotFound(err) {
		t.Errorf("the removed one: %v", err)
	}
}
