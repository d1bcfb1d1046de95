package waypoint

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/api/types/runc/options"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

const (
	nodeA = "aaaaaaaaaaa1"
	nodeB = "bbbbbbbbbbb2"
	nodeC = "ccccccccccc3"
)

func TestConnectRefused(t *testing.T) {
	if _, err := Connect(t.Context(), "unix://"+filepath.Join(t.TempDir(), "none")); !errdefs.IsUnavailable(err) {
		t.Errorf("Connect = %v, want unavailable", err)
	}
}

// TestStopped works on a container without a task: everything about its nodes
// comes from containerd's metadata alone.
func TestStopped(t *testing.T) {
	d := startDaemon(t)
	ctx := t.Context()
	d.base(t)
	d.create(t, "job1", "true", map[string]string{"app": "x"})
	d.create(t, "other", "true", nil)
	d.seal(t, "job1", nodeA, "", "first", nil)
	d.seal(t, "job1", nodeB, nodeA, "", nil)

	t.Run("Tree", func(t *testing.T) { checkTree(t, d) })
	t.Run("List", func(t *testing.T) {
		list, err := d.List(ctx)
		if err != nil || len(list) != 1 || list[0].ID != "job1" || list[0].Nodes != 2 || list[0].Head != nodeB {
			t.Errorf("List = %+v, %v", list, err)
		}
	})
	t.Run("Inspect", func(t *testing.T) {
		c, err := d.InspectContainer(ctx, "job1")
		if err != nil || c.Head != nodeB || c.SnapshotKey != "job1" || c.Usage == nil || c.Labels["app"] != "x" {
			t.Errorf("InspectContainer = %+v, %v", c, err)
		}
		n, err := d.InspectNode(ctx, "job1@first")
		if err != nil || n.ID != nodeA || n.Head || !slices.Equal(n.Children, []string{nodeB}) || n.Usage == nil || n.Images == "" {
			t.Errorf("InspectNode = %+v, %v", n, err)
		}
		if n, err = d.InspectNode(ctx, "job1@bbb"); err != nil || !n.Head || !slices.Equal(n.Path, []string{nodeA}) {
			t.Errorf("InspectNode = %+v, %v", n, err)
		}
	})
	t.Run("Refused", func(t *testing.T) { checkRefused(t, d) })
}

// checkTree compares the nested form of a tree of two nodes.
func checkTree(t *testing.T, d *daemon) {
	tree, err := d.Tree(t.Context(), "jo")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Container Container
		Roots     []Branch
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	c := got.Container
	if c.ID != "job1" || c.Head != nodeB || c.Nodes != 2 || c.Status != "none" || len(got.Roots) != 1 {
		t.Fatalf("tree is %s", b)
	}
	r := got.Roots[0]
	if r.ID != nodeA || r.Name != "first" || r.Head || r.Labels["step"] != "7" || r.ImageBytes != 4096 ||
		len(r.Children) != 1 || r.Children[0].ID != nodeB || !r.Children[0].Head {
		t.Errorf("tree is %s", b)
	}
}

// checkRefused tries what cannot be done to a stopped container.
func checkRefused(t *testing.T, d *daemon) {
	ctx := t.Context()
	_, err := d.Checkpoint(ctx, "job1", "", nil)
	wantError(t, "Checkpoint without a task", err, errdefs.IsFailedPrecondition, true)
	_, err = d.Checkpoint(ctx, "job1", nodeC, nil)
	wantError(t, "Checkpoint with an id as its name", err, errdefs.IsInvalidArgument, false)
	_, err = d.Fork(ctx, "job1", ForkOptions{})
	wantError(t, "Fork without a task or a node", err, errdefs.IsFailedPrecondition, true)
	_, err = d.Fork(ctx, "job1@first", ForkOptions{Name: "other"})
	wantError(t, "Fork with a name in use", err, errdefs.IsAlreadyExists, true)
	_, err = d.Fork(ctx, "job1@first", ForkOptions{Count: -1})
	wantError(t, "Fork of less than one", err, errdefs.IsInvalidArgument, false)
	_, err = d.Restore(ctx, "job1", "nope")
	wantError(t, "Restore of an unknown node", err, errdefs.IsNotFound, true)
	_, err = d.Tree(ctx, "nope")
	wantError(t, "Tree of an unknown container", err, errdefs.IsNotFound, true)
	_, err = d.Tree(ctx, "")
	wantError(t, "Tree of nothing", err, errdefs.IsInvalidArgument, false)
	_, err = d.Remove(ctx, "job1")
	wantError(t, "Remove of no node", err, errdefs.IsInvalidArgument, true)
	_, err = d.Remove(ctx, "job1@first")
	wantError(t, "Remove of a parent", err, errdefs.IsFailedPrecondition, true)
	if err != nil && !strings.Contains(err.Error(), "node "+nodeB) {
		t.Errorf("Remove does not tell what needs the node: %v", err)
	}
	_, err = d.Remove(ctx, "job1@"+nodeB)
	if err == nil || !strings.Contains(err.Error(), "container job1") {
		t.Errorf("Remove does not tell what needs the head: %v", err)
	}
}

