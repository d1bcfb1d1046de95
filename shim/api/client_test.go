package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
)

// echo answers with what it was asked, or with the error for that name. It has
// no sessions.
type echo struct{ WaypointService }

func (echo) Checkpoint(ctx context.Context, r *CheckpointRequest) (*CheckpointResponse, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	r.Labels["namespace"] = ns
	return &CheckpointResponse{Node: &Node{Name: r.Name, ContainerId: r.ContainerId, Labels: r.Labels}}, nil
}

func (echo) Restore(_ context.Context, r *RestoreRequest) (*RestoreResponse, error) {
	classes := map[string]error{
		"missing":  errdefs.ErrNotFound,
		"refused":  errdefs.ErrFailedPrecondition,
		"overlay":  errdefs.ErrNotImplemented,
		"no-criu":  errdefs.ErrUnavailable,
		"conflict": errdefs.ErrAlreadyExists,
	}
	return nil, errgrpc.ToGRPC(fmt.Errorf("node %q: %w", r.Node, classes[r.Node]))
}

func (echo) List(_ context.Context, r *ListRequest) (*ListResponse, error) {
	return &ListResponse{Head: r.ContainerId, Generation: 7}, nil
}

// mortal keeps the connections of a listener, to end them as the kernel does when
// a process dies: a server that is closed may answer the calls that it has.
type mortal struct {
	net.Listener

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
}

func (m *mortal) Accept() (net.Conn, error) {
	conn, err := m.Listener.Accept()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conns = append(m.conns, conn)
	return conn, nil
}

func (m *mortal) die() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, conn := range m.conns {
		conn.Close()
	}
}

// serve runs a ttrpc server and a bundle that points at it, and returns the
// state directory of both. When stop returns the server has died.
func serve(t *testing.T, register func(*ttrpc.Server)) (state string, stop func()) {
	t.Helper()
	state = t.TempDir()
	// A socket's path may have 107 bytes, and a test's own directory is long.
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	l := &mortal{Listener: socket}
	srv, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	register(srv)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(context.Background(), l) }()
	stop = func() {
		srv.Close()
		if err := <-done; !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Errorf("Serve = %v", err)
		}
		l.die()
	}
	writeBundle(t, state, map[string]any{"version": 3, "address": "unix://" + l.Addr().String(), "protocol": "ttrpc"})
	return state, stop
}

func writeBundle(t *testing.T, state string, boot any) {
	t.Helper()
	dir := filepath.Join(state, taskDir, "ns1", "c1")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(boot)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bootstrap.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func dial(t *testing.T, state string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), Config{State: state, Namespace: "ns1", ContainerID: "c1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestClientCalls(t *testing.T) {
	state, stop := serve(t, func(s *ttrpc.Server) { RegisterWaypointService(s, echo{}) })
	defer stop()
	c := dial(t, state)

	resp, err := c.Checkpoint(t.Context(), "base", map[string]string{"k": "v"})
	if err != nil {
		t.Fatal(err)
	}
	n := resp.Node
	if n.Name != "base" || n.ContainerId != "c1" || n.Labels["k"] != "v" || n.Labels["namespace"] != "ns1" {
		t.Errorf("Checkpoint = %v", n)
	}
	list, err := c.List(t.Context())
	if err != nil || list.Head != "c1" || list.Generation != 7 {
		t.Errorf("List = %v, %v", list, err)
	}
}

func TestClientErrors(t *testing.T) {
	state, stop := serve(t, func(s *ttrpc.Server) { RegisterWaypointService(s, echo{}) })
	defer stop()
	c := dial(t, state)
	for node, is := range map[string]func(error) bool{
		"missing":  errdefs.IsNotFound,
		"refused":  errdefs.IsFailedPrecondition,
		"overlay":  errdefs.IsNotImplemented,
		"no-criu":  errdefs.IsUnavailable,
		"conflict": errdefs.IsAlreadyExists,
	} {
		_, err := c.Restore(t.Context(), node)
		if !is(err) || errors.Is(err, ErrNoService) || errors.Is(err, ErrGone) || !strings.Contains(err.Error(), fmt.Sprintf("node %q", node)) {
			t.Errorf("Restore(%q) = %v", node, err)
		}
	}
}

func TestClientOtherRuntime(t *testing.T) {
	state, stop := serve(t, func(*ttrpc.Server) {})
	c := dial(t, state)
	_, err := c.List(t.Context())
	if !errors.Is(err, ErrNoService) || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("List = %v, want %v", err, ErrNoService)
	}
	stop()
	if _, err = c.List(t.Context()); !errdefs.IsUnavailable(err) || !errors.Is(err, ErrGone) {
		t.Errorf("List of a closed server = %v, want %v", err, ErrGone)
	}
	_, err = Dial(t.Context(), Config{State: state, Namespace: "ns1", ContainerID: "c1"})
	if !errdefs.IsUnavailable(err) || !errors.Is(err, ErrGone) {
		t.Errorf("Dial of a closed server = %v, want %v", err, ErrGone)
	}
}

func TestDialRefuses(t *testing.T) {
	type boot struct{ Address, Protocol string }
	tests := []struct {
		name string
		cfg  Config
		boot any
		is   func(error) bool
	}{
		{"no bundle", Config{Namespace: "ns1", ContainerID: "c2"}, boot{"unix:///s", "ttrpc"}, errdefs.IsNotFound},
		{"id with a path", Config{Namespace: "ns1", ContainerID: "../c1"}, boot{"unix:///s", "ttrpc"}, errdefs.IsInvalidArgument},
		{"no id", Config{Namespace: "ns1"}, boot{"unix:///s", "ttrpc"}, errdefs.IsInvalidArgument},
		{"namespace with a path", Config{Namespace: "..", ContainerID: "c1"}, boot{"unix:///s", "ttrpc"}, errdefs.IsInvalidArgument},
		{"grpc", Config{Namespace: "ns1", ContainerID: "c1"}, boot{"unix:///s", "grpc"}, errdefs.IsFailedPrecondition},
		{"vsock", Config{Namespace: "ns1", ContainerID: "c1"}, boot{"vsock://3:4", "ttrpc"}, errdefs.IsDataLoss},
		{"relative", Config{Namespace: "ns1", ContainerID: "c1"}, boot{"unix://s", "ttrpc"}, errdefs.IsDataLoss},
		{"no object", Config{Namespace: "ns1", ContainerID: "c1"}, "x", errdefs.IsDataLoss},
		{"gone socket", Config{Namespace: "ns1", ContainerID: "c1"}, boot{"unix:///nonexistent/s", "ttrpc"}, errdefs.IsUnavailable},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.cfg.State = t.TempDir()
			writeBundle(t, tt.cfg.State, tt.boot)
			if c, err := Dial(t.Context(), tt.cfg); !tt.is(err) {
				t.Errorf("Dial = %v, %v", c, err)
			}
		})
	}
}
