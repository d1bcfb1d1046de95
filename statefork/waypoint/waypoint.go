// Package waypoint makes and brings back branch points of containers that run
// under the statefork shim.
//
// It keeps no state of its own. Nodes are snapshots with labels in containerd,
// a running container's shim carries out checkpoints and restores, and a fork
// is an ordinary container record that is started from a node's process images.
// So everything here can be read with containerd's own tools, works after a
// restart of any part, and several callers may work at the same time.
//
// Errors carry containerd's errdefs classes and, through statefork.Hint, what
// the user can do: ErrNotFound for an unknown container or node,
// ErrFailedPrecondition for a container that cannot do this now,
// ErrUnavailable for a daemon or shim that does not answer.
package waypoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// LabelForkedFrom on a container holds "<container>@<node>" of its origin.
const LabelForkedFrom = "io.statefork.forked-from"

// undoTimeout bounds the clean-up after a failure, which goes on when the
// caller's context has ended.
const undoTimeout = 30 * time.Second

// Options of a Client; the zero value has the defaults of containerd.
type Options struct {
	// Namespace is the containerd namespace, by default "default".
	Namespace string
	// State is the state directory of containerd, by default /run/containerd.
	State string
}

// Client works on the containers of one containerd namespace. It may be used
// by many goroutines.
type Client struct {
	ctrd *containerd.Client
	opts Options
}

// Connect returns a client of the containerd that listens on a unix socket.
// Nobody there gives ErrUnavailable at once; containerd's own client would go
// on trying for ten seconds.
func Connect(ctx context.Context, address string) (*containerd.Client, error) {
	address = strings.TrimPrefix(address, "unix://")
	conn, err := new(net.Dialer).DialContext(ctx, "unix", address)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
		}
		return nil, fmt.Errorf("connect to containerd: %w", err)
	}
	conn.Close()
	ctrd, err := containerd.New(address)
	if err != nil {
		return nil, fmt.Errorf("connect to containerd: %w", err)
	}
	return ctrd, nil
}

// New returns a client over ctrd, which stays the caller's to close.
func New(ctrd *containerd.Client, opts Options) *Client {
	if opts.Namespace == "" {
		opts.Namespace = namespaces.Default
	}
	if opts.State == "" {
		opts.State = api.DefaultState
	}
	return &Client{ctrd: ctrd, opts: opts}
}

func (c *Client) scope(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, c.opts.Namespace)
}

// undo returns a context for clean-up: it has the values of ctx, not its end.
func undo(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}

// snapshotter is where the container's layers are.
func (c *Client) snapshotter(rec containers.Container) (snapshots.Snapshotter, error) {
	if rec.Snapshotter == "" || rec.SnapshotKey == "" {
		return nil, statefork.WithHint(
			fmt.Errorf("container %q has no snapshot: %w", rec.ID, errdefs.ErrFailedPrecondition),
			"create it from an image")
	}
	return c.ctrd.SnapshotService(rec.Snapshotter), nil
}

// dial reaches the shim of a container's task. A container without a running
// task gives ErrFailedPrecondition.
func (c *Client) dial(ctx context.Context, rec containers.Container) (*api.Client, error) {
	shim, err := api.Dial(ctx, api.Config{State: c.opts.State, Namespace: c.opts.Namespace, ContainerID: rec.ID})
	if errdefs.IsNotFound(err) {
		return nil, c.explainNoBundle(ctx, rec)
	}
	return shim, explain(err, rec)
}

// explainNoBundle tells a container that does not run from a state directory
// that is not this containerd's.
func (c *Client) explainNoBundle(ctx context.Context, rec containers.Container) error {
	status, err := c.status(ctx, rec.ID)
	if err != nil {
		return err
	}
	if status.Status == statusNone {
		return statefork.WithHint(
			fmt.Errorf("task of container %q is not running: %w", rec.ID, errdefs.ErrFailedPrecondition),
			"start the container first")
	}
	return statefork.WithHint(
		fmt.Errorf("task %q is %s but has no bundle in %q: %w", rec.ID, status.Status, c.opts.State, errdefs.ErrUnavailable),
		"give containerd's state directory")
}

// explain adds to an error of the shim what the user can do.
func explain(err error, rec containers.Container) error {
	switch {
	case err == nil || statefork.Hint(err) != "":
		return err
	case errors.Is(err, api.ErrNoService):
		hint := "run it with the runtime " + api.RuntimeName
		if rec.Runtime.Name == api.RuntimeName {
			hint = "restart it under the installed version of the shim"
		}
		return statefork.WithHint(
			fmt.Errorf("container %q runs under %q: %w: %w", rec.ID, rec.Runtime.Name, api.ErrNoService, errdefs.ErrFailedPrecondition), hint)
	case errors.Is(err, api.ErrGone):
		return statefork.WithHint(err, "see whether its shim still runs")
	case errdefs.IsUnavailable(err):
		// What the shim needs, such as criu or the kernel's support for it.
		return statefork.WithHint(err, "see \"statefork doctor\"")
	case errdefs.IsNotImplemented(err):
		return statefork.WithHint(err, "create the container with the snapshotter statefork or overlayfs")
	}
	return err
}
