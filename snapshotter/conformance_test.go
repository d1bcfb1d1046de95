package snapshotter

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// TestConformance runs containerd's suite for snapshotters in process.
func TestConformance(t *testing.T) {
	needRoot(t)
	testsuite.SnapshotterSuite(t, "statefork", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		s, err := New(ctx, Config{Root: root})
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	})
}

// TestProxyConformance runs it as containerd sees the daemon: through the gRPC
// service on a socket.
func TestProxyConformance(t *testing.T) {
	needRoot(t)
	testsuite.SnapshotterSuite(t, "statefork", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		s, err := New(ctx, Config{Root: root})
		if err != nil {
			return nil, nil, err
		}
		client, stop, err := serve(s, filepath.Join(filepath.Dir(root), "s.sock"))
		if err != nil {
			return nil, nil, errors.Join(err, s.Close())
		}
		return client, func() error { return errors.Join(stop(), s.Close()) }, nil
	})
}

// serve puts s behind a socket and returns a client of it.
func serve(s snapshots.Snapshotter, socket string) (snapshots.Snapshotter, func() error, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, nil, err
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(s))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		server.Stop()
		return nil, nil, errors.Join(err, <-served)
	}
	stop := func() error {
		err := conn.Close()
		server.GracefulStop()
		return errors.Join(err, <-served)
	}
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "statefork"), stop, nil
}