func wantError(t *testing.T, what string, err error, is func(error) bool, hint bool) {
	t.Helper()
	if !is(err) || (hint && statefork.Hint(err) == "") {
		t.Errorf("%s = %v; hint %q", what, err, statefork.Hint(err))
	}
}

// TestRemoveFlat removes nodes that are no snapshot's parent, as they are with
// a snapshotter that keeps the lineage.
func TestRemoveFlat(t *testing.T) {
	d := startDaemon(t)
	ctx := scoped(t)
	d.base(t)
	d.create(t, "job1", "true", nil)
	d.flat(t, "job1", nodeA, "")
	d.flat(t, "job1", nodeB, nodeA)
	d.flat(t, "job1", nodeC, nodeB)
	shape := func() string {
		tree, err := d.Tree(ctx, "job1")
		if err != nil {
			t.Fatal(err)
		}
		var list []string
		for _, n := range tree.Nodes.Nodes() {
			list = append(list, n.ID+"<-"+n.Parent)
		}
		return fmt.Sprint(list)
	}
	if n, err := d.Remove(ctx, "job1@bbb"); err != nil || n.ID != nodeB {
		t.Fatalf("Remove = %v, %v", n, err)
	}
	if got, want := shape(), fmt.Sprintf("[%s<- %s<-%s]", nodeA, nodeC, nodeA); got != want {
		t.Errorf("tree is %s, want %s", got, want)
	}
	if _, err := d.Remove(ctx, "job1@"+nodeA); err != nil {
		t.Fatal(err)
	}
	if got, want := shape(), fmt.Sprintf("[%s<-]", nodeC); got != want {
		t.Errorf("tree is %s, want %s", got, want)
	}
}

// TestForkFailure starts forks, and the container itself, from images that criu
// cannot restore: nothing of the forks may be left, and the container must stand
// where it stood.
func TestForkFailure(t *testing.T) {
	for _, name := range []string{"overlayfs", "statefork"} {
		t.Run(name, func(t *testing.T) { testForkFailure(t, startDaemonOn(t, name)) })
	}
}

func testForkFailure(t *testing.T, d *daemon) {
	ctx := t.Context()
	d.base(t)
	d.create(t, "job1", "true", nil)
	d.seal(t, "job1", nodeA, "", "first", nil)
	before := d.inventory(t)
	res, err := d.Fork(ctx, "job1@first", ForkOptions{Count: 3, Name: "try"})
	if err != nil {
		t.Fatal(err)
	}
	if res.Err() == nil || len(res.Siblings) != 3 {
		t.Fatalf("Fork = %+v", res)
	}
	for _, s := range res.Siblings {
		if s.Err == nil || !strings.Contains(s.Error, s.ID) {
			t.Errorf("sibling %+v", s)
		}
	}
	if after := d.inventory(t); after != before {
		t.Errorf("left behind:\n%s\nwant\n%s", after, before)
	}
	d.restoreFails(t)
}

