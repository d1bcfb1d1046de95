package integration_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/integration/testbed"
)

// TestB01SecondTerminal has a second interpreter beside the first terminal. One
// that was exec'd would be lost, and is named before anything is touched; one in
// a session goes on, and can be typed to again.
func TestB01SecondTerminal(t *testing.T) {
	t.Parallel()
	// By itself: with each container that comes or goes in a namespace nerdctl
	// writes the /etc/hosts of all others again.
	e := setup(t, common(t))
	if err := e.ns.ImportDebian(e.ctx); err != nil {
		t.Fatal(err)
	}
	const name = "box"
	id := e.run(name, "-t", testbed.Debian, "bash")
	undo := e.startExecIn(name, "python3", "-c", "import time; time.sleep(1000)")
	before := e.inventoryOf(name)
	for range 2 {
		msg := e.refused(4, "checkpoint", name, "--name", "never")
		e.namesCulprit(msg, "python3", id)
		e.equal("what is there", e.inventoryOf(name), before)
	}
	undo()
	s := e.sessions(id).in("py")
	s.open("bash")
	s.until(s.start("python3 -q -i"), ">>> ")
	s.typeAt(">>> ", "x = 41")
	e.checkpoint(name, "n")
	s.typeAt(">>> ", "x = 42")
	e.restore(name, "n")
	if out := s.typeAt(">>> ", "print('x is', x)"); !strings.Contains(out, "x is 41") {
		t.Errorf("python shows %q", out)
	}
}

// TestManySessions takes several sessions of one container through a restore and
// into a fork.
func TestManySessions(t *testing.T) {
	e := withDebian(t)
	id := e.run(e.name(), testbed.Debian, "sleep", "100000")
	const n = 5
	for i := range n {
		s := e.sessions(id).in(fmt.Sprintf("s%d", i))
		s.open([]string{"bash", "dash"}[i%2])
		s.want(fmt.Sprintf("x=%d; cd /tmp", i), 0, "")
	}
	e.checkpoint(id, "n")
	e.restore(id, "n")
	for _, f := range append(e.fork(id+"@n"), forkOf(id)) {
		for i := range n {
			e.sessions(f.ID).in(fmt.Sprintf("s%d", i)).want("echo $x; pwd; test -t 0", 0, fmt.Sprintf("%d\n/tmp\n", i))
		}
	}
}

// inventoryOf is what a failed checkpoint could leave of one container: every
// file of its root, with size and time.
func (e *env) inventoryOf(container string) string {
	e.Helper()
	w := e.writable(container)
	return fmt.Sprint(w.Upperdir, len(e.nodes(container)), e.sh(container, "cat /proc/1/stat | cut -d' ' -f1-4; find / -xdev -printf '%p %s %T@\\n' | sort"))
}

// startExecIn is startExec in any container.
func (e *env) startExecIn(container string, args ...string) (undo func()) {
	e.Helper()
	p, err := e.ns.StartIn(e.ctx, container, cio.WithStreams(nil, nil, nil), args...)
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

// TestB04ZombieExecs checkpoints while processes that were exec'd end all the
// time. Each checkpoint ends soon, well or with a typed error.
func TestB04ZombieExecs(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	var execs sync.WaitGroup
	execs.Go(func() {
		for range 20 {
			if out, err := e.ns.ExecIn(e.ctx, id, "sh", "-c", "sleep 0.05"); err != nil {
				t.Errorf("exec: %v, %v", out, err)
				return
			}
		}
	})
	c := e.sessions(id).c
	made := 0
	for range 10 {
		begun := time.Now()
		_, err := c.Checkpoint(e.ctx, "", nil)
		if err == nil {
			made++
		} else if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "end it first") {
			t.Errorf("checkpoint: %v", err)
		}
		if d := time.Since(begun); d > 5*time.Second {
			t.Errorf("a checkpoint took %v", d)
		}
	}
	execs.Wait()
	t.Logf("%d of 10 checkpoints came between", made)
	e.checkpoint("box", "last")
	if n := len(e.nodes("box")); n != made+1 {
		t.Errorf("the tree has %d nodes, want %d", n, made+1)
	}
}

