package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork/waypoint"
)

// startContainer starts a container with the counter in it.
func startContainer(ctx context.Context, ns *testbed.Namespace, id, runtime, snapshotter string) (containerd.Container, error) {
	c, err := ns.Create(ctx, id, runtime, snapshotter, oci.WithProcessArgs("sh", "-c", counter))
	if err != nil {
		return nil, err
	}
	ctx = namespaces.WithNamespace(ctx, ns.NS)
	task, err := c.NewTask(ctx, cio.NullIO)
	if err != nil {
		return c, fmt.Errorf("create task %q: %w", id, err)
	}
	if err := task.Start(ctx); err != nil {
		return c, fmt.Errorf("start task %q: %w", id, err)
	}
	_, err = askFirst(ctx, int(task.Pid()))
	return c, err
}

// pidOf asks containerd for the process id of a container, which changes when
// the container is brought back.
func pidOf(ctx context.Context, ns *testbed.Namespace, id string) (int, error) {
	task, err := ns.Task(ctx, id)
	if err != nil {
		return 0, err
	}
	return int(task.Pid()), nil
}

// askIn is ask for a container.
func askIn(ctx context.Context, ns *testbed.Namespace, id string) (int, error) {
	pid, err := pidOf(ctx, ns, id)
	if err != nil {
		return 0, err
	}
	return ask(pid)
}

// answersIn is answers for a container.
func answersIn(ctx context.Context, ns *testbed.Namespace, id string, want int) error {
	pid, err := pidOf(ctx, ns, id)
	if err != nil {
		return err
	}
	return answers(pid, want)
}

// ours is the statefork command, on one of the snapshotters.
type ours struct {
	ns          *testbed.Namespace
	variant     string
	snapshotter string
	container   containerd.Container
}

func (o *ours) name() string { return o.variant }

func (o *ours) start(ctx context.Context) (err error) {
	o.container, err = startContainer(ctx, o.ns, o.variant, testbed.Runtime, o.snapshotter)
	return err
}

// run runs the command and reads what it prints.
func (o *ours) run(ctx context.Context, result any, args ...string) error {
	out, err := o.ns.Statefork(ctx, append([]string{"--json"}, args...)...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out.Stdout), result); err != nil {
		return fmt.Errorf("read output of statefork %s: %w", args[0], err)
	}
	return nil
}

func (o *ours) round(ctx context.Context, n int) ([]sample, error) {
	id := o.container.ID()
	count, err := askIn(ctx, o.ns, id)
	if err != nil {
		return nil, err
	}
	var made, back waypoint.Result
	checkpoint, err := timed(opCheckpoint, func() error {
		if err := o.run(ctx, &made, "checkpoint", id); err != nil {
			return err
		}
		return answersIn(ctx, o.ns, id, count+1)
	})
	if err != nil {
		return nil, err
	}
	restore, err := timed(opRestore, func() error {
		if err := o.run(ctx, &back, "restore", id, made.Node.ID); err != nil {
			return err
		}
		return answersIn(ctx, o.ns, id, count+1)
	})
	if err != nil {
		return nil, err
	}
	fork, err := o.fork(ctx, id+"@"+made.Node.ID, fmt.Sprintf("%s-fork-%d", o.variant, n), count+1)
	if err != nil {
		return nil, err
	}
	samples := append([]sample{checkpoint}, phases(opCheckpoint, made.Timings)...)
	samples = append(append(samples, restore), phases(opRestore, back.Timings)...)
	return append(samples, fork), nil
}

// fork times a sibling until it answers, and removes it.
func (o *ours) fork(ctx context.Context, node, name string, want int) (sample, error) {
	var forked waypoint.ForkResult
	took, err := timed(opFork, func() error {
		if err := o.run(ctx, &forked, "fork", node, "--name", name); err != nil {
			return err
		}
		return answers(int(forked.Siblings[0].PID), want)
	})
	if err != nil {
		return took, err
	}
	c, err := o.ns.Find(ctx, forked.Siblings[0].ID)
	if err != nil {
		return took, err
	}
	return took, testbed.Destroy(namespaces.WithNamespace(ctx, o.ns.NS), c)
}

// phases are the shim's own times. Some operations lack some.
func phases(operation string, t waypoint.Timings) []sample {
	var samples []sample
	for _, p := range []struct {
		name string
		took time.Duration
	}{{"shim", t.Total}, {"frozen", t.Frozen}, {"dump", t.Dump}, {"snapshot", t.Snapshot}, {"restore", t.Restore}} {
		if p.took > 0 {
			samples = append(samples, sample{operation + "." + p.name, p.took})
		}
	}
	return samples
}

func (o *ours) stop(ctx context.Context) error {
	if o.container == nil {
		return nil
	}
	return testbed.Destroy(namespaces.WithNamespace(ctx, o.ns.NS), o.container)
}

// stock is containerd's checkpoint image: "ctr containers checkpoint --task
// --rw", and what "ctr containers restore --live --rw" does. That command would
// leave pipes for the task's output in /run, so it is its calls that are timed.
type stock struct {
	ns        *testbed.Namespace
	container containerd.Container
}

func (s *stock) name() string { return "containerd" }

func (s *stock) start(ctx context.Context) (err error) {
	s.container, err = startContainer(ctx, s.ns, "stock", "io.containerd.runc.v2", testbed.Stock)
	return err
}

func (s *stock) round(ctx context.Context, n int) ([]sample, error) {
	id, next, ref := s.container.ID(), fmt.Sprintf("stock-%d", n), fmt.Sprintf("localhost/checkpoint:%d", n)
	count, err := askIn(ctx, s.ns, id)
	if err != nil {
		return nil, err
	}
	made, err := timed(opCheckpoint, func() error {
		if _, err := s.ns.Ctr(ctx, "containers", "checkpoint", "--task", "--rw", id, ref); err != nil {
			return err
		}
		return answersIn(ctx, s.ns, id, count+1)
	})
	if err != nil {
		return nil, err
	}
	// The new container gets the old one's spec, with its cgroup, which must be
	// empty then. It is the next round's source.
	ctx = namespaces.WithNamespace(ctx, s.ns.NS)
	if err := testbed.Destroy(ctx, s.container); err != nil {
		return nil, err
	}
	restored, err := timed(opFork, func() error {
		if err := s.restore(ctx, next, ref); err != nil {
			return err
		}
		return answersIn(ctx, s.ns, next, count+1)
	})
	if err != nil {
		return nil, err
	}
	return []sample{made, restored}, s.ns.Client().ImageService().Delete(ctx, ref)
}

func (s *stock) restore(ctx context.Context, id, ref string) error {
	img, err := s.ns.Client().GetImage(ctx, ref)
	if err != nil {
		return err
	}
	c, err := s.ns.Client().Restore(ctx, id, img,
		containerd.WithRestoreImage, containerd.WithRestoreSpec, containerd.WithRestoreRuntime, containerd.WithRestoreRW)
	if err != nil {
		return err
	}
	s.container = c
	task, err := c.NewTask(ctx, cio.NullIO, containerd.WithTaskCheckpoint(img))
	if err != nil {
		return fmt.Errorf("create task %q: %w", id, err)
	}
	return task.Start(ctx)
}

func (s *stock) stop(ctx context.Context) error {
	if s.container == nil {
		return nil
	}
	return testbed.Destroy(namespaces.WithNamespace(ctx, s.ns.NS), s.container)
}
