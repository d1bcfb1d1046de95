package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

// env is a test's own containerd namespace, with the busybox image in it.
// Whatever fails in one of its methods fails the test.
type env struct {
	*testing.T
	ns  *testbed.Namespace
	ctx context.Context
	// snapshotter is what run gives to containers.
	snapshotter string
}

var nsNumber atomic.Int32

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// setup gives the test a namespace in the testbed. After the test everything in
// it must be gone, but for the image.
func setup(t *testing.T, tb *testbed.Testbed) *env {
	t.Helper()
	name := notInNames.ReplaceAllString(strings.ToLower(strings.TrimPrefix(t.Name(), "Test")), "-")
	ns := tb.Namespace(fmt.Sprintf("%s-%d-%.20s", tb.Name, nsNumber.Add(1), name))
	ns.NS = strings.TrimRight(ns.NS, "-")
	e := &env{T: t, ns: ns, ctx: namespaces.WithNamespace(t.Context(), ns.NS), snapshotter: testbed.Snapshotter}
	// Registered first, so run last: after the test has removed its containers.
	t.Cleanup(e.finish)
	if err := ns.ImportBusybox(e.ctx); err != nil {
		t.Fatal(err)
	}
	return e
}

// finish removes what a failed test has left, and is a failure itself if a
// test that passed has left anything.
func (e *env) finish() {
	ctx := e.cleanupContext()
	if e.Failed() {
		e.Log(e.ns.Containerd.Tail(e.ns.NS))
		if err := e.ns.Discard(ctx); err != nil {
			e.Log(err)
		}
		return
	}
	if err := e.ns.Check(ctx); err != nil {
		e.Error(err)
	}
	if err := e.ns.Empty(ctx); err != nil {
		e.Error(err)
	}
}

// must fails the test unless a command has succeeded, and returns its output
// without the last newline.
func (e *env) must(out testbed.Output, err error) string {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
	return strings.TrimSuffix(out.Stdout, "\n")
}

func (e *env) nerdctl(args ...string) string {
	e.Helper()
	return e.must(e.ns.Nerdctl(e.ctx, args...))
}

func (e *env) ctr(args ...string) string {
	e.Helper()
	return e.must(e.ns.Ctr(e.ctx, args...))
}

// statefork runs our tool with --json and decodes what it prints, unless that
// is not wanted.
func (e *env) statefork(result any, args ...string) {
	e.Helper()
	out := e.must(e.ns.Statefork(e.ctx, append([]string{"--json"}, args...)...))
	if result == nil {
		return
	}
	if err := json.Unmarshal([]byte(out), result); err != nil {
		e.Fatalf("statefork %s: %v in\n%s", strings.Join(args, " "), err, out)
	}
}

