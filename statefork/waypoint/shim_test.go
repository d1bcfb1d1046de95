package waypoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// service is a Waypoint service whose methods are a test's. It has no sessions.
type service struct {
	api.WaypointService
	checkpoint func(*api.CheckpointRequest) (*api.CheckpointResponse, error)
	restore    func(*api.RestoreRequest) (*api.RestoreResponse, error)
	list       func(*api.ListRequest) (*api.ListResponse, error)
}

func (s service) Checkpoint(_ context.Context, r *api.CheckpointRequest) (*api.CheckpointResponse, error) {
	resp, err := s.checkpoint(r)
	return resp, errgrpc.ToGRPC(err)
}

func (s service) Restore(_ context.Context, r *api.RestoreRequest) (*api.RestoreResponse, error) {
	resp, err := s.restore(r)
	return resp, errgrpc.ToGRPC(err)
}

func (s service) List(_ context.Context, r *api.ListRequest) (*api.ListResponse, error) {
	resp, err := s.list(r)
	return resp, errgrpc.ToGRPC(err)
}

// serveShim runs a Waypoint service for a container and returns a client that
// finds it in a state directory of its own.
func (d *daemon) serveShim(t *testing.T, id string, s service) *Client {
	t.Helper()
	state := t.TempDir()
	bundle := filepath.Join(state, "io.containerd.runtime.v2.task", "default", id)
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(d.dir, "shim-"+id))
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(map[string]any{"version": 3, "protocol": "ttrpc", "address": "unix://" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "bootstrap.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	srv, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterWaypointService(srv, s)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		srv.Close()
		if err := <-done; !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Error(err)
		}
	})
	return New(d.ctrd, Options{State: state})
}

func (d *daemon) nodeOf(t *testing.T, id, node string) *api.Node {
	t.Helper()
	info, err := d.sn.Stat(scoped(t), api.SnapshotName(id, node))
	if err != nil {
		t.Fatal(err)
	}
	return api.NodeFromSnapshot(info)
}

// answers are those of a shim to which nothing needs to happen.
var answers = service{
	checkpoint: func(r *api.CheckpointRequest) (*api.CheckpointResponse, error) {
		switch r.Name {
		case "again":
			return nil, fmt.Errorf("node %q: %w", r.Name, errdefs.ErrAlreadyExists)
		case "no-criu":
			return nil, fmt.Errorf("find criu: install it: %w", errdefs.ErrUnavailable)
		}
		return &api.CheckpointResponse{
			Node:     &api.Node{Id: nodeB, Name: r.Name, ContainerId: r.ContainerId, Labels: r.Labels, ImageBytes: 7},
			Timings:  &api.Timings{Total: 24000, Frozen: 20000, Dump: 11000},
			External: []*api.External{{Kind: "mount", Name: "/data"}},
		}, nil
	},
	restore: func(r *api.RestoreRequest) (*api.RestoreResponse, error) {
		return &api.RestoreResponse{
			Node: &api.Node{Id: r.Node}, Generation: 3, EndedExecs: []*api.Exec{{ExecId: "e1", Pid: 9}},
		}, nil
	},
	list: func(*api.ListRequest) (*api.ListResponse, error) {
		return &api.ListResponse{Generation: 3, Phase: "dump"}, nil
	},
}

// TestShimCalls checks what is asked of the shim of a running container, and
// what is made of its answers.
func TestShimCalls(t *testing.T) {
	d := startDaemon(t)
	ctx := t.Context()
	d.base(t)
	cont := d.create(t, "job1", "echo ready; exec sleep 1000", nil)
	d.run(t, cont)
	d.flat(t, "job1", nodeA, "")
	c := d.serveShim(t, "job1", answers)
	res, err := c.Checkpoint(ctx, "job1", "base", map[string]string{"k": "v"})
	if err != nil {
		t.Fatal(err)
	}
	if n := res.Node; n.ID != nodeB || n.Name != "base" || n.Container != "job1" || n.Labels["k"] != "v" || n.ImageBytes != 7 {
		t.Errorf("node is %+v", n)
	}
	if res.Timings.Total != 24*time.Millisecond || res.Timings.Frozen != 20*time.Millisecond || res.Timings.Restore != 0 {
		t.Errorf("timings are %+v", res.Timings)
	}
	if !slices.Equal(res.External, []statefork.External{{Kind: "mount", Name: "/data"}}) {
		t.Errorf("external is %v", res.External)
	}
	_, err = c.Checkpoint(ctx, "job1", "again", nil)
	wantError(t, "Checkpoint with a name in use", err, errdefs.IsAlreadyExists, false)

	_, err = c.Checkpoint(ctx, "job1", "no-criu", nil)
	wantError(t, "Checkpoint without criu", err, errdefs.IsUnavailable, true)
	if strings.Contains(statefork.Hint(err), "shim") {
		t.Errorf("a missing criu is taken for a missing shim: %s", statefork.Hint(err))
	}

	// The shim is given the whole id.
	back, err := c.Restore(ctx, "job", "aaa")
	if err != nil || back.Node.ID != nodeA || back.Generation != 3 || back.Started || !slices.Equal(back.EndedExecs, []Exec{{"e1", 9}}) {
		t.Errorf("Restore = %+v, %v", back, err)
	}
	detail, err := c.InspectContainer(ctx, "job1")
	if err != nil || detail.Phase != "dump" || detail.Generation != 3 || detail.Status != "running" || detail.PID == 0 {
		t.Errorf("InspectContainer = %+v, %v", detail, err)
	}
	// The task runs, but under a state directory that is not this one.
	_, err = New(d.ctrd, Options{State: t.TempDir()}).Checkpoint(ctx, "job1", "", nil)
	wantError(t, "Checkpoint with another state directory", err, errdefs.IsUnavailable, true)
}

// TestForkNow forks a container without naming a node: a checkpoint is made
// first, and it stays. A fork that can be told to fail makes none.
func TestForkNow(t *testing.T) {
	d := startDaemon(t)
	need(t, exec.Command(program(t, "criu"), "check").Run() == nil, "a criu that works on this kernel")
	ctx := t.Context()
	d.base(t)
	task := d.run(t, d.create(t, "job1", counter, nil))
	made := 0
	c := d.serveShim(t, "job1", service{checkpoint: func(r *api.CheckpointRequest) (*api.CheckpointResponse, error) {
		made++
		d.dump(t, task, r.ContainerId)
		return &api.CheckpointResponse{
			Node: d.nodeOf(t, r.ContainerId, nodeA), Timings: &api.Timings{Total: 5000},
			External: []*api.External{{Kind: "socket", Name: "192.0.2.1:80"}},
		}, nil
	}})
	_, err := c.Fork(ctx, "job1", ForkOptions{Name: "job1"})
	wantError(t, "Fork with the source's name", err, errdefs.IsAlreadyExists, true)
	if made != 0 {
		t.Error("a checkpoint was made for nothing")
	}
	res, err := c.Fork(ctx, "job1", ForkOptions{Name: "twin"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.destroy(t, "twin")
	if res.Err() != nil || len(res.Siblings) != 1 || res.Node.ID != nodeA || made != 1 {
		t.Fatalf("Fork = %+v, %v", res, res.Err())
	}
	if res.Checkpoint == nil || res.Checkpoint.Total != 5*time.Millisecond ||
		!slices.Contains(res.External, statefork.External{Kind: "socket", Name: "192.0.2.1:80"}) {
		t.Errorf("Fork = %+v", res)
	}
	s, err := d.status(scoped(t), "twin")
	if err != nil || s.Status != "running" {
		t.Errorf("the fork is %+v, %v", s, err)
	}
}
