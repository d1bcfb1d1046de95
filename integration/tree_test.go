package integration_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/layer"
)

// step changes what a container has in memory and on disk: a new number, a file
// more, one changed and, of every second step, one deleted.
func (e *env) step(container string, i int) {
	e.Helper()
	number := e.sh(container, fmt.Sprintf(`echo add 1 >/q && cat /a && mkdir -p /data && cd /data && echo %[1]d >file-%[1]d && echo %[1]d >>log && rm -f file-$((%[1]d - 1 - %[1]d %% 2))`, i))
	e.equal("number", number, strconv.Itoa(i))
}

// verify compares a container with what it was after step i.
func (e *env) verify(container string, i int) {
	e.Helper()
	files, log := stateAfter(i)
	got := e.sh(container, "echo get >/q; cat /a; cd /data; ls -1v; cat log /etc/base")
	e.equal("number, files, log and file of the image", got, strings.Join([]string{strconv.Itoa(i), files, log, "of the image"}, "\n"))
}

// stateAfter replays the steps.
func stateAfter(i int) (files, log string) {
	var list, lines []string
	for k := 1; k <= i; k++ {
		list = append(list, fmt.Sprintf("file-%d", k))
		lines = append(lines, strconv.Itoa(k))
		list = slices.DeleteFunc(list, func(f string) bool { return f == fmt.Sprintf("file-%d", k-1-k%2) })
	}
	return strings.Join(append(list, "log"), "\n"), strings.Join(lines, "\n")
}

// seeded returns a source of random numbers whose seed is told, so that a
// failure can be repeated with STATEFORK_SEED.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s, ok := os.LookupEnv("STATEFORK_SEED"); ok {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("STATEFORK_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// TestTwentyFive makes 25 nodes in a row and then jumps among them. containerd
// must see one task, from the beginning to its end.
func TestTwentyFive(t *testing.T) {
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		t.Run(sn, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.snapshotter = sn
			twentyFive(e, seeded(t))
		})
	}
}

func twentyFive(e *env, random *rand.Rand) {
	const last = 25
	events := e.watchExits()
	id := e.runKeeper("box")
	task, err := e.ns.Task(e.ctx, id)
	if err != nil {
		e.Fatal(err)
	}
	exited, err := task.Wait(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	for i := 1; i <= last; i++ {
		e.step("box", i)
		res := e.checkpoint("box", fmt.Sprintf("n%d", i))
		if res.Container != id || res.Node.Name != fmt.Sprintf("n%d", i) {
			e.Fatalf("checkpoint %d = %+v", i, res)
		}
	}
	e.verify("box", last)
	if n := len(e.nodes("box")); n != last {
		e.Errorf("the tree has %d nodes, want %d", n, last)
	}
	for round := range 3 {
		order := []int{1, 13, last}
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		e.Logf("round %d: %v", round, order)
		for _, i := range order {
			e.restore("box", fmt.Sprintf("n%d", i))
			e.verify("box", i)
			// What the node must not keep: the next restore shows that it is gone.
			e.sh("box", "echo add 1000 >/q; cat /a; rm -r /data /etc/base; echo x >/rubbish")
		}
	}
	select {
	case status := <-exited:
		e.Fatalf("containerd saw the task exit: %+v", status)
	default:
	}
	events.expect()
	if now, err := e.ns.Task(e.ctx, id); err != nil || now.ID() != task.ID() {
		e.Errorf("the task is %v, %v", now, err)
	}
	e.nerdctl("stop", "box")
	status := <-exited
	e.equal("exit code", fmt.Sprint(status.ExitCode()), fmt.Sprint(keeperCode))
	events.wait(id)
	e.nerdctl("rm", "box")
	e.eventually(func() error { return e.noShim(id) })
	events.expect(fmt.Sprintf("%s exited with %d", id, keeperCode))
}

// TestForkOfFork starts three siblings of a fork of a fork, and has all of them
// write to the same paths.
func TestForkOfFork(t *testing.T) {
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		t.Run(sn, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.snapshotter = sn
			e.runKeeper("box")
			e.step("box", 1)
			first := e.fork("box")[0].ID
			e.step(first, 2)
			second := e.fork(first)[0].ID
			e.step(second, 3)
			node := e.checkpoint(second, "base")
			before := e.checksums(second, "base")
			siblings := e.fork(second+"@base", "-n", "3")
			if len(siblings) != 3 {
				t.Fatalf("siblings are %+v, want 3", siblings)
			}
			for i, s := range siblings {
				e.verify(s.ID, 3)
				e.equal("number", e.ask(s.ID, fmt.Sprintf("set %d", 100+i)), strconv.Itoa(100+i))
				e.sh(s.ID, fmt.Sprintf("echo %[1]d >/data/log; echo %[1]d >/data/own-%[1]d; rm /data/file-3", i))
			}
			for i, s := range siblings {
				e.equal("number", e.ask(s.ID, "get"), strconv.Itoa(100+i))
				e.equal("log", e.sh(s.ID, "cat /data/log"), strconv.Itoa(i))
				e.equal("own files", e.sh(s.ID, "cd /data; ls -d own-* file-3 2>/dev/null || true"), fmt.Sprintf("own-%d", i))
			}
			e.verify("box", 1)
			e.verify(first, 2)
			e.verify(second, 3)
			e.equal("sealed files", e.checksums(second, "base"), before)
			// The siblings have trees of their own.
			e.checkpoint(siblings[0].ID, "mine")
			e.restore(second, node.Node.ID)
			e.verify(second, 3)
		})
	}
}