// TestB09TimeNamespace restores, starts more processes, and checkpoints again:
// all of them have the same namespaces and see the same clock.
func TestB09TimeNamespace(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	s.cycle("n1")
	const ns = "for i in 1/ns/time self/ns/time 1/ns/pid self/ns/pid; do readlink /proc/$i; done"
	same := func(what, out string) {
		t.Helper()
		f := strings.Fields(out)
		if len(f) != 4 || f[0] != f[1] || f[2] != f[3] {
			t.Errorf("namespaces of init and of %s: %q", what, out)
		}
	}
	for _, node := range []string{"n2", "n3", "n4"} {
		same("an exec", e.sh(id, ns))
		same("a session", s.sh(ns).out)
		s.sh("sleep 1000 &")
		s.cycle(node)
	}
	up := func(out string) (seconds float64) {
		t.Helper()
		if _, err := fmt.Sscan(out, &seconds); err != nil {
			t.Fatal(err)
		}
		return seconds
	}
	first, second := up(e.sh(id, "cat /proc/uptime")), up(s.sh("cat /proc/uptime").out)
	if second < first || second > first+5 {
		t.Errorf("uptime is %v, and then %v in a session", first, second)
	}
}

// TestB10ClientGone kills the client of a restore as soon as it has answered,
// and before: the container does not belong to it.
func TestB10ClientGone(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sh", "-c", counter)
	e.moreLines("box")
	node := e.checkpoint("box", "n").Node.ID
	for _, early := range []bool{false, true, false} {
		var out bytes.Buffer
		cmd := e.ns.Command(e.ctx, "statefork", "--address", e.ns.Address(), "--namespace", e.ns.NS, "--state", e.ns.State(), "restore", id, node)
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stdout = w
		if err := errors.Join(cmd.Start(), w.Close()); err != nil {
			t.Fatal(err)
		}
		if early {
			(&operation{e: e, id: id}).reach("restore")
		} else if _, err := out.ReadFrom(r); err != nil {
			t.Error(err)
		}
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		r.Close()
		for range 3 {
			e.moreLines("box")
		}
		if _, err := e.ns.ShimOf(id); err != nil {
			t.Error(err)
		}
	}
}

var logRE = regexp.MustCompile(`log: (/[^\s:;]+)`)

// TestB12RestoreLog breaks a restore again and again. Each error tells a short
// cause and a log, which can be read afterwards and has the rest, and of which
// there is one. The container has ended then, and its other nodes are whole.
func TestB12RestoreLog(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.runKeeper("box")
	e.step("box", 1)
	e.checkpoint("box", "n1")
	e.step("box", 2)
	e.checkpoint("box", "n2")
	list, err := e.sessions(id).c.List(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	var images string
	for _, n := range list.Nodes {
		if n.Name == "n1" {
			images = n.Images
		}
	}
	cores, err := filepath.Glob(filepath.Join(images, "core-*.img"))
	if err != nil || len(cores) == 0 {
		t.Fatalf("process images in %q: %v, %v", images, cores, err)
	}
	// What is seen to be missing is told with nothing touched.
	for range 10 {
		if err := os.Rename(cores[0], cores[0]+".away"); err != nil {
			t.Fatal(err)
		}
		if msg := e.refused(1, "restore", "box", "n1"); !strings.Contains(msg, filepath.Base(cores[0])) || strings.Count(msg, "\n") != 1 {
			t.Errorf("the error %q does not name the missing file", msg)
		}
		e.verify("box", 2)
		if err := os.Rename(cores[0]+".away", cores[0]); err != nil {
			t.Fatal(err)
		}
	}
	// What only CRIU finds out has a log.
	files := filepath.Join(images, "files.img")
	whole, err := os.ReadFile(files)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := os.WriteFile(files, []byte("no image"), 0o600); err != nil {
			t.Fatal(err)
		}
		msg := e.refused(4, "restore", "box", "n1")
		m := logRE.FindStringSubmatch(msg)
		if m == nil || len(msg) > 1000 || strings.Count(msg, "\n") != 1 {
			t.Fatalf("the error %q tells no short cause with a log", msg)
		}
		if b, err := os.ReadFile(m[1]); err != nil || len(b) > 1<<20 || len(b) == 0 {
			t.Errorf("log %s has %q, %v", m[1], b, err)
		}
		if err := os.WriteFile(files, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		e.restore("box", "n2")
		e.verify("box", 2)
	}
	logs, err := filepath.Glob(filepath.Join(images, "*.log*"))
	if err != nil || len(logs) > 2 {
		t.Errorf("logs %v, %v", logs, err)
	}
	e.restore("box", "n1")
	e.verify("box", 1)
}
