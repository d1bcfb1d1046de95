package testbed

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
)

// Find returns the container with that id or nerdctl name.
func (n *Namespace) Find(ctx context.Context, ref string) (containerd.Container, error) {
	ctx = n.scope(ctx)
	found, err := n.client.Containers(ctx, fmt.Sprintf("id==%q", ref), fmt.Sprintf(`labels."nerdctl/name"==%q`, ref))
	if err != nil {
		return nil, fmt.Errorf("find container %q: %w", ref, err)
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("find container %q: there are %d: %w", ref, len(found), errdefs.ErrNotFound)
	}
	return found[0], nil
}

// Task returns the task of a container, without its output.
func (n *Namespace) Task(ctx context.Context, ref string) (containerd.Task, error) {
	ctx = n.scope(ctx)
	c, err := n.Find(ctx, ref)
	if err != nil {
		return nil, err
	}
	task, err := c.Task(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("find task %q: %w", ref, err)
	}
	return task, nil
}

// ExecIn runs a command in a container, without a tool in between, and fails
// unless it exits with 0. When it returns, the process has been removed.
func (n *Namespace) ExecIn(ctx context.Context, ref string, args ...string) (out Output, retErr error) {
	ctx, cancel := context.WithTimeout(n.scope(ctx), commandTimeout)
	defer cancel()
	var stdout, stderr bytes.Buffer
	p, err := n.StartIn(ctx, ref, cio.WithStreams(nil, &stdout, &stderr), args...)
	if err != nil {
		return out, err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if _, err := p.Delete(undo, containerd.WithProcessKill); err != nil && !errdefs.IsNotFound(err) {
			retErr = errors.Join(retErr, fmt.Errorf("delete exec in container %q: %w", ref, err))
		}
		out.Stdout, out.Stderr = stdout.String(), stderr.String()
	}()
	exited, err := p.Wait(ctx)
	if err != nil {
		return out, fmt.Errorf("wait for exec in container %q: %w", ref, err)
	}
	if err := p.Start(ctx); err != nil {
		return out, fmt.Errorf("start exec in container %q: %w", ref, err)
	}
	status := <-exited
	code, _, err := status.Result()
	if err != nil {
		return out, fmt.Errorf("wait for exec in container %q: %w", ref, err)
	}
	p.IO().Wait()
	out.Code = int(code)
	if code != 0 {
		return out, fmt.Errorf("exec %q in container %q: exit code %d\n%s%s", args, ref, code, stdout.String(), stderr.String())
	}
	return out, nil
}

// StartIn prepares a command in a container; the caller starts and deletes it.
func (n *Namespace) StartIn(ctx context.Context, ref string, io cio.Opt, args ...string) (containerd.Process, error) {
	ctx = n.scope(ctx)
	task, err := n.Task(ctx, ref)
	if err != nil {
		return nil, err
	}
	spec, err := task.Spec(ctx)
	if err != nil {
		return nil, fmt.Errorf("read spec of container %q: %w", ref, err)
	}
	process := *spec.Process
	process.Args, process.Terminal = args, false
	p, err := task.Exec(ctx, "exec-"+rand.Text()[:10], &process, cio.NewCreator(io, cio.WithFIFODir(n.path("fifo"))))
	if err != nil {
		return nil, fmt.Errorf("exec in container %q: %w", ref, err)
	}
	return p, nil
}

// Create makes a container of our runtime with containerd's client alone, for
// what nerdctl does not offer.
func (n *Namespace) Create(ctx context.Context, id, runtime, snapshotter string, opts ...oci.SpecOpts) (containerd.Container, error) {
	ctx = n.scope(ctx)
	img, err := n.client.GetImage(ctx, Busybox)
	if err != nil {
		return nil, fmt.Errorf("create container %q: %w", id, err)
	}
	opts = append([]oci.SpecOpts{oci.WithImageConfig(img), oci.WithCgroup("/" + n.NS + "/" + id)}, opts...)
	c, err := n.client.NewContainer(ctx, id,
		containerd.WithSnapshotter(snapshotter),
		containerd.WithNewSnapshot(id, img),
		containerd.WithRuntime(runtime, nil),
		containerd.WithNewSpec(opts...))
	if err != nil {
		return nil, fmt.Errorf("create container %q: %w", id, err)
	}
	return c, nil
}

// FIFODir is where the pipes to a task's output go.
func (tb *Testbed) FIFODir() string { return tb.path("fifo") }

// ShimOf returns the process id of a container's shim.
func (n *Namespace) ShimOf(id string) (int, error) {
	procs, err := readProcesses(marking{n.Dir})
	if err != nil {
		return 0, err
	}
	for _, p := range procs {
		if p.ours && containsAll(p.name, "containerd-shim-", " -namespace "+n.NS+" ", " -id "+id+" ") {
			return p.pid, nil
		}
	}
	return 0, fmt.Errorf("find shim of container %q: %w", id, syscall.ESRCH)
}