// checksums reads everything that a node has on disk: its own layer and those
// below it, and the process images.
func (e *env) checksums(container, node string) string {
	e.Helper()
	d, err := e.library().InspectNode(e.ctx, container+"@"+node)
	if err != nil {
		e.Fatal(err)
	}
	dirs := append([]string{d.Images}, e.lowerdirs(container)...)
	args := append([]string{"-c", `for d; do find "$d" -type f ! -name '*.log' -exec sha256sum {} +; done | sort`, "-"}, dirs...)
	out, err := e.ns.Exec(e.ctx, "sh", args...)
	if err != nil {
		e.Fatal(err)
	}
	if strings.Count(out.Stdout, "\n") < 10 {
		e.Fatalf("node %s of %s has hardly any files:\n%s", node, container, out.Stdout)
	}
	return out.Stdout
}

// writable is the writable layer of a container's active snapshot.
func (e *env) writable(container string) layer.Writable {
	e.Helper()
	w, err := layer.FromMounts(e.mounts(container))
	if err != nil {
		e.Fatal(err)
	}
	return w
}

func (e *env) mounts(container string) []mount.Mount {
	e.Helper()
	c, err := e.ns.Find(e.ctx, container)
	if err != nil {
		e.Fatal(err)
	}
	info, err := c.Info(e.ctx, containerd.WithoutRefreshedMetadata)
	if err != nil {
		e.Fatal(err)
	}
	mounts, err := e.ns.Client().SnapshotService(info.Snapshotter).Mounts(e.ctx, info.SnapshotKey)
	if err != nil {
		e.Fatal(err)
	}
	return mounts
}

// lowerdirs are the sealed layers below a container's writable one.
func (e *env) lowerdirs(container string) []string {
	e.Helper()
	for _, m := range e.mounts(container) {
		for _, o := range m.Options {
			if v, ok := strings.CutPrefix(o, "lowerdir="); ok {
				return strings.Split(v, ":")
			}
		}
	}
	e.Fatalf("container %s has no lower directories", container)
	return nil
}

// TestRemoveInner removes nodes in random order, until one is left. Whatever is
// still there can be restored at any time.
func TestRemoveInner(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	random := seeded(t)
	e.runKeeper("box")
	var left []int
	for i := 1; i <= 6; i++ {
		e.step("box", i)
		e.checkpoint("box", fmt.Sprintf("n%d", i))
		left = append(left, i)
	}
	for len(left) > 1 {
		k := random.IntN(len(left))
		e.Logf("remove n%d", left[k])
		images := e.imagesOf("box", fmt.Sprintf("n%d", left[k]))
		e.statefork(nil, "rm", fmt.Sprintf("box@n%d", left[k]))
		e.gone(images)
		left = slices.Delete(left, k, k+1)
		if n := len(e.nodes("box")); n != len(left) {
			t.Fatalf("the tree has %d nodes, want %d", n, len(left))
		}
		for _, i := range left {
			e.restore("box", fmt.Sprintf("n%d", i))
			e.verify("box", i)
		}
	}
}

func (e *env) imagesOf(container, node string) string {
	e.Helper()
	d, err := e.library().InspectNode(e.ctx, container+"@"+node)
	if err != nil {
		e.Fatal(err)
	}
	if _, err := os.Stat(d.Images); err != nil {
		e.Fatal(err)
	}
	return d.Images
}

// gone waits until a path is not there any more.
func (e *env) gone(path string) {
	e.Helper()
	e.eventually(func() error {
		if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("%s is still there", path)
		}
		return nil
	})
}

// TestRemoveOnOverlayfs: the stock snapshotter stacks nodes, so that an inner
// one cannot go; the refusal says what needs it.
func TestRemoveOnOverlayfs(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.snapshotter = testbed.Stock
	e.runKeeper("box")
	e.step("box", 1)
	e.checkpoint("box", "n1")
	e.step("box", 2)
	n2 := e.checkpoint("box", "n2")
	if msg := e.refused(4, "rm", "box@n1"); !strings.Contains(msg, n2.Node.ID) {
		t.Errorf("the refusal %q does not name node %s", msg, n2.Node.ID)
	}
	e.restore("box", "n1")
	e.verify("box", 1)
	e.statefork(nil, "rm", "box@n2")
	e.verify("box", 1)
}

// TestGarbage removes a container with its nodes: containerd's collector must
// take all of them, and their directories with them.
func TestGarbage(t *testing.T) {
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		t.Run(sn, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.snapshotter = sn
			e.runKeeper("box")
			var paths []string
			for i := 1; i <= 3; i++ {
				e.step("box", i)
				e.checkpoint("box", fmt.Sprintf("n%d", i))
				w := e.writable("box")
				paths = append(paths, w.Upperdir, filepath.Dir(w.Workdir), e.imagesOf("box", fmt.Sprintf("n%d", i)))
			}
			e.restore("box", "n1")
			fork := e.fork("box@n2")[0].ID
			e.nerdctl("rm", "-f", "box")
			// What the fork stands on stays.
			e.verify(fork, 2)
			e.nerdctl("restart", fork)
			e.equal("log", e.sh(fork, "cat /data/log"), "1\n2")
			e.nerdctl("rm", "-f", fork)
			if err := e.ns.Check(e.ctx); err != nil {
				t.Error(err)
			}
			for _, p := range paths {
				e.gone(p)
			}
		})
	}
}
