package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork/waypoint"
)

// actor is a Waypoint service with one session that acts what its commands say:
//
//	say TEXT     prints it
//	exit N       ends with that code
//	ask          waits for input, and prints it
//	hang         ends with 130 when it is interrupted
//	stubborn     does not end
//	limit, lost  were ended at a limit; nobody knows how
type actor struct {
	api.WaypointService
	mu sync.Mutex
	// The rest is guarded by mu; changed is closed and made anew with it.
	changed chan struct{}
	step    *api.StepResponse
	output  []byte
	verb    string
	signals []uint32
	open    *api.Session
	closed  bool
}

func newActor() *actor { return &actor{changed: make(chan struct{}), step: &api.StepResponse{}} }

func (a *actor) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// await waits until a condition holds, or ctx ends.
func (a *actor) await(ctx context.Context, holds func() bool) bool {
	for {
		a.mu.Lock()
		changed, ok := a.changed, holds()
		a.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (a *actor) printLocked(text string) {
	a.output = append(a.output, text...)
	a.step.OutputBytes = uint64(len(a.output))
}

func (a *actor) endLocked(code uint32) {
	a.step.Ended, a.step.ExitCode, a.step.ExitKnown, a.step.WaitingForInput = true, code, true, false
}

func (a *actor) StartStep(ctx context.Context, r *api.StartStepRequest) (*api.StepResponse, error) {
	verb, arg, _ := strings.Cut(string(r.Command), " ")
	a.change(func() {
		a.step = &api.StepResponse{Session: r.Session, Step: a.step.Step + 1, Cwd: "/"}
		a.output, a.verb = nil, verb
		if r.Background {
			a.step.Session = "service-1"
		}
		switch verb {
		case "say", "'say'":
			a.printLocked(arg + "\n")
			a.endLocked(0)
		case "exit":
			code, err := strconv.ParseUint(arg, 10, 8)
			a.endLocked(uint32(code))
			a.step.ExitKnown, a.step.ShellExited = err == nil, true
		case "ask":
			a.printLocked("? ")
			a.step.WaitingForInput = true
		case "limit":
			a.endLocked(130)
			a.step.TimedOut = true
		case "lost":
			a.endLocked(0)
			a.step.ExitKnown = false
		}
	})
	return a.answer(ctx, 0, r.WaitMs)
}

func (a *actor) WaitStep(ctx context.Context, r *api.WaitStepRequest) (*api.StepResponse, error) {
	a.mu.Lock()
	newest := a.step.Step
	a.mu.Unlock()
	if r.Step > newest {
		return nil, errgrpc.ToGRPC(fmt.Errorf("step %d: %w", r.Step, errdefs.ErrNotFound))
	}
	return a.answer(ctx, r.Offset, r.WaitMs)
}

func (a *actor) answer(ctx context.Context, offset, ms uint64) (*api.StepResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(ms)*time.Millisecond)
	defer cancel()
	a.await(ctx, func() bool { return a.step.Ended || uint64(len(a.output)) > offset })
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.step
	return &api.StepResponse{
		Session: s.Session, Step: s.Step, Ended: s.Ended, ExitCode: s.ExitCode, ExitKnown: s.ExitKnown, TimedOut: s.TimedOut,
		ShellExited: s.ShellExited, WaitingForInput: s.WaitingForInput, Cwd: s.Cwd, OutputBytes: s.OutputBytes,
		Output: append([]byte(nil), a.output[min(offset, uint64(len(a.output))):]...), Offset: offset,
	}, nil
}

func (a *actor) SignalSession(_ context.Context, r *api.SignalSessionRequest) (*api.SignalSessionResponse, error) {
	a.change(func() {
		a.signals = append(a.signals, r.Signal)
		if a.verb == "hang" && r.Signal == 2 {
			a.endLocked(130)
		}
	})
	return &api.SignalSessionResponse{}, nil
}

func (a *actor) SendInput(_ context.Context, r *api.SendInputRequest) (*api.SendInputResponse, error) {
	a.change(func() {
		a.printLocked(fmt.Sprintf("%q\n", r.Input))
		a.endLocked(0)
	})
	return &api.SendInputResponse{}, nil
}

func (a *actor) ReadScreen(_ context.Context, r *api.ReadScreenRequest) (*api.ReadScreenResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	offset := min(r.Offset, uint64(len(a.output)))
	return &api.ReadScreenResponse{Output: append([]byte(nil), a.output[offset:]...), Offset: offset, Closed: r.WaitMs > 0}, nil
}

func (a *actor) OpenSession(_ context.Context, r *api.OpenSessionRequest) (*api.OpenSessionResponse, error) {
	s := &api.Session{Name: r.Session, Shell: "/bin/" + r.Shell, Pid: 7, Cwd: r.Cwd, Columns: r.Columns, Rows: r.Rows, Service: []byte(strings.Join(r.Env, "\n"))}
	a.change(func() { a.open = s })
	return &api.OpenSessionResponse{Session: s}, nil
}

func (a *actor) ListSessions(context.Context, *api.ListSessionsRequest) (*api.ListSessionsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	resp := &api.ListSessionsResponse{}
	if a.open != nil && !a.closed {
		resp.Sessions = append(resp.Sessions, a.open)
	}
	return resp, nil
}

func (a *actor) CloseSession(_ context.Context, r *api.CloseSessionRequest) (*api.CloseSessionResponse, error) {
	a.change(func() { a.closed = a.open != nil && r.Session == a.open.Name })
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		return nil, errgrpc.ToGRPC(fmt.Errorf("session %q: %w", r.Session, errdefs.ErrNotFound))
	}
	return &api.CloseSessionResponse{}, nil
}

// createRecord makes a container "job1" that containerd knows. It has no task:
// whether it runs is told by its bundle alone.
func createRecord(t *testing.T, socket string) {
	t.Helper()
	ctrd, err := waypoint.Connect(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer ctrd.Close()
	spec, err := typeurl.MarshalAny(&specs.Spec{Version: specs.Version})
	if err != nil {
		t.Fatal(err)
	}
	_, err = ctrd.ContainerService().Create(namespaces.WithNamespace(t.Context(), namespaces.Default), containers.Container{
		ID: "job1", Spec: spec, Runtime: containers.RuntimeInfo{Name: api.RuntimeName},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// serveShim serves a Waypoint service as the shim of "job1", and returns the
// state directory in which it is found.
func serveShim(dir string, s api.WaypointService) (state string, stop func() error, _ error) {
	bundle := filepath.Join(dir, "io.containerd.runtime.v2.task", namespaces.Default, "job1")
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return "", nil, err
	}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		return "", nil, err
	}
	boot := fmt.Sprintf(`{"version": 3, "protocol": "ttrpc", "address": "unix://%s"}`, l.Addr())
	if err := os.WriteFile(filepath.Join(bundle, "bootstrap.json"), []byte(boot), 0o600); err != nil {
		return "", nil, errors.Join(err, l.Close())
	}
	srv, err := ttrpc.NewServer()
	if err != nil {
		return "", nil, errors.Join(err, l.Close())
	}
	api.RegisterWaypointService(srv, s)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(context.Background(), l) }()
	return dir, func() error {
		err := srv.Close()
		if serr := <-done; !errors.Is(serr, ttrpc.ErrServerClosed) {
			err = errors.Join(err, serr)
		}
		return err
	}, nil
}
