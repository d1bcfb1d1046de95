package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
)

// operation is a call to a shim that is under way. It goes to the shim itself,
// so that it does not end with containerd.
type operation struct {
	e    *env
	id   string
	done chan struct{}
	err  error // valid when done is closed
}

func (e *env) begin(id string, call func(context.Context, *api.Client) error) *operation {
	e.Helper()
	shim, err := api.Dial(e.ctx, api.Config{State: e.ns.State(), Namespace: e.ns.NS, ContainerID: id})
	if err != nil {
		e.Fatal(err)
	}
	op := &operation{e: e, id: id, done: make(chan struct{})}
	go func() {
		defer close(op.done)
		defer shim.Close()
		ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
		defer cancel()
		op.err = call(ctx, shim)
	}()
	return op
}

func (e *env) beginCheckpoint(id, name string) *operation {
	return e.begin(id, func(ctx context.Context, shim *api.Client) error {
		_, err := shim.Checkpoint(ctx, name, nil)
		return err
	})
}

func (e *env) beginRestore(id, node string) *operation {
	return e.begin(id, func(ctx context.Context, shim *api.Client) error {
		_, err := shim.Restore(ctx, node)
		return err
	})
}

// reach returns when the operation's journal names the phase, or it has ended.
// A phase lasts for milliseconds, so it looks all the time.
func (op *operation) reach(phase string) (reached bool) {
	op.e.Helper()
	journal := filepath.Join(op.e.ns.State(), "io.containerd.runtime.v2.task", op.e.ns.NS, op.id, "statefork.json")
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for {
		select {
		case <-op.done:
			return false
		case <-tick.C:
		}
		b, err := os.ReadFile(journal)
		if err != nil {
			continue
		}
		var j struct{ Phase string }
		if json.Unmarshal(b, &j) == nil && j.Phase == phase {
			return true
		}
	}
}

func (op *operation) wait() error {
	op.e.Helper()
	select {
	case <-op.done:
		return op.err
	case <-time.After(2 * time.Minute):
		op.e.Fatalf("the operation on %s does not end", op.id)
		return nil
	}
}

// phases are those of a checkpoint, in their order.
var phases = []string{"dump", "seal", "restore"}