// refused runs our tool, which must fail with the given exit code, and returns
// its message.
func (e *env) refused(code int, args ...string) string {
	e.Helper()
	out, err := e.ns.Statefork(e.ctx, args...)
	if err == nil || out.Code != code {
		e.Fatalf("statefork %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), out.Code, code, out.Stdout, out.Stderr)
	}
	return out.Stderr
}

// run starts a container of our runtime by nerdctl, without a network, and
// returns its id. It is removed at the end of the test if that has not done it.
func (e *env) run(name string, args ...string) string {
	e.Helper()
	id := e.nerdctl(append([]string{"--snapshotter", e.snapshotter, "run", "-d", "--runtime", testbed.Runtime,
		"--net", "none", "--pull", "never", "--name", name}, args...)...)
	e.removeAfter(name)
	return id
}

func (e *env) removeAfter(name string) {
	e.Cleanup(func() {
		ctx := e.cleanupContext()
		if out, err := e.ns.Nerdctl(ctx, "rm", "-f", name); err != nil && !strings.Contains(out.Stderr, "no such") {
			e.Error(err)
		}
	})
}

// keeper is an init process that keeps a number in its memory. It is asked and
// told by a line in /q, and answers in /a. SIGTERM ends it with a code of its
// own, which nothing else gives.
const keeper = `trap 'exit 7' TERM
mkfifo /q /a
exec 3<>/q
n=0
echo ready
while :; do
	read -r verb arg <&3 || continue
	case $verb in
	set) n=$arg ;;
	add) n=$((n + arg)) ;;
	exit) exit "$arg" ;;
	esac
	echo "$n" >/a
done`

const keeperCode = 7

// runKeeper runs a container with a keeper.
func (e *env) runKeeper(name string, args ...string) string {
	e.Helper()
	id := e.run(name, append(args, testbed.Busybox, "sh", "-c", keeper)...)
	e.waitLog(name, "ready")
	return id
}

// ask tells the keeper something and returns its number then.
func (e *env) ask(container, line string) string {
	e.Helper()
	return e.exec(container, "sh", "-c", `echo "$1" >/q; cat /a`, "-", line)
}

// exec runs a command in a container, which must succeed, and returns its
// standard output without the last newline.
func (e *env) exec(container string, args ...string) string {
	e.Helper()
	out, err := e.ns.ExecIn(e.ctx, container, args...)
	return e.must(out, err)
}

// sh runs a shell script in a container.
func (e *env) sh(container, script string) string {
	e.Helper()
	return e.exec(container, "sh", "-c", script)
}

// waitLog waits until a container has printed a text.
func (e *env) waitLog(container, text string) {
	e.Helper()
	e.eventually(func() error {
		out, err := e.ns.Nerdctl(e.ctx, "logs", container)
		if err == nil && !strings.Contains(out.Stdout, text) {
			err = fmt.Errorf("%s has not printed %q but %q", container, text, out.Stdout)
		}
		return err
	})
}

func (e *env) checkpoint(container, name string, args ...string) waypoint.Result {
	e.Helper()
	if name != "" {
		args = append(args, "--name", name)
	}
	var res waypoint.Result
	e.statefork(&res, append([]string{"checkpoint", container}, args...)...)
	return res
}

func (e *env) restore(container, node string) waypoint.Result {
	e.Helper()
	var res waypoint.Result
	e.statefork(&res, "restore", container, node)
	return res
}

// fork starts siblings, all of which must run, and has them removed after the
// test.
func (e *env) fork(ref string, args ...string) []waypoint.Sibling {
	e.Helper()
	var res waypoint.ForkResult
	e.statefork(&res, append([]string{"fork", ref}, args...)...)
	for _, s := range res.Siblings {
		e.removeAfter(s.ID)
	}
	return res.Siblings
}

// nodes are the container's, as the tree shows them.
func (e *env) nodes(container string) []statefork.Node {
	e.Helper()
	t, err := e.library().Tree(e.ctx, container)
	if err != nil {
		e.Fatal(err)
	}
	var nodes []statefork.Node
	var add func([]waypoint.Branch)
	add = func(list []waypoint.Branch) {
		for _, b := range list {
			nodes = append(nodes, b.Node)
			add(b.Children)
		}
	}
	add(t.Branches())
	return nodes
}

// library is our Go library on the test's namespace.
func (e *env) library() *waypoint.Client {
	return waypoint.New(e.ns.Client(), waypoint.Options{Namespace: e.ns.NS, State: e.ns.State()})
}

// waitTimeout bounds how long a test waits for another process.
const waitTimeout = 20 * time.Second

// equal compares what a container shows with what it must.
func (e *env) equal(what, got, want string) {
	e.Helper()
	if got == want {
		return
	}
	if strings.Count(got, "\n")+strings.Count(want, "\n") < 20 {
		e.Errorf("%s is %q, want %q", what, got, want)
		return
	}
	lines := func(in, notIn string) (only []string) {
		for line := range strings.Lines(in) {
			if !strings.Contains(notIn, line) {
				only = append(only, line)
			}
		}
		return only
	}
	e.Errorf("%s has lines too many %q and lacks %q", what, lines(got, want), lines(want, got))
}

// eventually waits for what another process does.
func (e *env) eventually(f func() error) {
	e.Helper()
	err := testbed.Poll(e.ctx, waitTimeout, func(context.Context) error { return f() })
	if err != nil {
		e.Fatal(err)
	}
}

// noShim fails while a container has a shim. When it is gone, it has published
// all of its events.
func (e *env) noShim(id string) error {
	pid, err := e.ns.ShimOf(id)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return errors.Join(err, fmt.Errorf("shim %d of container %s is there", pid, id))
}

// cleanupContext has the test's namespace and outlives the test.
func (e *env) cleanupContext() context.Context { return context.WithoutCancel(e.ctx) }
