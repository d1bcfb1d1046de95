package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"

	"github.com/statefork/statefork/integration/testbed"
)

// ringProgram holds an io_uring, which CRIU cannot dump. It is linked
// statically, to run in any image.
const ringProgram = `
#include <linux/io_uring.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
	struct io_uring_params p = {0};
	if (syscall(SYS_io_uring_setup, 4, &p) < 0) { perror("io_uring_setup"); return 1; }
	puts("ring");
	fflush(stdout);
	for (;;) pause();
}`

// TestRefused asks for checkpoints that cannot work. Each must be a no-op: the
// container runs on, and nothing is there that was not there before.
func TestRefused(t *testing.T) {
	tests := []struct {
		name string
		args func(t *testing.T) []string // to nerdctl run
		// before makes the container refuse, and undoes that again.
		before func(e *env) (undo func())
		// culprit is the command name that the error must tell.
		culprit string
	}{
		{
			name: "user namespace",
			args: func(*testing.T) []string { return []string{"--security-opt", "seccomp=unconfined"} },
			before: func(e *env) func() {
				e.sh("box", "unshare -U sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >/pid")
				return func() { e.sh("box", `kill $(cat /pid)`) }
			},
			culprit: "sleep",
		},
		{
			name:    "exec",
			before:  func(e *env) func() { return e.startExec("sleep", "1000") },
			culprit: "sleep",
		},
		{
			name: "io_uring",
			args: func(t *testing.T) []string {
				return []string{"--security-opt", "seccomp=unconfined", "-v", compile(t, ringProgram) + ":/ring:ro"}
			},
			before: func(e *env) func() {
				e.sh("box", "/ring >/ring.out 2>&1 & echo $! >/pid; until grep . /ring.out; do :; done")
				e.equal("ring", e.sh("box", "cat /ring.out"), "ring")
				return func() { e.sh("box", "kill $(cat /pid)") }
			},
			culprit: "ring",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			var args []string
			if tt.args != nil {
				args = tt.args(t)
			}
			id := e.runKeeper("box", args...)
			e.step("box", 1)
			e.checkpoint("box", "n1")
			e.step("box", 2)
			undo := tt.before(e)
			before := e.inventory("box")
			for range 3 {
				msg := e.refused(4, "checkpoint", "box", "--name", "never")
				e.namesCulprit(msg, tt.culprit, id)
				e.equal("what is there", e.inventory("box"), before)
				e.verify("box", 2)
			}
			undo()
			e.checkpoint("box", "n2")
			e.restore("box", "n1")
			e.verify("box", 1)
		})
	}
}

var pidRE = regexp.MustCompile(`pid (\d+)`)

// namesCulprit wants the message to tell a pid, and that to be one of the
// container's processes with the given name.
func (e *env) namesCulprit(msg, name, id string) {
	e.Helper()
	m := pidRE.FindStringSubmatch(msg)
	if m == nil {
		e.Errorf("no pid in the message %q", msg)
		return
	}
	comm, err := os.ReadFile("/proc/" + m[1] + "/comm")
	if err != nil || strings.TrimSpace(string(comm)) != name || !slices.Contains(e.pids(id), m[1]) {
		e.Errorf("%q names process %s (%q, %v), want %q in container %s", msg, m[1], comm, err, name, id)
	}
}

// inventory is everything that a failed operation could change.
func (e *env) inventory(container string) string {
	e.Helper()
	w := e.writable(container)
	script := `find "$1" "$2" | sort; grep -F "/$3/" /proc/self/mountinfo
		cat /sys/fs/cgroup/freezer/$3/*/freezer.state /sys/fs/cgroup/$3/*/cgroup.freeze 2>/dev/null
		iptables-save | sed '/^#/d; s/ \[[0-9:]*]//'`
	out := e.must(e.ns.Exec(e.ctx, "bash", "-c", script, "-", filepath.Dir(w.Workdir), w.Upperdir, e.ns.NS))
	var nodes []string
	for _, n := range e.nodes(container) {
		nodes = append(nodes, n.ID)
	}
	snapshots := e.ctr("snapshots", "--snapshotter", e.snapshotter, "ls")
	return strings.Join(append([]string{out, snapshots}, nodes...), "\n")
}

// startExec runs a command in the container from outside, until it is undone.
func (e *env) startExec(args ...string) (undo func()) {
	e.Helper()
	p, err := e.ns.StartIn(e.ctx, "box", cio.WithStreams(nil, nil, nil), args...)
	if err != nil {
		e.Fatal(err)
	}
	if err := p.Start(e.ctx); err != nil {
		e.Fatal(err)
	}
	return func() {
		if _, err := p.Delete(e.ctx, containerd.WithProcessKill); err != nil {
			e.Fatal(err)
		}
	}
}

// compile builds a C program and returns its path.
func compile(t *testing.T, source string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		skip(t, "needs gcc")
	}
	dir := t.TempDir()
	out := filepath.Join(dir, "ring")
	cmd := exec.Command("gcc", "-static", "-x", "c", "-o", out, "-")
	cmd.Stdin = strings.NewReader(source)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	return out
}

// TestRefusedNames: what is wrong with the call and not with the container.
func TestRefusedNames(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box")
	e.checkpoint("box", "n1")
	e.nerdctl("run", "-d", "--net", "none", "--pull", "never", "--name", "plain", testbed.Busybox, "sleep", "1000")
	e.removeAfter("plain")
	tests := []struct {
		code int
		want string
		args []string
	}{
		{4, "n1", []string{"checkpoint", "box", "--name", "n1"}},
		{2, "/", []string{"checkpoint", "box", "--name", "a/b"}},
		{3, "nobody", []string{"checkpoint", "nobody"}},
		{3, "n2", []string{"restore", "box", "n2"}},
		{3, "n2", []string{"fork", "box@n2"}},
		{3, "n2", []string{"rm", "box@n2"}},
		{4, "io.containerd.runc.v2", []string{"checkpoint", "plain"}},
	}
	for _, tt := range tests {
		msg := e.refused(tt.code, tt.args...)
		if !strings.Contains(msg, tt.want) || strings.Count(msg, "\n") != 1 {
			t.Errorf("%v: %q, want one line with %q", tt.args, msg, tt.want)
		}
	}
	if n := len(e.nodes("box")); n != 1 {
		t.Errorf("the tree has %d nodes, want 1", n)
	}
}