// wholeOrNothing checks what is there after a checkpoint that was disturbed. The
// container is at step i in any case.
func (e *env) wholeOrNothing(container, name string, i int, err error) {
	e.Helper()
	e.verify(container, i)
	var there bool
	for _, n := range e.nodes(container) {
		there = there || n.Name == name
	}
	e.Logf("%s: error %v, node %v", name, err, there)
	switch {
	case err == nil && !there:
		e.Errorf("checkpoint %s has succeeded without making a node", name)
	case there:
		e.sh(container, "rm -r /data; echo set 0 >/q; cat /a")
		e.restore(container, name)
		e.verify(container, i)
	default:
		if images := e.writable(container).Images(); exists(images) {
			e.Errorf("%s was left by checkpoint %s", images, name)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestContainerdKilled kills containerd in every phase of a checkpoint and of a
// restore, and starts it again at once. The container must not notice.
func TestContainerdKilled(t *testing.T) {
	t.Parallel()
	tb := private(t)
	e := setup(t, tb)
	id := e.runKeeper("box")
	i := 0
	kill := func(op *operation, phase string) error {
		t.Helper()
		if !op.reach(phase) {
			t.Logf("phase %q was too short to be seen", phase)
		}
		if err := tb.Containerd.Restart(e.ctx); err != nil {
			t.Fatal(err)
		}
		return op.wait()
	}
	for round := range 2 {
		for _, phase := range phases {
			i++
			e.step("box", i)
			name := fmt.Sprintf("%s-%d", phase, round)
			e.wholeOrNothing("box", name, i, kill(e.beginCheckpoint(id, name), phase))
		}
	}
	last := e.checkpoint("box", "last").Node.ID
	for _, phase := range []string{"seal", "restore"} {
		e.ask("box", "set 1000")
		err := kill(e.beginRestore(id, last), phase)
		if err != nil {
			e.equal("number after a failed restore", e.ask("box", "get"), "1000")
			continue
		}
		e.verify("box", i)
	}
	e.nerdctl("stop", "box")
	e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
}

// TestSnapshotterKilled kills the snapshotter's daemon between operations, and
// within them.
func TestSnapshotterKilled(t *testing.T) {
	t.Parallel()
	tb := private(t)
	e := setup(t, tb)
	id := e.runKeeper("box")
	restart := func() {
		t.Helper()
		if err := tb.Snapshotterd.Restart(e.ctx); err != nil {
			t.Fatal(err)
		}
		// containerd tries to connect again only now and then.
		e.eventually(func() error {
			return tb.Client().SnapshotService(testbed.Snapshotter).Walk(e.ctx, func(context.Context, snapshots.Info) error { return nil })
		})
	}
	for i := 1; i <= 3; i++ {
		e.step("box", i)
		e.checkpoint("box", fmt.Sprintf("n%d", i))
		restart()
	}
	for _, i := range []int{2, 1, 3} {
		e.restore("box", fmt.Sprintf("n%d", i))
		restart()
		e.verify("box", i)
	}
	for k, phase := range phases {
		e.step("box", 4+k)
		op := e.beginCheckpoint(id, phase)
		op.reach(phase)
		restart()
		e.wholeOrNothing("box", phase, 4+k, op.wait())
	}
	fork := e.fork("box@n1")[0].ID
	restart()
	e.verify(fork, 1)
}

// TestShimKilled kills the shim while nothing is under way. containerd must say
// that the task is gone, and all of it must be; the nodes are as good as before.
func TestShimKilled(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	events := e.watchExits()
	id := e.runKeeper("box")
	e.step("box", 1)
	e.checkpoint("box", "n1")
	e.step("box", 2)
	e.checkpoint("box", "n2")
	e.killShim(id)
	events.wait(id)
	e.noTask(id)
	for _, i := range []int{1, 2} {
		e.restore("box", fmt.Sprintf("n%d", i))
		e.verify("box", i)
		e.killShim(id)
		e.noTask(id)
	}
	e.restore("box", "n1")
	e.verify("box", 1)
	e.nerdctl("stop", "box")
	e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
}

// TestShimKilledInside kills the shim in every phase of a checkpoint. Older
// nodes are untouched, and the new one is whole or not there.
func TestShimKilledInside(t *testing.T) {
	t.Parallel()
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		for _, phase := range phases {
			t.Run(sn+"/"+phase, func(t *testing.T) {
				t.Parallel()
				e := setup(t, common(t))
				e.snapshotter = sn
				id := e.runKeeper("box")
				e.step("box", 1)
				e.checkpoint("box", "n1")
				e.step("box", 2)
				op := e.beginCheckpoint(id, "n2")
				reached := op.reach(phase)
				if !reached {
					t.Logf("phase %q was too short to be seen", phase)
				}
				e.killShim(id)
				err := op.wait()
				e.noTask(id)
				recovered := e.recovers("box")
				t.Logf("recovered: %v", recovered)
				if recovered {
					e.verify("box", 2)
				} else if reached && phase == "seal" {
					t.Error("the images were whole, and it was not recovered from them")
				}
				var whole bool
				for _, n := range e.nodes("box") {
					whole = whole || n.Name == "n2"
				}
				t.Logf("error %v, node %v", err, whole)
				if whole {
					e.restore("box", "n2")
					e.verify("box", 2)
				}
				e.restore("box", "n1")
				e.verify("box", 1)
				e.step("box", 2)
				e.checkpoint("box", "n3")
				e.restore("box", "n3")
				e.verify("box", 2)
			})
		}
	}
}

// recovers starts a container again from what a dead shim has left, and says
// whether there was anything; if not, the tool must say so.
func (e *env) recovers(container string) bool {
	e.Helper()
	_, err := e.ns.Statefork(e.ctx, "recover", container)
	if err == nil {
		return true
	}
	if !strings.Contains(err.Error(), "not interrupted") {
		e.Errorf("recover: %v", err)
	}
	return false
}

func (e *env) killShim(id string) {
	e.Helper()
	pid, err := e.ns.ShimOf(id)
	if err != nil {
		e.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		e.Fatal(err)
	}
}

// noTask waits until nothing of a task is left: no shim, no process in its
// cgroups, no bundle.
func (e *env) noTask(id string) {
	e.Helper()
	e.eventually(func() error {
		bundle := filepath.Join(e.ns.State(), "io.containerd.runtime.v2.task", e.ns.NS, id)
		if exists(bundle) {
			return fmt.Errorf("bundle %s is still there", bundle)
		}
		if pids := e.pids(id); len(pids) > 0 {
			return fmt.Errorf("processes %v are still there", pids)
		}
		return e.noShim(id)
	})
}

// pids are the processes in a container's cgroups, as the host counts them.
func (e *env) pids(id string) []string {
	e.Helper()
	var pids []string
	for _, pattern := range []string{"/sys/fs/cgroup/*/%s/%s/cgroup.procs", "/sys/fs/cgroup/%s/%s/cgroup.procs"} {
		files, err := filepath.Glob(fmt.Sprintf(pattern, e.ns.NS, id))
		if err != nil {
			e.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) {
				e.Fatal(err)
			}
			pids = append(pids, strings.Fields(string(b))...)
		}
	}
	return pids
}
