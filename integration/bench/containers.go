package main

import (
	"context"
	"fmt"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork/waypoint"
)

// idle is the process that is measured: it has about one MiB and does nothing.
var idle = []string{"sleep", "1000000"}

// startContainer starts an idle container and returns it.
func startContainer(ctx context.Context, ns *testbed.Namespace, id, runtime, snapshotter string) (containerd.Container, error) {
	c, err := ns.Create(ctx, id, runtime, snapshotter, oci.WithProcessArgs(idle...))
	if err != nil {
		return nil, err
	}
	ctx = namespaces.WithNamespace(ctx, ns.NS)
	task, err := c.NewTask(ctx, cio.NullIO)
	if err != nil {
		return c, fmt.Errorf("create task: %w", err)
	}
	if err := task.Start(ctx); err != nil {
		return c, fmt.Errorf("start task: %w", err)
	}
	return c, nil
}

// ours is statefork, as its Go library.
type ours struct {
	ns          *testbed.Namespace
	snapshotter string

	lib       *waypoint.Client
	container containerd.Container
}

func (o *ours) name() string { return "statefork, snapshotter " + o.snapshotter }

func (o *ours) start(ctx context.Context) (err error) {
	o.lib = waypoint.New(o.ns.Client(), waypoint.Options{Namespace: o.ns.NS, State: o.ns.State()})
	o.container, err = startContainer(ctx, o.ns, "on-"+o.snapshotter, testbed.Runtime, o.snapshotter)
	return err
}

func (o *ours) round(ctx context.Context, n int) ([]sample, error) {
	id := o.container.ID()
	var made, back *waypoint.Result
	checkpoint, err := timed("checkpoint, going on in place", func() (err error) {
		made, err = o.lib.Checkpoint(ctx, id, "", nil)
		return err
	})
	if err != nil {
		return nil, err
	}
	restore, err := timed("restore in place", func() (err error) {
		back, err = o.lib.Restore(ctx, id, made.Node.ID)
		return err
	})
	if err != nil {
		return nil, err
	}
	var forked *waypoint.ForkResult
	fork, err := timed("fork", func() (err error) {
		forked, err = o.lib.Fork(ctx, id+"@"+made.Node.ID, waypoint.ForkOptions{Name: fmt.Sprintf("%s-fork-%d", id, n)})
		if err == nil {
			err = forked.Err()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return []sample{
		checkpoint, {"frozen by the checkpoint", made.Timings.Frozen},
		restore, {"frozen by the restore", back.Timings.Frozen},
		fork,
	}, o.remove(ctx, forked.Siblings[0].ID)
}

func (o *ours) remove(ctx context.Context, id string) error {
	c, err := o.ns.Find(ctx, id)
	if err != nil {
		return err
	}
	return testbed.Destroy(namespaces.WithNamespace(ctx, o.ns.NS), c)
}

func (o *ours) stop(ctx context.Context) error {
	if o.container == nil {
		return nil
	}
	return testbed.Destroy(namespaces.WithNamespace(ctx, o.ns.NS), o.container)
}

// stock is what "ctr containers checkpoint --task --rw" and "ctr containers
// restore --live" do, without the start of ctr itself.
type stock struct {
	ns        *testbed.Namespace
	container containerd.Container
}

const checkpointImage = "localhost/checkpoint"

func (s *stock) name() string { return "containerd's checkpoint image, runtime runc" }

func (s *stock) start(ctx context.Context) (err error) {
	s.container, err = startContainer(ctx, s.ns, "stock", "io.containerd.runc.v2", testbed.Stock)
	return err
}

func (s *stock) round(ctx context.Context, n int) ([]sample, error) {
	ctx = namespaces.WithNamespace(ctx, s.ns.NS)
	ref, id := fmt.Sprintf("%s:%d", checkpointImage, n), fmt.Sprintf("stock-%d", n)
	var img containerd.Image
	made, err := timed("checkpoint, left running", func() (err error) {
		img, err = s.container.Checkpoint(ctx, ref,
			containerd.WithCheckpointImage, containerd.WithCheckpointRuntime, containerd.WithCheckpointTask, containerd.WithCheckpointRW)
		return err
	})
	if err != nil {
		return nil, err
	}
	// The new container gets the old one's spec, with its cgroup, which must be
	// empty then. It is the next round's source.
	if err := testbed.Destroy(ctx, s.container); err != nil {
		return nil, err
	}
	restored, err := timed("restore as a new container", func() (err error) {
		s.container, err = s.restore(ctx, id, img)
		return err
	})
	if err != nil {
		return nil, err
	}
	return []sample{made, restored}, s.ns.Client().ImageService().Delete(ctx, ref)
}

func (s *stock) restore(ctx context.Context, id string, img containerd.Image) (containerd.Container, error) {
	c, err := s.ns.Client().Restore(ctx, id, img,
		containerd.WithRestoreImage, containerd.WithRestoreSpec, containerd.WithRestoreRuntime, containerd.WithRestoreRW)
	if err != nil {
		return s.container, err
	}
	task, err := c.NewTask(ctx, cio.NullIO, containerd.WithTaskCheckpoint(img))
	if err != nil {
		return c, fmt.Errorf("create task: %w", err)
	}
	return c, task.Start(ctx)
}

func (s *stock) stop(ctx context.Context) error {
	if s.container == nil {
		return nil
	}
	return testbed.Destroy(namespaces.WithNamespace(ctx, s.ns.NS), s.container)
}
