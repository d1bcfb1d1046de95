package integration_test

import (
	"context"
	"fmt"
	"testing"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"
)

// TestDevicesStayDenied tries a device of the host's and an allowed one.
func TestDevicesStayDenied(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box")
	// With an own node the container's rules are all that is in the way.
	e.sh("box", "mknod /kmsg c 1 11; mknod /zero c 1 5")
	look := func(name string) {
		t.Helper()
		e.equal("devices of "+name, e.sh(name, "head -c 1 /zero | wc -c; head -c 1 /kmsg 2>&1; true"), "1\nhead: /kmsg: Operation not permitted")
	}
	look("box")
	e.checkpoint("box", "n1")
	look("box")
	e.restore("box", "n1")
	look("box")
	look(e.fork("box@n1")[0].ID)
}

// TestOOM has the kernel kill a process for lack of memory: in a new container,
// after a checkpoint, after a restore, and in a fork. containerd is told each
// time, and the container goes on.
func TestOOM(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	stream, errs := e.ns.Client().EventService().Subscribe(ctx, fmt.Sprintf(`namespace==%q,topic=="/tasks/oom"`, e.ns.NS))
	id := e.runKeeper("box", "--memory", "32m", "--memory-swap", "32m")
	hog := func(id, when string) {
		t.Helper()
		out, err := e.ns.ExecIn(e.ctx, id, "dd", "if=/dev/zero", "of=/dev/null", "bs=100M", "count=1")
		if err == nil || out.Code != 137 {
			t.Errorf("hog %s: exit code %d, %v", when, out.Code, err)
		}
		wait, done := context.WithTimeout(e.ctx, waitTimeout)
		defer done()
		select {
		case env := <-stream:
			v, err := typeurl.UnmarshalAny(env.Event)
			if oom, ok := v.(*eventsapi.TaskOOM); err != nil || !ok || oom.ContainerID != id {
				t.Errorf("event %s is %v (%v), want one of %s", when, v, err, id)
			}
		case err := <-errs:
			t.Fatal(err)
		case <-wait.Done():
			t.Fatalf("no event %s", when)
		}
		e.equal("number "+when, e.ask(id, "add 0"), "5")
	}
	e.ask("box", "set 5")
	hog(id, "at first")
	e.checkpoint("box", "n1")
	hog(id, "after a checkpoint")
	e.restore("box", "n1")
	hog(id, "after a restore")
	hog(e.fork("box@n1")[0].ID, "in a fork")
}

// TestPausedContainer checkpoints and restores a container that is paused: it
// stays so, and goes on when it is told to.
func TestPausedContainer(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box")
	e.ask("box", "set 3")
	paused := func(when string) {
		t.Helper()
		e.equal("status "+when, e.nerdctl("inspect", "-f", "{{.State.Status}}", "box"), "paused")
	}
	e.nerdctl("pause", "box")
	e.checkpoint("box", "n1")
	paused("after a checkpoint")
	e.restore("box", "n1")
	paused("after a restore")
	e.nerdctl("unpause", "box")
	e.equal("number", e.ask("box", "add 1"), "4")
	// A fork is a new task: it runs.
	fork := e.fork("box@n1")[0].ID
	e.equal("number of the fork", e.ask(fork, "add 2"), "5")
}
