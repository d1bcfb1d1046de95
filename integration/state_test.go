package integration_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork"
)

// TestTmpfs: what lies in a tmpfs is memory, and so is part of a node.
func TestTmpfs(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box", "--tmpfs", "/scratch:size=16m")
	write := func(v string) {
		e.sh("box", fmt.Sprintf(`for d in /dev/shm /scratch; do mkdir -p $d/d; echo %[1]s >$d/f; echo %[1]s >$d/d/%[1]s; ln -sf %[1]s $d/link; done`, v))
	}
	read := func(ref string) string {
		return e.sh(ref, `for d in /dev/shm /scratch; do cat $d/f; ls $d/d; readlink $d/link; done; df -k /scratch | tail -n1 | sed 's/ .*16384.*/16 MiB/'`)
	}
	one := "one\none\none\none\none\none\n"
	both := "two\none\ntwo\ntwo\ntwo\none\ntwo\ntwo\n"
	write("one")
	size := strings.TrimPrefix(read("box"), one)
	e.checkpoint("box", "one")
	write("two")
	e.checkpoint("box", "two")
	e.equal("tmpfs after going on in place", read("box"), both+size)
	e.restore("box", "one")
	e.equal("tmpfs at the first node", read("box"), one+size)
	e.restore("box", "two")
	e.equal("tmpfs at the second node", read("box"), both+size)
	fork := e.fork("box@one")[0].ID
	e.equal("tmpfs of a fork", read(fork), one+size)
	e.sh(fork, "echo three >/dev/shm/f")
	e.equal("tmpfs of the source", read("box"), both+size)
}

// TestVolumes: a bind and a volume are not the container's own. They are not
// rolled back, and every result says so.
func TestVolumes(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	host := t.TempDir()
	e.nerdctl("volume", "create", "kept")
	t.Cleanup(func() { e.must(e.ns.Nerdctl(e.cleanupContext(), "volume", "rm", "kept")) })
	e.runKeeper("box", "-v", host+":/host", "-v", "kept:/volume")
	write := func(v string) { e.sh("box", fmt.Sprintf("for d in /host /volume /; do echo %s >$d/f; done", v)) }
	write("one")
	res := e.checkpoint("box", "one")
	e.listed(res.External, "/host", "/volume")
	write("two")
	res = e.restore("box", "one")
	e.listed(res.External, "/host", "/volume")
	e.equal("files", e.sh("box", "cat /host/f /volume/f /f"), "two\ntwo\none")
	if b, err := os.ReadFile(filepath.Join(host, "f")); err != nil || string(b) != "two\n" {
		t.Errorf("the file on the host holds %q, %v", b, err)
	}
}

func (e *env) listed(list []statefork.External, want ...string) {
	e.Helper()
	for _, w := range want {
		if !slices.ContainsFunc(list, func(x statefork.External) bool { return x.Name == w }) {
			e.Errorf("%s is not listed as external, only %v", w, list)
		}
	}
}

// counter prints numbers without an end.
const counter = `i=0; while :; do echo $i; i=$((i+1)); usleep 5000; done`

// TestB07Logs checkpoints a container that never stops to print. Its log must
// have every number once, because it goes on in place each time; and after
// a restore it goes on from the node's number.
func TestB07Logs(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.run("box", testbed.Busybox, "sh", "-c", counter)
	const nodes = 8
	for i := range nodes {
		e.moreLines("box")
		e.checkpoint("box", fmt.Sprintf("n%d", i))
	}
	e.moreLines("box")
	e.restore("box", "n4")
	e.moreLines("box")
	e.nerdctl("kill", "box")
	e.nerdctl("wait", "box")
	lines := strings.Split(e.nerdctl("logs", "box"), "\n")
	next, jumps := 0, 0
	for i, line := range lines {
		n, err := strconv.Atoi(line)
		if err != nil {
			t.Fatalf("line %d of %d is %q", i, len(lines), line)
		}
		if n != next && jumps == 0 && n < next {
			next, jumps = n, 1
		}
		if n != next {
			t.Fatalf("line %d of %d is %q, want %d", i, len(lines), line, next)
		}
		next++
	}
	if jumps != 1 {
		t.Error("the log does not show that the container was restored")
	}
	t.Logf("%d lines", len(lines))
}

