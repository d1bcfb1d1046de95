package task

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

func encode(t *testing.T, v any) *anypb.Any {
	t.Helper()
	a, err := typeurl.MarshalAnyToProto(v)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestDecodeOptions(t *testing.T) {
	want := &options.Options{SystemdCgroup: true, Root: "/run/x", IoUid: 7, NoPivotRoot: true, ShimCgroup: "/s"}
	body := "BinaryName = ''\nIoUid = 7\nNoPivotRoot = true\nRoot = '/run/x'\nShimCgroup = \"/s\"\nSystemdCgroup = true\n"
	for name, in := range map[string]*anypb.Any{
		"runc's": encode(t, want),
		"CRI's":  encode(t, &runtimeoptions.Options{ConfigBody: []byte(body)}),
	} {
		got, err := decodeOptions(in)
		if err != nil || !proto.Equal(got, want) {
			t.Errorf("%s: got %v, %v; want %v", name, got, err, want)
		}
	}
	for name, in := range map[string]*anypb.Any{"none": nil, "empty": {}} {
		if got, err := decodeOptions(in); err != nil || !proto.Equal(got, &options.Options{}) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	for name, in := range map[string]*anypb.Any{
		"unknown key":  encode(t, &runtimeoptions.Options{ConfigBody: []byte("SystemdCgroop = true")}),
		"binary":       encode(t, &options.Options{BinaryName: "/no/runc"}),
		"relative":     encode(t, &options.Options{Root: "x"}),
		"no file":      encode(t, &runtimeoptions.Options{ConfigPath: "/no/file"}),
		"another type": encode(t, &options.CheckpointOptions{}),
		"not a number": encode(t, &runtimeoptions.Options{ConfigBody: []byte("IoUid = 'x'")}),
		"garbage":      {TypeUrl: "no/such.Type", Value: []byte{1}},
	} {
		if _, err := decodeOptions(in); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: got %v, want an invalid argument", name, err)
		}
	}
}

// TestUnknownOption has the error name the key that is none.
func TestUnknownOption(t *testing.T) {
	name := filepath.Join(t.TempDir(), "options.toml")
	if err := os.WriteFile(name, []byte("SystemdCgroop = true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := decodeOptions(encode(t, &runtimeoptions.Options{ConfigPath: name}))
	if err == nil || !strings.Contains(err.Error(), "SystemdCgroop") || !strings.Contains(err.Error(), name) {
		t.Errorf("got %v, want the key and the file named", err)
	}
	if err := os.WriteFile(name, []byte("SystemdCgroup = true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := decodeOptions(encode(t, &runtimeoptions.Options{ConfigPath: name}))
	if err != nil || !o.SystemdCgroup {
		t.Errorf("got %v, %v; want what the file says", o, err)
	}
}

func newTestService(t *testing.T) (*Service, shutdown.Service) {
	t.Helper()
	ctx, sd := shutdown.WithShutdown(namespaces.WithNamespace(context.Background(), "test"))
	p := &press{open: make(chan struct{})}
	close(p.open)
	s := NewService(ctx, p, sd)
	t.Cleanup(func() {
		sd.Shutdown()
		<-sd.Done()
	})
	return s, sd
}

// TestErrorsAtTheEdge has errors keep their class on their way to the client.
func TestErrorsAtTheEdge(t *testing.T) {
	s, _ := newTestService(t)
	intercept := s.UnaryServerInterceptor()
	info := &ttrpc.UnaryServerInfo{FullMethod: "/x/Y"}
	for want, class := range map[codes.Code]error{
		codes.NotFound:           errdefs.ErrNotFound,
		codes.AlreadyExists:      errdefs.ErrAlreadyExists,
		codes.FailedPrecondition: errdefs.ErrFailedPrecondition,
		codes.InvalidArgument:    errdefs.ErrInvalidArgument,
		codes.Unimplemented:      errdefs.ErrNotImplemented,
		codes.Aborted:            errdefs.ErrAborted,
	} {
		_, err := intercept(context.Background(), nil, info, func(context.Context, func(any) error) (any, error) {
			return nil, fmt.Errorf("do something: %w", class)
		})
		if got := status.Code(err); got != want {
			t.Errorf("%v becomes %v, want %v", class, got, want)
		}
	}
	resp, err := intercept(context.Background(), nil, info, func(context.Context, func(any) error) (any, error) {
		return &emptypb.Empty{}, nil
	})
	if err != nil || resp == nil {
		t.Errorf("got %v, %v", resp, err)
	}
}

// TestNoContainer has each call for an unknown container not find it, but
// Connect, by which clients ask for the shim.
func TestNoContainer(t *testing.T) {
	s, _ := newTestService(t)
	ctx := context.Background()
	calls := map[string]func() error{
		"start":  func() error { _, err := s.Start(ctx, &taskapi.StartRequest{ID: "x"}); return err },
		"state":  func() error { _, err := s.State(ctx, &taskapi.StateRequest{ID: "x"}); return err },
		"pids":   func() error { _, err := s.Pids(ctx, &taskapi.PidsRequest{ID: "x"}); return err },
		"delete": func() error { _, err := s.Delete(ctx, &taskapi.DeleteRequest{ID: "x"}); return err },
		"wait":   func() error { _, err := s.Wait(ctx, &taskapi.WaitRequest{ID: "x"}); return err },
		"kill":   func() error { _, err := s.Kill(ctx, &taskapi.KillRequest{ID: "x"}); return err },
		"exec":   func() error { _, err := s.Exec(ctx, &taskapi.ExecProcessRequest{ID: "x"}); return err },
	}
	for name, call := range calls {
		if err := call(); !errdefs.IsNotFound(err) {
			t.Errorf("%s: got %v, want not found", name, err)
		}
	}
	if resp, err := s.Connect(ctx, &taskapi.ConnectRequest{ID: "x"}); err != nil || resp.ShimPid == 0 {
		t.Errorf("connect: got %v, %v", resp, err)
	}
}

// TestShutdown has the shim stay while a container is there, be it one that is
// still being created.
func TestShutdown(t *testing.T) {
	s, sd := newTestService(t)
	ctx := context.Background()
	if err := s.reserve("x"); err != nil {
		t.Fatal(err)
	}
	if err := s.reserve("x"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the same id again: got %v", err)
	}
	if resp, err := s.Connect(ctx, &taskapi.ConnectRequest{ID: "x"}); err != nil || resp.TaskPid != 0 {
		t.Errorf("connect to a half-made container: got %v, %v", resp, err)
	}
	if s.Abandoned() {
		t.Error("a shim that creates a container is abandoned")
	}
	// Both wait for the creation.
	impatient, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := s.Container(impatient, "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("half-made container: got %v", err)
	}
	if _, err := s.Shutdown(impatient, &taskapi.ShutdownRequest{}); !errors.Is(err, context.Canceled) {
		t.Errorf("shut down with a half-made container: got %v", err)
	}
	found := make(chan error)
	go func() { _, err := s.Container(ctx, "x"); found <- err }()
	select {
	case <-sd.Done():
		t.Fatal("the shim shut down under a container")
	default:
	}
	s.forget("x")
	if err := <-found; !errdefs.IsNotFound(err) {
		t.Errorf("container whose creation has failed: got %v", err)
	}
	if !s.Abandoned() {
		t.Error("a shim without containers is not abandoned")
	}
	if _, err := s.Shutdown(ctx, &taskapi.ShutdownRequest{}); err != nil {
		t.Fatal(err)
	}
	<-sd.Done()
}
