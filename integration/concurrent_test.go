package integration_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
)

// TestTwoAtOnce checkpoints and restores two containers at the same time, again
// and again.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	names := []string{"one", "two"}
	ids := map[string]string{}
	for _, name := range names {
		ids[name] = e.runKeeper(name)
	}
	for i := 1; i <= 5; i++ {
		var ops []*operation
		for _, name := range names {
			e.step(name, i)
		}
		for _, name := range names {
			ops = append(ops, e.beginCheckpoint(ids[name], fmt.Sprintf("n%d", i)))
		}
		for _, op := range ops {
			if err := op.wait(); err != nil {
				t.Fatal(err)
			}
		}
	}
	var ops []*operation
	for _, name := range names {
		e.sh(name, "rm -r /data")
		for _, n := range e.nodes(name) {
			if n.Name == "n3" {
				ops = append(ops, e.beginRestore(ids[name], n.ID))
			}
		}
	}
	for _, op := range ops {
		if err := op.wait(); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		e.verify(name, 3)
	}
}

// TestSameContainerAtOnce asks for several checkpoints and restores of one
// container together. They queue.
func TestSameContainerAtOnce(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.runKeeper("box")
	e.step("box", 1)
	first := e.checkpoint("box", "first").Node.ID
	var ops []*operation
	for i := range 3 {
		ops = append(ops, e.beginCheckpoint(id, fmt.Sprintf("n%d", i)), e.beginRestore(id, first))
	}
	for _, op := range ops {
		if err := op.wait(); err != nil {
			t.Error(err)
		}
	}
	if n := len(e.nodes("box")); n != 4 {
		t.Errorf("the tree has %d nodes, want 4", n)
	}
	e.verify("box", 1)
}

// outsideExec is what a checkpoint says when a command was just running that
// came from outside: it was the first.
const outsideExec = "put into the container from outside"

// TestExecDuringCheckpoint runs commands all the time while the container is
// checkpointed. A command must work whenever it comes.
func TestExecDuringCheckpoint(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.runKeeper("box")
	made := 0
	for i := 1; i <= 8; i++ {
		op := e.beginCheckpoint(id, "")
		op.reach(phases[i%len(phases)])
		e.equal("exec", e.sh("box", "echo $((6 * 7))"), "42")
		err := op.wait()
		switch {
		case err == nil:
			made++
		case !strings.Contains(err.Error(), outsideExec):
			t.Fatal(err)
		}
		e.equal("number", e.ask("box", "add 1"), strconv.Itoa(i))
	}
	if made == 0 {
		t.Error("no checkpoint has succeeded")
	}
	t.Logf("%d of 8 checkpoints were the first", made)
}

// TestPauseDuringCheckpoint pauses while a checkpoint is under way, which has
// its effect afterwards; and a paused container can be checkpointed and stays
// paused.
func TestPauseDuringCheckpoint(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.runKeeper("box")
	status := func() string { return e.nerdctl("inspect", "-f", "{{.State.Status}}", "box") }
	e.step("box", 1)
	for _, phase := range phases {
		op := e.beginCheckpoint(id, phase)
		op.reach(phase)
		e.nerdctl("pause", "box")
		if err := op.wait(); err != nil {
			t.Fatal(err)
		}
		e.equal("status", status(), "paused")
		e.nerdctl("unpause", "box")
		e.verify("box", 1)
	}
	e.nerdctl("pause", "box")
	e.checkpoint("box", "paused")
	e.equal("status", status(), "paused")
	e.nerdctl("unpause", "box")
	e.verify("box", 1)
	e.restore("box", "paused")
	e.verify("box", 1)
}

// TestKillDuringCheckpoint sends the signal that ends the container while a
// checkpoint is under way. It must end once, with its own code.
func TestKillDuringCheckpoint(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	for _, phase := range phases {
		events := e.watchExits()
		id := e.runKeeper("box")
		op := e.beginCheckpoint(id, phase)
		op.reach(phase)
		e.nerdctl("kill", "-s", "TERM", "box")
		err := op.wait()
		t.Logf("in phase %s: %v", phase, err)
		e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
		e.nerdctl("rm", "box")
		e.eventually(func() error { return e.noShim(id) })
		events.expect(fmt.Sprintf("%s exited with %d", id, keeperCode))
	}
}

// brief ends by itself after some work, with a code of its own.
const brief = `i=0; while [ $i -lt %d ]; do i=$((i+1)); done; exit 9`

// TestExitDuringCheckpoint lets init end by itself while checkpoints and
// restores go on. Its code must be reported, and once.
func TestExitDuringCheckpoint(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	for _, loops := range []int{50_000, 200_000, 400_000, 800_000} {
		events := e.watchExits()
		id := e.run("box", testbed.Busybox, "sh", "-c", fmt.Sprintf(brief, loops))
		made := 0
		for {
			if e.noShim(id) == nil || e.nerdctl("inspect", "-f", "{{.State.Status}}", "box") == "exited" {
				break
			}
			if _, err := e.ns.Statefork(e.ctx, "checkpoint", "box"); err == nil {
				made++
			}
		}
		events.wait(id)
		e.equal("exit code", e.nerdctl("wait", "box"), "9")
		e.nerdctl("rm", "box")
		e.eventually(func() error { return e.noShim(id) })
		events.expect(id + " exited with 9")
		t.Logf("%d loops: %d checkpoints", loops, made)
	}
}

// TestTerminatedForks starts forks and ends them while others start.
func TestTerminatedForks(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box")
	e.step("box", 1)
	e.checkpoint("box", "n1")
	for range 2 {
		for _, s := range e.fork("box@n1", "-n", "3") {
			e.verify(s.ID, 1)
			if err := syscall.Kill(int(s.PID), syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Fatal(err)
			}
			e.equal("exit code", e.nerdctl("wait", s.ID), "137")
			e.nerdctl("rm", s.ID)
		}
	}
	e.verify("box", 1)
}
