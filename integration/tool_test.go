package integration_test

import (
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
)

// TestToolOutput reads what the tool prints for people: ls, tree, inspect and
// the doctor, on containers that are there.
func TestToolOutput(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.runKeeper("box")
	n1 := e.checkpoint("box", "n1", "--label", "why=because").Node
	n2 := e.checkpoint("box", "n2").Node
	e.restore("box", "n1")
	n3 := e.checkpoint("box", "n3").Node
	fork := e.fork("box@n2", "--name", "twin")[0]

	print := func(args ...string) string {
		t.Helper()
		return e.must(e.ns.Statefork(e.ctx, args...))
	}
	has := func(what, text string, wants ...string) {
		t.Helper()
		for _, w := range wants {
			if !strings.Contains(text, w) {
				t.Errorf("%s has no %q:\n%s", what, w, text)
			}
		}
	}
	has("ls", print("ls"), id[:12], "box", "running", "twin", fork.ID[:12], n3.ID)
	tree := print("tree", "box")
	has("tree", tree, n1.ID, n2.ID, n3.ID, "twin")
	for _, line := range strings.Split(tree, "\n") {
		if isHead := strings.Contains(line, "head"); isHead != strings.Contains(line, n3.ID) {
			t.Errorf("the head is not n3:\n%s", tree)
		}
	}
	has("inspect", print("inspect", "box@n1"), n1.ID, "why", "because", n2.ID, n3.ID)
	has("inspect", print("inspect", "box"), id, testbed.Snapshotter)
	if n2.Parent != n1.ID || n3.Parent != n1.ID {
		t.Errorf("parents are %q and %q, want %q", n2.Parent, n3.Parent, n1.ID)
	}
	out, err := e.ns.Statefork(e.ctx, "doctor")
	if err != nil {
		t.Errorf("the doctor finds this testbed ill: %v", err)
	}
	has("doctor", out.Stdout, "criu", "containerd", "snapshotter")
	// A name can be given up, and a prefix will do.
	e.statefork(nil, "rm", "box@"+n2.ID[:6])
	has("tree", print("tree", "box"), n1.ID, n3.ID)
	if strings.Contains(print("tree", "box"), n2.ID) {
		t.Error("the removed node is still in the tree")
	}
	e.equal("number", e.ask(fork.ID, "get"), "0")
}
