package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// TestSpecHooks: each hook runs at its moment, with the container's state on its
// standard input. A restore in place runs none. A fork runs those of the host's
// side: its processes have had the others.
func TestSpecHooks(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	hook := func(name string) []specs.Hook {
		return []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c",
			fmt.Sprintf("read -r state; echo %s \"$state\" >>%s", name, log)}}}
	}
	e.specified("box",
		// The last hooks of a start run in the container.
		oci.WithMounts([]specs.Mount{{Destination: dir, Type: "bind", Source: dir, Options: []string{"rbind", "rw"}}}),
		spec(func(s *specs.Spec) {
			s.Hooks = &specs.Hooks{
				//lint:ignore SA1019 nerdctl and others still have them
				Prestart:      hook("prestart"),
				CreateRuntime: hook("createRuntime"), CreateContainer: hook("createContainer"),
				StartContainer: hook("startContainer"), Poststart: hook("poststart"), Poststop: hook("poststop"),
			}
		}))
	// ran empties the log and returns the hooks in it, with the state's status.
	ran := func(id string) string {
		t.Helper()
		b, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(log, 0); err != nil {
			t.Fatal(err)
		}
		var out []string
		for line := range strings.Lines(string(b)) {
			name, text, _ := strings.Cut(line, " ")
			var state specs.State
			if err := json.Unmarshal([]byte(text), &state); err != nil {
				t.Fatalf("hook %s was told %q: %v", name, text, err)
			}
			if state.ID != id || filepath.Base(state.Bundle) != id || (state.Pid == 0) != (name == "poststop") {
				t.Errorf("hook %s was told %+v, want container %s", name, state, id)
			}
			out = append(out, name+"="+string(state.Status))
		}
		return strings.Join(out, " ")
	}
	// libcontainer runs the poststart hooks beside the startContainer ones, and does
	// not call the container running before those have ended.
	start := strings.Replace(ran("box"), "poststart=created", "poststart=running", 1)
	const outside, a, b = "prestart=creating createRuntime=creating createContainer=creating", "startContainer=created", "poststart=running"
	if start != outside+" "+a+" "+b && start != outside+" "+b+" "+a {
		t.Errorf("hooks of a start are %q", start)
	}
	e.checkpoint("box", "n1")
	e.restore("box", "n1")
	e.equal("hooks of a checkpoint and a restore", ran("box"), "")
	fork := e.bareFork("box@n1")
	e.equal("hooks of a fork", ran(fork), "prestart=creating createRuntime=creating poststart=running")
	e.equal("the fork", e.try(fork, "true"), "yes")
	e.end(fork)
	e.equal("hooks of the fork's end", ran(fork), "poststop=stopped")
}

// end kills a container's task and deletes it.
func (e *env) end(container string) {
	e.Helper()
	c, err := e.ns.Find(e.ctx, container)
	if err != nil {
		e.Fatal(err)
	}
	task, err := c.Task(e.ctx, nil)
	if err != nil {
		e.Fatal(err)
	}
	exited, err := task.Wait(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	if err := task.Kill(e.ctx, syscall.SIGKILL); err != nil {
		e.Fatal(err)
	}
	<-exited
	if _, err := task.Delete(e.ctx); err != nil {
		e.Fatal(err)
	}
}

// TestSpecPoststopFails: the end of a container goes on if its last hook fails.
// That nothing is left is looked at after the test.
func TestSpecPoststopFails(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.specified("box", spec(func(s *specs.Spec) {
		s.Hooks = &specs.Hooks{Poststop: []specs.Hook{{Path: "/bin/false"}}}
	}))
	e.end("box")
	c, err := e.ns.Find(e.ctx, "box")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Task(e.ctx, nil); !errdefs.IsNotFound(err) {
		t.Errorf("the task is there after it was deleted: %v", err)
	}
}