// restoreFails fails twice to start job1 at its node.
func (d *daemon) restoreFails(t *testing.T) {
	t.Helper()
	ctx := scoped(t)
	was, err := d.sn.Stat(ctx, "job1")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := d.Restore(ctx, "job1", "first"); err == nil {
			t.Error("Restore started a task from no images")
		}
		info, err := d.sn.Stat(ctx, "job1")
		if err != nil || info.Kind != was.Kind || (d.name == "statefork" && info.Parent != was.Parent) {
			t.Errorf("the active snapshot is %+v, %v; was %+v", info, err, was)
		}
		tree, err := d.Tree(ctx, "job1")
		if err != nil || tree.Container.Head != nodeA || tree.Container.Nodes != 1 || tree.Container.Status != "none" {
			t.Errorf("Tree = %+v, %v", tree, err)
		}
		list, err := d.List(ctx)
		if err != nil || len(list) != 1 || list[0].Head != nodeA || list[0].Nodes != 1 {
			t.Errorf("List = %+v, %v", list, err)
		}
	}
}

const counter = `i=0; echo ready >/proc/1/fd/1; while :; do i=$((i+1)); echo $i >/count; sleep 0.05; done`

// TestForkAndStart checkpoints a container with runc, makes a node of that, and
// forks it and starts it again: the counter in the shell's memory goes on.
func TestForkAndStart(t *testing.T) {
	for _, name := range []string{"overlayfs", "statefork"} {
		t.Run(name, func(t *testing.T) { testForkAndStart(t, startDaemonOn(t, name)) })
	}
}

func testForkAndStart(t *testing.T, d *daemon) {
	need(t, exec.Command(program(t, "criu"), "check").Run() == nil, "a criu that works on this kernel")
	ctx := scoped(t)
	d.base(t)
	src := d.create(t, "job1", counter, map[string]string{"app": "x", "containerd.io/restart.explicitly-stopped": "true"},
		oci.WithHostNamespace(specs.NetworkNamespace))
	task := d.run(t, src)
	d.dump(t, task, "job1")

	res := d.forkThree(t)
	tree, err := d.Tree(ctx, "job1")
	if err != nil || len(tree.Forks) != len(res.Siblings) || tree.Forks[0].Status != "running" {
		t.Errorf("Tree = %+v, %v", tree, err)
	}
	d.restartFork(t, res.Siblings[0].ID)
	started, err := d.Restore(ctx, "job1", "first")
	if err != nil || !started.Started {
		t.Fatalf("Restore = %+v, %v", started, err)
	}
	rec, err := d.ctrd.ContainerService().Get(ctx, "job1")
	if err != nil || rec.SnapshotKey != "job1" || rec.Labels["containerd.io/restart.explicitly-stopped"] != "false" {
		t.Errorf("record is %+v, %v", rec, err)
	}
	aside, err := walk(ctx, d.sn, fmt.Sprintf("labels.%q", api.LabelAbandoned))
	if err != nil || len(aside) != 0 {
		t.Errorf("the abandoned state stays: %v, %v", aside, err)
	}
	_, err = d.Checkpoint(ctx, "job1", "", nil)
	wantError(t, "Checkpoint under another runtime", err, errdefs.IsFailedPrecondition, true)
	d.removeUnder(t, res.Siblings[0].ID)
}

// removeUnder removes the node that a fork lives on, which only a snapshotter
// that keeps the lineage can do: the fork goes on, and its parent is the image's.
func (d *daemon) removeUnder(t *testing.T, fork string) {
	t.Helper()
	ctx := scoped(t)
	rec, err := d.ctrd.ContainerService().Get(ctx, fork)
	if err != nil {
		t.Fatal(err)
	}
	info, err := d.sn.Stat(ctx, rec.SnapshotKey)
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Remove(ctx, "job1@first")
	if d.name == "overlayfs" {
		if !errdefs.IsFailedPrecondition(err) || info.Parent != api.SnapshotName("job1", nodeA) {
			t.Errorf("Remove = %v; the fork's parent is %q", err, info.Parent)
		}
		return
	}
	if err != nil || info.Parent != "base" {
		t.Errorf("Remove = %v; the fork's parent is %q", err, info.Parent)
	}
	before := d.count(t, rec.SnapshotKey)
	eventually(t, "the fork counts on", func() error {
		if n := d.count(t, rec.SnapshotKey); n <= before {
			return fmt.Errorf("count is %d, was %d", n, before)
		}
		return nil
	})
	if tree, err := d.Tree(ctx, "job1"); err != nil || tree.Nodes.Len() != 0 || tree.Container.Head != nodeA || len(tree.Rootless()) != 3 {
		t.Errorf("Tree = %+v, %v", tree, err)
	}
}

