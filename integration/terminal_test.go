package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/statefork/statefork/integration/testbed"
)

// terminal is a person at a container's terminal.
type terminal struct {
	e  *env
	in io.Writer

	mu  sync.Mutex
	out bytes.Buffer // guarded by mu
	// seen is how much of out earlier commands had.
	seen int
	n    int
}

// Write takes what the container prints.
func (tt *terminal) Write(b []byte) (int, error) {
	tt.mu.Lock()
	defer tt.mu.Unlock()
	return tt.out.Write(b)
}

func (tt *terminal) keys(s string) {
	tt.e.Helper()
	if _, err := io.WriteString(tt.in, s); err != nil {
		tt.e.Fatal(err)
	}
}

// until waits until a text has been printed since the last call, and returns
// what was printed before it.
func (tt *terminal) until(text string) string {
	tt.e.Helper()
	var before string
	tt.e.eventually(func() error {
		tt.mu.Lock()
		defer tt.mu.Unlock()
		fresh := tt.out.String()[tt.seen:]
		i := strings.Index(fresh, text)
		if i < 0 {
			return fmt.Errorf("the terminal has not shown %q but %q", text, fresh)
		}
		before = fresh[:i]
		tt.seen += i + len(text)
		return nil
	})
	return before
}

// sh types a command and returns what it prints. The marks are put together by
// the shell, so that the echo of the command is not taken for them.
func (tt *terminal) sh(command string) string {
	tt.e.Helper()
	tt.n++
	tt.keys(fmt.Sprintf("echo beg''in-%d; %s; echo e''nd-%d\n", tt.n, command, tt.n))
	tt.until(fmt.Sprintf("begin-%d\r\n", tt.n))
	return strings.ReplaceAll(tt.until(fmt.Sprintf("end-%d\r\n", tt.n)), "\r\n", "\n")
}

// openTerminal starts a shell on a terminal.
func (e *env) openTerminal(id string, opts ...oci.SpecOpts) (containerd.Task, *terminal) {
	e.Helper()
	opts = append([]oci.SpecOpts{oci.WithTTY, oci.WithTTYSize(90, 30), oci.WithProcessArgs("sh")}, opts...)
	c, err := e.ns.Create(e.ctx, id, testbed.Runtime, e.snapshotter, opts...)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() {
		if err := testbed.Destroy(e.cleanupContext(), c); err != nil {
			e.Error(err)
		}
	})
	r, w := io.Pipe()
	tt := &terminal{e: e, in: w}
	task, err := c.NewTask(e.ctx, cio.NewCreator(cio.WithStreams(r, tt, nil), cio.WithTerminal, cio.WithFIFODir(e.ns.FIFODir())))
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { w.Close() })
	if err := task.Start(e.ctx); err != nil {
		e.Fatal(err)
	}
	return task, tt
}

// TestB02Terminal keeps a shell on a terminal: its variables, directory, window,
// session and job control. The client stays attached all the time.
func TestB02Terminal(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	task, tt := e.openTerminal("term")
	if err := task.Resize(e.ctx, 120, 40); err != nil {
		t.Fatal(err)
	}
	// with the session and its controlling terminal
	const who = `tty; stty size; cut -d' ' -f6,7 /proc/$$/stat; echo $PWD $x; f`
	tt.sh("x=41; cd /tmp; f() { echo function; }")
	before := tt.sh(who)
	if !strings.Contains(before, "40 120\n") || !strings.Contains(before, "/tmp 41\nfunction\n") {
		t.Fatalf("the shell says %q", before)
	}
	e.checkpoint("term", "one")
	e.equal("the shell after a checkpoint", tt.sh(who), before)
	tt.sh("x=42; cd /; echo y >/tmp/later")
	if err := task.Resize(e.ctx, 100, 20); err != nil {
		t.Fatal(err)
	}
	e.equal("window", tt.sh("stty size"), "20 100\n")
	e.restore("term", "one")
	// The window is the attached client's and not the node's.
	if err := task.Resize(e.ctx, 120, 40); err != nil {
		t.Fatal(err)
	}
	e.equal("the shell after a restore", tt.sh(who), before)
	e.equal("files", tt.sh("ls /tmp"), "")
	// The line is edited: what was typed wrong is rubbed out.
	e.equal("edited line", tt.sh("echo abx\x7fc"), "abc\n")
	tt.keys("exit 5\n")
	exited, err := task.Wait(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	status := <-exited
	e.equal("exit code", fmt.Sprint(status.ExitCode()), "5")
}

// TestB06ForegroundJob checkpoints a shell that waits for a command in the
// foreground, which must stay there: the terminal's keys reach it.
func TestB06ForegroundJob(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	_, tt := e.openTerminal("term", withHostBash)
	tt.keys("echo st''art; sleep 1000\n")
	tt.until("start\r\n")
	e.checkpoint("term", "sleeping")
	tt.interrupt()
	e.restore("term", "sleeping")
	tt.interrupt()
}

// interrupt ends the command in the foreground by the terminal's key.
func (tt *terminal) interrupt() {
	tt.e.Helper()
	tt.keys("\x03")
	tt.until("^C")
	// Not by sh, whose own echo comes first.
	tt.keys("echo c''ode $?\n")
	tt.until("code 130\r\n")
}

// withHostBash runs the host's bash, with its libraries, read-only.
func withHostBash(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	for _, dir := range []string{"/lib", "/lib64", "/bin/bash"} {
		src, err := filepath.EvalSymlinks(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		s.Mounts = append(s.Mounts, specs.Mount{Type: "bind", Source: src, Destination: dir, Options: []string{"bind", "ro"}})
	}
	s.Process.Args = []string{"bash", "--norc"}
	return nil
}

// TestForegroundJobOfAsh has a shell that keeps /dev/tty open, which CRIU cannot
// dump while something else has the foreground: refused, and nothing happens.
func TestForegroundJobOfAsh(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	_, tt := e.openTerminal("term")
	tt.keys("echo st''art; sleep 1000\n")
	tt.until("start\r\n")
	for range 2 {
		if msg := e.refused(4, "checkpoint", "term"); !strings.Contains(msg, "/dev/tty") {
			t.Errorf("the refusal %q does not tell why", msg)
		}
	}
	tt.interrupt()
	e.checkpoint("term", "idle")
}

// TestNerdctlTerminal is the same by the common tool: run -t, and logs.
func TestNerdctlTerminal(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.run("box", "-t", testbed.Busybox, "sh", "-c", "test -t 0 && test -t 1 && "+keeper)
	e.waitLog("box", "ready")
	e.equal("number", e.ask("box", "add 1"), "1")
	e.checkpoint("box", "one")
	e.equal("number", e.ask("box", "add 1"), "2")
	e.restore("box", "one")
	e.equal("number", e.ask("box", "add 1"), "2")
	fork := e.fork("box@one")[0].ID
	e.equal("number of the fork", e.ask(fork, "add 5"), "6")
	e.nerdctl("stop", "box")
	e.equal("exit code", e.nerdctl("wait", "box"), fmt.Sprint(keeperCode))
}
