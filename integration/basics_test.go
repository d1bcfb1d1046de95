package integration_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
)

// TestStockRuntime shows that the testbed itself works: what fails here fails
// without any of our parts.
func TestStockRuntime(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.nerdctl("run", "-d", "--net", "none", "--pull", "never", "--name", "plain", testbed.Busybox, "sh", "-c", keeper)
	e.removeAfter("plain")
	e.waitLog("plain", "ready")
	e.equal("number", e.ask("plain", "add 3"), "3")
	e.nerdctl("stop", "plain")
	e.equal("exit code", e.nerdctl("wait", "plain"), fmt.Sprint(keeperCode))
}

// TestNerdctl goes through what people do with any container.
func TestNerdctl(t *testing.T) {
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		t.Run(sn, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.snapshotter = sn
			memory := controller(t, "memory")
			if memory {
				e.runKeeper("box", "--memory", "64m")
			} else {
				e.runKeeper("box")
			}
			e.equal("exec", e.nerdctl("exec", "box", "sh", "-c", "echo $0 $HOSTNAME; id -u"), "sh "+e.nerdctl("exec", "box", "hostname")+"\n0")
			out, err := e.ns.Nerdctl(e.ctx, "exec", "box", "sh", "-c", "exit 42")
			if err == nil || !strings.Contains(out.Stderr, "42") {
				t.Errorf("exec that exits with 42: %v, %q", err, out.Stderr)
			}
			e.nerdctl("pause", "box")
			e.equal("status", e.nerdctl("inspect", "-f", "{{.State.Status}}", "box"), "paused")
			e.nerdctl("unpause", "box")
			e.equal("number", e.ask("box", "add 1"), "1")
			stats := e.nerdctl("stats", "--no-stream", "--format", "{{.MemUsage}}", "box")
			if memory && !strings.Contains(stats, "64MiB") {
				t.Errorf("stats show %q, want the limit of 64MiB", stats)
			}
			if top := e.nerdctl("top", "box"); !strings.Contains(top, "mkfifo") {
				t.Errorf("top does not show the init process: %q", top)
			}
			e.nerdctl("stop", "box")
			e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
			e.nerdctl("start", "box")
			e.waitLog("box", "ready\nready")
			e.nerdctl("kill", "box")
			e.equal("exit code of a killed container", e.nerdctl("wait", "box"), "137")
			e.nerdctl("rm", "box")
		})
	}
}

// TestCtr goes through containerd's own tool.
func TestCtr(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	run := []string{"run", "--runtime", testbed.Runtime, "--snapshotter", testbed.Snapshotter, "--fifo-dir", e.ns.FIFODir()}
	e.equal("output", e.ctr(append(run, "--rm", testbed.Busybox, "once", "echo", "hello")...), "hello")
	out, err := e.ns.Ctr(e.ctx, append(run, "--rm", testbed.Busybox, "fails", "sh", "-c", "exit 3")...)
	if err == nil || out.Code != 3 {
		t.Errorf("exit code %d, want 3", out.Code)
	}
	e.ctr(append(run, "-d", "--null-io", testbed.Busybox, "c", "sleep", "1000")...)
	e.equal("exec", e.ctr("tasks", "exec", "--fifo-dir", e.ns.FIFODir(), "--exec-id", "x", "c", "cat", "/etc/base"), "of the image")
	if ls := e.ctr("tasks", "ls"); !strings.Contains(ls, "RUNNING") {
		t.Errorf("tasks: %q", ls)
	}
	if ps := e.ctr("tasks", "ps", "c"); len(strings.Split(ps, "\n")) != 2 {
		t.Errorf("processes: %q", ps)
	}
	e.ctr("tasks", "metrics", "c")
	e.ctr("tasks", "kill", "--signal", "SIGKILL", "c")
	e.eventually(func() error {
		if ls := e.ctr("tasks", "ls"); !strings.Contains(ls, "STOPPED") {
			return fmt.Errorf("tasks: %q", ls)
		}
		return nil
	})
	e.ctr("tasks", "delete", "c")
	e.ctr("containers", "rm", "c")
}