// forkThree forks job1 at its node, and waits until each fork counts on.
func (d *daemon) forkThree(t *testing.T) *ForkResult {
	t.Helper()
	ctx := scoped(t)
	res, err := d.Fork(ctx, "job1@first", ForkOptions{Count: 3, LogURI: "file://" + filepath.Join(d.dir, "fork.log")})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range res.Siblings {
		t.Cleanup(func() { d.destroy(t, s.ID) })
	}
	if res.Err() != nil || len(res.Siblings) != 3 || res.Node.ID != nodeA {
		t.Fatalf("Fork = %+v, %v", res, res.Err())
	}
	sealed := d.count(t, api.SnapshotName("job1", nodeA))
	for _, s := range res.Siblings {
		rec, err := d.ctrd.ContainerService().Get(ctx, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		if rec.Labels[LabelForkedFrom] != "job1@"+nodeA || rec.Labels["app"] != "x" || s.PID == 0 {
			t.Errorf("sibling %+v has labels %v", s, rec.Labels)
		}
		eventually(t, s.ID+" counts on", func() error {
			if got := d.count(t, rec.SnapshotKey); got <= sealed {
				return fmt.Errorf("count is %d, the node's %d", got, sealed)
			}
			return nil
		})
	}
	return res
}

// restartFork ends a fork and takes it back to where it was started, by the name
// that its source's node has, and forks that node once more by way of the fork.
func (d *daemon) restartFork(t *testing.T, id string) {
	t.Helper()
	ctx := scoped(t)
	cont, err := d.ctrd.LoadContainer(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	task, err := cont.Task(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil {
		t.Fatal(err)
	}
	res, err := d.Restore(ctx, id, "first")
	if err != nil || res.Node.ID != nodeA || !res.Started {
		t.Fatalf("Restore of a fork = %+v, %v", res, err)
	}
	again, err := d.Fork(ctx, id+"@first", ForkOptions{Name: "again"})
	if err != nil || again.Err() != nil {
		t.Fatalf("Fork of a fork = %+v, %v", again, err)
	}
	defer d.destroy(t, "again")
	rec, err := d.ctrd.ContainerService().Get(ctx, "again")
	if err != nil || rec.Labels[LabelForkedFrom] != "job1@"+nodeA {
		t.Errorf("record is %+v, %v", rec, err)
	}
	_, err = d.Remove(ctx, id+"@first")
	wantError(t, "Remove of a source's node by way of its fork", err, errdefs.IsNotFound, true)
}

// dump checkpoints a task with runc, ends it, and seals its files as nodeA.
func (d *daemon) dump(t *testing.T, task containerd.Task, id string) {
	t.Helper()
	ctx := scoped(t)
	d.seal(t, id, nodeA, "", "first", func(images string) {
		exit, err := task.Wait(ctx)
		if err != nil {
			t.Fatal(err)
		}
		_, err = task.Checkpoint(ctx, func(r *containerd.CheckpointTaskInfo) error {
			r.Options = &options.CheckpointOptions{Exit: true, ImagePath: images, FileLocks: true}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		<-exit
		if _, err := task.Delete(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// count reads the counter in a snapshot's own layer.
func (d *daemon) count(t *testing.T, key string) int {
	t.Helper()
	ctx := scoped(t)
	view := "view-" + randomHex(3)
	mounts, err := d.sn.Mounts(ctx, key)
	if errdefs.IsInvalidArgument(err) || errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err) {
		mounts, err = d.sn.View(ctx, view, key, keep())
		defer func() { _ = d.sn.Remove(ctx, view) }()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range layers(mounts) {
		var n int
		if b, err := os.ReadFile(filepath.Join(dir, "count")); err == nil {
			if _, err := fmt.Sscan(string(b), &n); err == nil {
				return n
			}
		}
	}
	return 0
}

// layers are the directories of a mount, the uppermost first.
func layers(mounts []mount.Mount) []string {
	var upper, lower []string
	for _, m := range mounts {
		if m.Type == "bind" {
			upper = append(upper, m.Source)
		}
		for _, o := range m.Options {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
				upper = append(upper, dir)
			}
			if dirs, ok := strings.CutPrefix(o, "lowerdir="); ok {
				lower = append(lower, strings.Split(dirs, ":")...)
			}
		}
	}
	return append(upper, lower...)
}