// moreLines waits until a container has printed more.
func (e *env) moreLines(container string) {
	e.Helper()
	last := func() string { return e.nerdctl("logs", "-n", "1", container) }
	before := last()
	e.eventually(func() error {
		if now := last(); now == before {
			return fmt.Errorf("%s has printed nothing more since %q", container, before)
		}
		return nil
	})
}

// echoServer serves on the loopback interface, and holds one connection to
// itself open: what is written to /in comes back in /out.
const echoServer = `mkfifo /in
nc -ll -p 7000 -e cat &
until nc 127.0.0.1 7000 <>/in >>/out; do :; done &
` + keeper

// TestSockets keeps a listening server and an established connection over
// checkpoints, restores and into forks.
func TestSockets(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.run("box", testbed.Busybox, "sh", "-c", echoServer)
	e.waitLog("box", "ready")
	say := func(ref, text, want string) {
		e.Helper()
		e.sh(ref, "echo "+text+" >/in")
		e.eventually(func() error {
			if out := e.sh(ref, "cat /out"); out != want {
				return fmt.Errorf("%s has received %q, want %q", ref, out, want)
			}
			return nil
		})
		// a new connection to the same server
		e.equal("echo", e.sh(ref, "echo hi | nc 127.0.0.1 7000"), "hi")
	}
	say("box", "a", "a")
	e.checkpoint("box", "a")
	say("box", "b", "a\nb")
	e.checkpoint("box", "b")
	say("box", "c", "a\nb\nc")
	e.restore("box", "a")
	say("box", "d", "a\nd")
	fork := e.fork("box@b")[0].ID
	say(fork, "e", "a\nb\ne")
	say("box", "f", "a\nd\nf")
}

// TestStoppedContainer starts a stopped container at a node: same container, a
// new task.
func TestStoppedContainer(t *testing.T) {
	for _, sn := range []string{testbed.Snapshotter, testbed.Stock} {
		t.Run(sn, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.snapshotter = sn
			id := e.runKeeper("box")
			e.step("box", 1)
			e.checkpoint("box", "n1")
			e.step("box", 2)
			e.checkpoint("box", "n2")
			e.nerdctl("stop", "box")
			res := e.restore("box", "n1")
			if res.Container != id || !res.Started {
				t.Errorf("restore = %+v, want a new task of container %s", res, id)
			}
			e.verify("box", 1)
			e.equal("status", e.nerdctl("inspect", "-f", "{{.State.Status}}", "box"), "running")
			e.checkpoint("box", "n3")
			e.restore("box", "n2")
			e.verify("box", 2)
			e.nerdctl("stop", "box")
			e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
		})
	}
}

// TestNerdctlCommit makes an image of a container after two checkpoints. It must
// hold what lies in the sealed layers, and not what was deleted.
func TestNerdctlCommit(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.runKeeper("box")
	e.sh("box", "echo 1 >/one; mkdir /dir; echo 1 >/dir/kept; echo 1 >/dir/dropped; rm /etc/base")
	e.checkpoint("box", "n1")
	e.sh("box", "echo 2 >/two; rm /dir/dropped; echo 22 >/one")
	e.checkpoint("box", "n2")
	e.sh("box", "echo 3 >/three; mv /two /2")
	const image = "localhost/committed:latest"
	e.nerdctl("--snapshotter", testbed.Snapshotter, "commit", "box", image)
	e.equal("paused", e.nerdctl("inspect", "-f", "{{.State.Status}}", "box"), "running")
	got := e.nerdctl("--snapshotter", testbed.Snapshotter, "run", "--rm", "--net", "none", "--pull", "never", image,
		"sh", "-c", "cd /; for f in one two 2 three dir/kept dir/dropped etc/base; do echo $f $(cat $f 2>/dev/null); done")
	e.equal("image", got, "one 22\ntwo\n2 2\nthree 3\ndir/kept 1\ndir/dropped\netc/base")
	diff := e.nerdctl("--snapshotter", testbed.Snapshotter, "diff", "box")
	for _, want := range []string{"A /one", "A /three", "A /2", "D /etc/base"} {
		if !regexp.MustCompile("(?m)^" + want + "$").MatchString(diff) {
			t.Errorf("diff has no %q:\n%s", want, diff)
		}
	}
	// It is still the node that it was.
	e.restore("box", "n1")
	e.equal("files", e.sh("box", "cat /one; ls /dir; ls /2 /two /three /etc/base 2>/dev/null || true"), "1\ndropped\nkept")
}
