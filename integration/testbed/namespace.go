package testbed

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/identity"
)

// scope gives ctx the namespace.
func (n *Namespace) scope(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, n.NS)
}

// Empty fails if there is a container in the namespace, and discards everything
// in it.
func (n *Namespace) Empty(ctx context.Context) error {
	ctx = n.scope(ctx)
	all, err := n.client.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, fmt.Errorf("container %q of namespace %q was not removed", c.ID(), n.NS))
	}
	return errors.Join(append(errs, n.Discard(ctx))...)
}

// Discard ends and removes every container of the namespace, and its images.
func (n *Namespace) Discard(ctx context.Context) error {
	ctx = n.scope(ctx)
	all, err := n.client.Containers(ctx)
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, Destroy(ctx, c))
	}
	imgs, err := n.client.ImageService().List(ctx)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, img := range imgs {
		if err := n.client.ImageService().Delete(ctx, img.Name); err != nil {
			errs = append(errs, fmt.Errorf("delete image %q: %w", img.Name, err))
		}
	}
	errs = append(errs, n.CollectGarbage(ctx))
	n.removeParents()
	return errors.Join(errs...)
}

// Destroy kills the task of a container, if it has one, and removes both.
func Destroy(ctx context.Context, c containerd.Container) error {
	task, err := c.Task(ctx, nil)
	if err == nil {
		_, err = task.Delete(ctx, containerd.WithProcessKill)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete task %q: %w", c.ID(), err)
	}
	if err := c.Delete(ctx, containerd.WithSnapshotCleanup); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete container %q: %w", c.ID(), err)
	}
	return nil
}

// CollectGarbage has containerd's collector run, and returns when it is done.
func (n *Namespace) CollectGarbage(ctx context.Context) error {
	ctx = n.scope(ctx)
	l, err := n.client.LeasesService().Create(ctx, leases.WithRandomID())
	if err != nil {
		return fmt.Errorf("collect garbage: %w", err)
	}
	if err := n.client.LeasesService().Delete(ctx, l, leases.SynchronousDelete); err != nil {
		return fmt.Errorf("collect garbage: %w", err)
	}
	return nil
}

// Check fails with a Leftovers if the namespace has anything but its images
// when all of its containers have been removed.
func (n *Namespace) Check(ctx context.Context) error {
	ctx = n.scope(ctx)
	return Poll(ctx, n.Settle, func(context.Context) error {
		// under the caller's own context, so that the last try is a whole one
		if err := n.CollectGarbage(ctx); err != nil {
			return Permanent(err)
		}
		left, err := n.list(ctx)
		if err != nil {
			return Permanent(err)
		}
		if len(left) > 0 {
			return &Leftovers{Of: "namespace " + n.NS, Items: left}
		}
		return nil
	})
}

// list is what there is in the namespace beside images.
func (n *Namespace) list(ctx context.Context) ([]Item, error) {
	var left []Item
	add := func(kind, name string) { left = append(left, Item{Kind: kind, Name: name, Ours: true}) }
	all, err := n.client.Containers(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	for _, c := range all {
		add("container", c.ID())
	}
	ls, err := n.client.LeasesService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	for _, l := range ls {
		add("lease", l.ID)
	}
	for _, name := range []string{Stock, Snapshotter} {
		if err := n.listSnapshots(ctx, name, add); err != nil {
			return nil, err
		}
	}
	if err := n.listDirs(add); err != nil {
		return nil, err
	}
	return left, n.listMachine(add)
}

// listSnapshots lists those that are no image's.
func (n *Namespace) listSnapshots(ctx context.Context, snapshotter string, add func(kind, name string)) error {
	chains := map[string]bool{}
	imgs, err := n.client.ListImages(ctx)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, img := range imgs {
		diffs, err := img.RootFS(ctx)
		if errdefs.IsNotFound(err) {
			continue // of another kind, such as a checkpoint
		}
		if err != nil {
			return fmt.Errorf("read layers of image %q: %w", img.Name(), err)
		}
		for i := range diffs {
			chains[identity.ChainID(diffs[:i+1]).String()] = true
		}
	}
	err = n.client.SnapshotService(snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if !chains[info.Name] {
			add("snapshot", snapshotter+"/"+info.Name)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list snapshots of %q: %w", snapshotter, err)
	}
	return nil
}

// listDirs lists bundles and what nerdctl keeps of containers.
func (n *Namespace) listDirs(add func(kind, name string)) error {
	patterns := []string{
		filepath.Join(n.State(), "io.containerd.runtime.v2.task", n.NS, "*"),
		filepath.Join(n.Dir, "root", "io.containerd.runtime.v2.task", n.NS, "*"),
		filepath.Join(n.Dir, "nerdctl", "*", "containers", n.NS, "*"),
		filepath.Join(n.Dir, "nerdctl", "*", "names", n.NS, "*"),
		filepath.Join(n.Dir, "nerdctl", "*", "etchosts", n.NS, "*"),
	}
	for _, p := range patterns {
		names, err := filepath.Glob(p)
		if err != nil {
			return err
		}
		for _, name := range names {
			if base := filepath.Base(name); base != ".lock" && base != "lock" {
				add("file", name)
			}
		}
	}
	return nil
}

// listMachine lists the processes, mounts and cgroups that carry the
// namespace's name.
func (n *Namespace) listMachine(add func(kind, name string)) error {
	inv, err := TakeInventory(n.NS)
	if err != nil {
		return err
	}
	for _, i := range inv.New(nil) {
		if i.Ours && !n.isParent(i) {
			add(i.Kind, i.Name)
		}
	}
	return nil
}

// isParent says that an item is what holds all containers of the namespace, in
// a hierarchy of cgroups or in a runtime's state. Runtimes leave these.
func (n *Namespace) isParent(i Item) bool {
	return slices.Contains(n.parents(), i.Name)
}

func (n *Namespace) parents() []string {
	var all []string
	for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*", "/run/containerd/*"} {
		// the pattern is well formed
		names, _ := filepath.Glob(filepath.Join(pattern, n.NS))
		all = append(all, names...)
	}
	return all
}

// removeParents removes them if they are empty.
func (n *Namespace) removeParents() {
	for _, name := range n.parents() {
		_ = syscall.Rmdir(name) // what stays is reported as a leftover
	}
}

// LayerDirs lists the directories of layers on disk, of both snapshotters.
func (tb *Testbed) LayerDirs() ([]string, error) {
	var dirs []string
	for _, p := range []string{"layers/l/*", "layers/m/*", "root/io.containerd.snapshotter.v1.overlayfs/snapshots/*"} {
		names, err := filepath.Glob(filepath.Join(tb.Dir, p))
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, names...)
	}
	return dirs, nil
}
