package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/coreos/go-systemd/v22/daemon"
	"google.golang.org/grpc"
)

// graceTime is how long calls may take to end once the daemon is to stop.
const graceTime = 10 * time.Second

// serve serves a snapshotter on a unix socket until ctx ends.
func serve(ctx context.Context, s snapshots.Snapshotter, address string) error {
	l, err := listen(address)
	if err != nil {
		return fmt.Errorf("listen on %q: %w", address, err)
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(s))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	log.G(ctx).WithField("address", address).Info("ready")
	notify(ctx, daemon.SdNotifyReady)
	select {
	case err := <-served:
		return fmt.Errorf("serve on %q: %w", address, err)
	case <-ctx.Done():
	}
	notify(ctx, daemon.SdNotifyStopping)
	hard := time.AfterFunc(graceTime, server.Stop)
	defer hard.Stop()
	server.GracefulStop()
	if err := <-served; err != nil {
		return fmt.Errorf("serve on %q: %w", address, err)
	}
	log.G(ctx).Info("stopped")
	return nil
}

// listen makes the socket, in place of one that nobody listens on any more.
func listen(address string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(address), 0o700); err != nil {
		return nil, err
	}
	if err := removeStale(address); err != nil {
		return nil, err
	}
	// The socket must not be open to others for an instant.
	mask := syscall.Umask(0o177)
	defer syscall.Umask(mask)
	return net.Listen("unix", address)
}

func removeStale(address string) error {
	fi, err := os.Lstat(address)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("there is a file that is no socket: %w", errdefs.ErrAlreadyExists)
	}
	conn, err := net.Dial("unix", address)
	if err == nil {
		conn.Close()
		return fmt.Errorf("another daemon answers there: %w", errdefs.ErrAlreadyExists)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("see whether a daemon answers there: %w", err)
	}
	return os.Remove(address)
}

// notify tells systemd, if it started the daemon and wants to know.
func notify(ctx context.Context, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.G(ctx).WithError(err).Warn("notify systemd")
	}
}
