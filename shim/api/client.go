package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// DefaultState is the state directory of a containerd that was not told another.
const DefaultState = "/run/containerd"

const (
	// taskDir holds the bundles, one directory for each namespace and task.
	taskDir     = "io.containerd.runtime.v2.task"
	serviceName = "io.statefork.waypoint.v1.Waypoint"
	// A shim accepts at once: a longer wait means that it hangs.
	dialTimeout = 10 * time.Second
)

// Config says which task's shim Dial shall reach.
type Config struct {
	// State is containerd's state directory; empty means DefaultState.
	State string
	// Namespace is the containerd namespace of the container.
	Namespace string
	// ContainerID is the container whose task is served by the shim.
	ContainerID string
}

// Client calls the Waypoint service of one task's shim. Its errors have
// containerd's errdefs classes; ErrFailedPrecondition with ErrNoService inside
// means that the shim is another runtime's. It may be used by many goroutines.
type Client struct {
	conn    *ttrpc.Client
	service WaypointService
	cfg     Config
}

var (
	// ErrNoService says that a task runs under a shim that does not serve
	// Waypoint.
	ErrNoService = errors.New("the task's shim does not serve checkpoints")
	// ErrGone says that the shim does not answer, or has gone during a call.
	ErrGone = errors.New("the task's shim is gone")
)

// Dial connects to the shim of a task by what the task's bundle says of it.
// It fails with ErrNotFound when there is no bundle, which means that the task
// does not run; with ErrUnavailable when the bundle is there but nobody listens;
// with ErrInvalidArgument when a name cannot be part of a path.
func Dial(ctx context.Context, cfg Config) (*Client, error) {
	if cfg.State == "" {
		cfg.State = DefaultState
	}
	if err := identifiers.Validate(cfg.Namespace); err != nil {
		return nil, fmt.Errorf("check namespace: %w", err)
	}
	if err := identifiers.Validate(cfg.ContainerID); err != nil {
		return nil, fmt.Errorf("check container id: %w", err)
	}
	address, err := SocketOf(filepath.Join(cfg.State, taskDir, cfg.Namespace, cfg.ContainerID))
	if err != nil {
		return nil, fmt.Errorf("find shim of task %q: %w", cfg.ContainerID, err)
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", address)
	if err != nil {
		if ctx.Err() == nil && (errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)) {
			err = fmt.Errorf("%w: %w: %w", ErrGone, err, errdefs.ErrUnavailable)
		}
		return nil, fmt.Errorf("connect to shim of task %q: %w", cfg.ContainerID, err)
	}
	c := ttrpc.NewClient(conn)
	return &Client{conn: c, service: NewWaypointClient(c), cfg: cfg}, nil
}

// SocketOf returns the path of the socket of a bundle's shim, as containerd has
// kept it there. It fails with ErrNotFound if containerd has not.
func SocketOf(bundle string) (string, error) {
	path := filepath.Join(bundle, "bootstrap.json")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	}
	if err != nil {
		return "", err
	}
	var boot struct {
		Address  string `json:"address"`
		Protocol string `json:"protocol"`
	}
	if err := json.Unmarshal(b, &boot); err != nil {
		return "", fmt.Errorf("read %q: %w: %w", path, err, errdefs.ErrDataLoss)
	}
	if boot.Protocol != "ttrpc" {
		return "", fmt.Errorf("shim speaks %q: %w: %w", boot.Protocol, ErrNoService, errdefs.ErrFailedPrecondition)
	}
	address, ok := strings.CutPrefix(boot.Address, "unix://")
	if !ok || !filepath.IsAbs(address) {
		return "", fmt.Errorf("address %q in %q is no unix socket: %w", boot.Address, path, errdefs.ErrDataLoss)
	}
	return address, nil
}

// Close ends the connection; calls under way fail with ErrUnavailable.
func (c *Client) Close() error { return c.conn.Close() }

// Checkpoint seals the running container as a node.
func (c *Client) Checkpoint(ctx context.Context, name string, labels map[string]string) (*CheckpointResponse, error) {
	resp, err := c.service.Checkpoint(c.outgoing(ctx), &CheckpointRequest{
		ContainerId: c.cfg.ContainerID,
		Name:        name,
		Labels:      labels,
	})
	if err != nil {
		return nil, toNative(err)
	}
	return resp, nil
}

// Restore moves the running container to a node.
func (c *Client) Restore(ctx context.Context, node string) (*RestoreResponse, error) {
	resp, err := c.service.Restore(c.outgoing(ctx), &RestoreRequest{ContainerId: c.cfg.ContainerID, Node: node})
	if err != nil {
		return nil, toNative(err)
	}
	return resp, nil
}

// List returns the container's nodes and where it stands among them.
func (c *Client) List(ctx context.Context) (*ListResponse, error) {
	resp, err := c.service.List(c.outgoing(ctx), &ListRequest{ContainerId: c.cfg.ContainerID})
	if err != nil {
		return nil, toNative(err)
	}
	return resp, nil
}

func (c *Client) outgoing(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, c.cfg.Namespace)
}

// toNative gives an error from the wire its errdefs class; the shim has said
// already what it was doing and to which container. A missing service
// and a method's own ErrNotImplemented have the same code, so they are told
// apart by ttrpc's message.
func toNative(err error) error {
	if errors.Is(err, ttrpc.ErrClosed) || errors.Is(err, ttrpc.ErrServerClosed) {
		return fmt.Errorf("%w: %w: %w", ErrGone, err, errdefs.ErrUnavailable)
	}
	if s, ok := status.FromError(err); ok && s.Code() == codes.Unimplemented && s.Message() == "service "+serviceName {
		return fmt.Errorf("%w: %w", ErrNoService, errdefs.ErrFailedPrecondition)
	}
	return errgrpc.ToNative(err)
}
