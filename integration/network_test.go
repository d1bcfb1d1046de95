package integration_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork"
)

// TestBridge gives a container a network with an address, and talks to it from
// outside. It keeps the network over everything; a connection to outside lives
// on where the container goes on, and is cut and told of where it goes back.
func TestBridge(t *testing.T) {
	t.Parallel()
	e := setup(t, apart(t))
	e.nerdctl("network", "create", "--subnet", "10.77.0.0/24", "testnet")
	t.Cleanup(func() { e.must(e.ns.Nerdctl(e.cleanupContext(), "network", "rm", "testnet")) })
	e.nerdctl("--snapshotter", e.snapshotter, "run", "-d", "--runtime", testbed.Runtime, "--net", "testnet",
		"--pull", "never", "--name", "box", testbed.Busybox, "sh", "-c", "nc -ll -p 7000 -e cat & "+keeper)
	e.removeAfter("box")
	e.waitLog("box", "ready")
	addr := e.nerdctl("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", "box")
	if !strings.HasPrefix(addr, "10.77.0.") {
		t.Fatalf("the container's address is %q", addr)
	}
	e.echoes(addr)
	e.step("box", 1)
	e.checkpoint("box", "n1")
	e.echoes(addr)

	peer := e.dialPeer(addr)
	peer.say("before")
	made := e.checkpoint("box", "connected")
	peer.say("after")
	e.restore("box", "n1")
	e.verify("box", 1)
	e.echoes(addr)
	peer.cut()

	res := e.restore("box", "connected")
	if !slices.ContainsFunc(res.External, isSocket) {
		t.Errorf("the lost connection is not listed: %v (at the checkpoint %v)", res.External, made.External)
	}
	e.echoes(addr)

	// A fork has a network of its own, not this one's address.
	fork := e.fork("box@n1")[0].ID
	e.verify(fork, 1)
	if other := e.sh(fork, "ip -o -4 addr"); strings.Contains(other, addr+"/") {
		t.Errorf("the fork has its source's address: %s", other)
	}
	e.echoes(addr)
}

func isSocket(x statefork.External) bool { return x.Kind == "socket" }

// echoes opens a new connection to the container's server, from outside.
func (e *env) echoes(addr string) {
	e.Helper()
	out := e.must(e.ns.Exec(e.ctx, "sh", "-c", "echo hi | busybox nc -w 5 "+addr+" 7000"))
	e.equal("echo over the network", out, "hi")
}

// peer is somebody outside with a connection to the container's server.
type peer struct {
	e  *env
	tt *terminal
	// done is closed when the connection has ended.
	done chan struct{}
}

func (e *env) dialPeer(addr string) *peer {
	e.Helper()
	ctx, cancel := context.WithCancel(e.ctx)
	cmd := e.ns.Command(ctx, "busybox", "nc", addr, "7000")
	in, err := cmd.StdinPipe()
	if err != nil {
		e.Fatal(err)
	}
	p := &peer{e: e, tt: &terminal{e: e, in: in}, done: make(chan struct{})}
	cmd.Stdout = p.tt
	if err := cmd.Start(); err != nil {
		e.Fatal(err)
	}
	go func() {
		_ = cmd.Wait()
		close(p.done)
	}()
	e.Cleanup(func() { cancel(); <-p.done })
	return p
}

func (p *peer) say(text string) {
	p.e.Helper()
	p.tt.keys(text + "\n")
	p.tt.until(text + "\n")
}

// cut waits until the connection has ended, which its end learns at the latest
// when it says something.
func (p *peer) cut() {
	p.e.Helper()
	p.e.eventually(func() error {
		_, _ = p.tt.in.Write([]byte("?\n"))
		select {
		case <-p.done:
			return nil
		default:
			return fmt.Errorf("the connection still stands")
		}
	})
}
