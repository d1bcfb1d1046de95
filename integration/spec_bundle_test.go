package integration_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestSpecInitPid: the bundle names init, as runc's shim has it do, also after it
// was replaced.
func TestSpecInitPid(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.specified("box")
	noted := func(id string) {
		t.Helper()
		task, err := e.ns.Task(e.ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(e.ns.State(), "io.containerd.runtime.v2.task", e.ns.NS, id, "init.pid"))
		if err != nil {
			t.Fatal(err)
		}
		e.equal("pid of "+id, string(b), fmt.Sprint(task.Pid()))
	}
	noted("box")
	e.checkpoint("box", "n1")
	e.restore("box", "n1")
	noted("box")
	noted(e.bareFork("box@n1"))
}
