package waypoint

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/pkg/dialer"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/statefork/statefork/shim/api"
)

// daemon is containerd as the shim's client sees it: it may go away and come
// back at any time, so calls wait for it.
type daemon struct {
	address string

	mu   sync.Mutex
	conn *grpc.ClientConn // dialled at first use
}

func newDaemon(address string) *daemon { return &daemon{address: address} }

func (d *daemon) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn == nil {
		return nil
	}
	err := d.conn.Close()
	d.conn = nil
	return err
}

func (d *daemon) connect() (*grpc.ClientConn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conn != nil {
		return d.conn, nil
	}
	conn, err := grpc.NewClient(dialer.DialAddress(d.address),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialer.ContextDialer),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %q: %w", d.address, err)
	}
	d.conn = conn
	return conn, nil
}

// record is a container's record in containerd, and the snapshotter it uses.
type record struct {
	id        string
	key       string // of the active snapshot
	snapshots snapshots.Snapshotter
}

// record reads the record of a container.
func (d *daemon) record(ctx context.Context, id string) (*record, error) {
	conn, err := d.connect()
	if err != nil {
		return nil, err
	}
	client := containersapi.NewContainersClient(conn)
	var resp *containersapi.GetContainerResponse
	err = persist(ctx, func() (err error) {
		resp, err = client.Get(ctx, &containersapi.GetContainerRequest{ID: id})
		return errgrpc.ToNative(err)
	})
	if err != nil {
		return nil, fmt.Errorf("read container record: %w", err)
	}
	if resp.Container.SnapshotKey == "" {
		return nil, fmt.Errorf("container has no snapshot (started with a root directory of its own?): %w", errdefs.ErrFailedPrecondition)
	}
	return &record{
		id:        id,
		key:       resp.Container.SnapshotKey,
		snapshots: proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), resp.Container.Snapshotter),
	}, nil
}

// nodes lists the nodes that were made of the container.
func (r *record) nodes(ctx context.Context) ([]*api.Node, error) {
	return r.walk(ctx, api.LabelContainer, r.id)
}

// node finds a node by id, of whichever container: a fork may go back to its
// source's nodes.
func (r *record) node(ctx context.Context, id string) (*api.Node, snapshots.Info, error) {
	if !api.IsNodeID(id) {
		return nil, snapshots.Info{}, fmt.Errorf("node %q: want the 12 hexadecimal digits of its id: %w", id, errdefs.ErrInvalidArgument)
	}
	nodes, err := r.walk(ctx, api.LabelNode, id)
	if err != nil {
		return nil, snapshots.Info{}, err
	}
	if len(nodes) == 0 {
		return nil, snapshots.Info{}, fmt.Errorf("node %q: %w", id, errdefs.ErrNotFound)
	}
	info, err := r.snapshots.Stat(ctx, nodes[0].Snapshot)
	if err != nil {
		return nil, info, fmt.Errorf("stat node %q: %w", id, err)
	}
	return nodes[0], info, nil
}

func (r *record) walk(ctx context.Context, label, value string) ([]*api.Node, error) {
	var nodes []*api.Node
	err := r.persistWalk(ctx, func() error {
		nodes = nil
		return r.snapshots.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			if n := api.NodeFromSnapshot(info); n != nil {
				nodes = append(nodes, n)
			}
			return nil
		}, labelFilter(label, value))
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return nodes, nil
}

// lastCommitOf returns the newest of the snapshots that were committed from
// key. It fails with ErrNotFound if there is none.
func (r *record) lastCommitOf(ctx context.Context, key string) (snapshots.Info, error) {
	var last snapshots.Info
	err := r.persistWalk(ctx, func() error {
		last = snapshots.Info{}
		return r.snapshots.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			if info.Kind == snapshots.KindCommitted && info.Created.After(last.Created) {
				last = info
			}
			return nil
		}, labelFilter(api.LabelHeadOf, key))
	})
	if err != nil {
		return last, fmt.Errorf("list snapshots: %w", err)
	}
	if last.Name == "" {
		return last, fmt.Errorf("active snapshot %q is missing and nothing was committed from it: %w", key, errdefs.ErrNotFound)
	}
	return last, nil
}

// persistWalk is persist for a walk over the snapshots. containerd gives its
// errors no class, so what is wrong is learned from another call.
func (r *record) persistWalk(ctx context.Context, walk func() error) error {
	return persist(ctx, func() error {
		err := walk()
		if err == nil || errdefs.IsUnavailable(err) {
			return err
		}
		if _, serr := r.snapshots.Stat(ctx, r.key); errdefs.IsUnavailable(serr) {
			return serr
		}
		return err
	})
}

func labelFilter(label, value string) string {
	return "labels." + strconv.Quote(label) + "==" + strconv.Quote(value)
}

// retryEvery is how long to wait where containerd answers but a part of it,
// such as the snapshotter's daemon, is away.
const retryEvery = 50 * time.Millisecond

// persist calls fn until it does something else than finding containerd away.
// fn must be safe to repeat after it may have had its effect.
func persist(ctx context.Context, fn func() error) error {
	for {
		err := fn()
		if !errdefs.IsUnavailable(err) {
			return err
		}
		timer := time.NewTimer(retryEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return errors.Join(err, ctx.Err())
		case <-timer.C:
		}
	}
}
