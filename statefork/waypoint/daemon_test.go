package waypoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/shim/api"
)

// need skips a test that cannot run on this machine; under CI it fails.
func need(t *testing.T, ok bool, what string) {
	t.Helper()
	if ok {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

// program finds a program in PATH or among those that the set-up has built.
func program(t *testing.T, name string) string {
	t.Helper()
	bin, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if path := filepath.Join(bin, name); isFile(path) {
		return path
	}
	path, err := exec.LookPath(name)
	need(t, err == nil, name)
	return path
}

func isFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// daemon is a private containerd with the runc shim.
type daemon struct {
	ctrd *containerd.Client
	dir  string
	// The snapshotter of the containers, by name and as a service.
	name string
	sn   snapshots.Snapshotter
	*Client
}

const configuration = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
  address = "%[1]s/sock"
[ttrpc]
  address = "%[1]s/sock.ttrpc"
[plugins."io.containerd.shim.v1.manager"]
  socket_dir = "%[1]s/s"
[proxy_plugins.statefork]
  type = "snapshot"
  address = "%[1]s/sn.sock"
`

// startDaemon runs containerd with its own root, state and sockets until the
// end of the test. The snapshotter is the stock one.
func startDaemon(t *testing.T) *daemon { return startDaemonOn(t, "overlayfs") }

func startDaemonOn(t *testing.T, snapshotter string) *daemon {
	t.Helper()
	need(t, os.Geteuid() == 0, "root")
	ctrd := program(t, "containerd")
	for _, name := range []string{"containerd-shim-runc-v2", "runc"} {
		program(t, name)
	}
	// A socket's path may have 107 bytes.
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(config, fmt.Appendf(nil, configuration, dir), 0o600); err != nil {
		t.Fatal(err)
	}
	if snapshotter == "statefork" {
		start(t, dir, program(t, "containerd-statefork-grpc"), "--root", filepath.Join(dir, "sn"), "--address", filepath.Join(dir, "sn.sock"))
	}
	start(t, dir, ctrd, "-c", config)
	return connectDaemon(t, dir, snapshotter)
}

// start runs a program until the end of the test; its log is told on failure.
func start(t *testing.T, dir, path string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(dir, filepath.Base(path)+".log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()
		if b, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s: %s", filepath.Base(path), b)
		}
	})
}

func connectDaemon(t *testing.T, dir, snapshotter string) *daemon {
	t.Helper()
	var ctrd *containerd.Client
	eventually(t, "containerd answers", func() error {
		var err error
		if ctrd, err = Connect(t.Context(), filepath.Join(dir, "sock")); err != nil {
			return err
		}
		_, err = ctrd.Version(t.Context())
		return err
	})
	t.Cleanup(func() { ctrd.Close() })
	return &daemon{
		ctrd: ctrd, dir: dir, name: snapshotter, sn: ctrd.SnapshotService(snapshotter),
		Client: New(ctrd, Options{State: filepath.Join(dir, "state")}),
	}
}

// eventually polls, because the condition is another process's.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("waited too long until %s: %v", what, err)
		case <-tick.C:
		}
	}
}

func scoped(t *testing.T) context.Context {
	return namespaces.WithNamespace(t.Context(), namespaces.Default)
}

// base commits a root file system with a shell in it.
func (d *daemon) base(t *testing.T) {
	t.Helper()
	ctx := scoped(t)
	busybox, err := exec.LookPath("busybox")
	need(t, err == nil, "a static busybox")
	mounts, err := d.sn.Prepare(ctx, "base-prep", "", keep())
	if err != nil {
		t.Fatal(err)
	}
	err = mount.WithTempMount(ctx, mounts, func(root string) error {
		for _, dir := range []string{"bin", "proc", "sys", "dev", "tmp", "etc"} {
			if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
				return err
			}
		}
		b, err := os.ReadFile(busybox)
		if err != nil {
			return err
		}
		return errors.Join(os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755),
			os.Symlink("busybox", filepath.Join(root, "bin/sh")), os.Symlink("busybox", filepath.Join(root, "bin/sleep")))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.sn.Commit(ctx, "base", "base-prep", keep()); err != nil {
		t.Fatal(err)
	}
}

func keep() snapshots.Opt {
	return snapshots.WithLabels(map[string]string{"containerd.io/gc.root": time.Now().UTC().Format(time.RFC3339)})
}

// create makes a container without a task on an active snapshot of "base".
func (d *daemon) create(t *testing.T, id, script string, labels map[string]string, opts ...oci.SpecOpts) containerd.Container {
	t.Helper()
	ctx := scoped(t)
	if _, err := d.sn.Prepare(ctx, id, "base", keep()); err != nil {
		t.Fatal(err)
	}
	opts = append([]oci.SpecOpts{oci.WithDefaultSpec(), oci.WithProcessArgs("sh", "-c", script), oci.WithDefaultPathEnv, withoutCgroupMount,
		// Other containers on this machine may have the same id.
		oci.WithCgroup("/" + filepath.Base(d.dir) + "-" + id)}, opts...)
	c, err := d.ctrd.NewContainer(ctx, id,
		containerd.WithSnapshotter(d.name), containerd.WithSnapshot(id),
		containerd.WithRuntime("io.containerd.runc.v2", &options.Options{Root: filepath.Join(d.dir, "runc")}),
		containerd.WithContainerLabels(labels), containerd.WithNewSpec(opts...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.destroy(t, id) })
	return c
}

func withoutCgroupMount(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	var kept []specs.Mount
	for _, m := range s.Mounts {
		if m.Type != "cgroup" {
			kept = append(kept, m)
		}
	}
	s.Mounts = kept
	return nil
}

// destroy ends a container that a test has left.
func (d *daemon) destroy(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), namespaces.Default), 20*time.Second)
	defer cancel()
	c, err := d.ctrd.LoadContainer(ctx, id)
	if err != nil {
		return
	}
	if task, err := c.Task(ctx, nil); err == nil {
		if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil {
			t.Errorf("delete task %q: %v", id, err)
		}
	}
	if err := c.Delete(ctx, containerd.WithSnapshotCleanup); err != nil {
		t.Errorf("delete container %q: %v", id, err)
	}
}

// seal makes a node of a container's active snapshot, as the shim does it. The
// process images are what dump writes into the directory that it is given.
func (d *daemon) seal(t *testing.T, id, node, parent, name string, dump func(images string)) {
	t.Helper()
	ctx := scoped(t)
	mounts, err := d.sn.Mounts(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	w, err := layer.FromMounts(mounts)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(w.Images(), 0o700); err != nil {
		t.Fatal(err)
	}
	if dump != nil {
		dump(w.Images())
	}
	labels := map[string]string{
		api.LabelNode: node, api.LabelContainer: id, api.LabelParent: parent, api.LabelName: name,
		api.LabelCreated: time.Now().UTC().Format(time.RFC3339Nano), api.LabelHeadOf: id,
		api.LabelImages: w.Images(), api.LabelImageBytes: "4096", api.LabelGCContainer: id,
		api.LabelUserPrefix + "step": "7",
	}
	for k, v := range labels {
		if v == "" {
			delete(labels, k)
		}
	}
	above := api.SnapshotName(id, node)
	if w.KeepsLineage() {
		info, err := d.sn.Stat(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		above = info.Parent
	}
	if err := d.sn.Commit(ctx, api.SnapshotName(id, node), id, snapshots.WithLabels(labels)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.sn.Prepare(ctx, id, above, snapshots.WithLabels(map[string]string{
		api.LabelFrom: node, api.LabelGCContainer: id,
	})); err != nil {
		t.Fatal(err)
	}
}

// flat makes a node that is no snapshot's parent, and has no images.
func (d *daemon) flat(t *testing.T, id, node, parent string) {
	t.Helper()
	key := "prep-" + node
	if _, err := d.sn.Prepare(scoped(t), key, "base", keep()); err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{api.LabelNode: node, api.LabelContainer: id, api.LabelGCContainer: id}
	if parent != "" {
		labels[api.LabelParent] = parent
	}
	if err := d.sn.Commit(scoped(t), api.SnapshotName(id, node), key, snapshots.WithLabels(labels)); err != nil {
		t.Fatal(err)
	}
}

// inventory is everything that containerd has, to compare before and after.
func (d *daemon) inventory(t *testing.T) string {
	t.Helper()
	ctx := scoped(t)
	var list []string
	recs, err := d.ctrd.ContainerService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range recs {
		list = append(list, fmt.Sprint("container ", r.ID, r.SnapshotKey, r.Labels))
	}
	infos, err := walk(ctx, d.sn)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range infos {
		list = append(list, fmt.Sprint("snapshot ", info.Name, info.Labels))
	}
	leases, err := d.ctrd.LeasesService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases {
		list = append(list, "lease "+l.ID)
	}
	tasks, err := d.statuses(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for id := range tasks {
		list = append(list, "task "+id)
	}
	return strings.Join(list, "\n")
}

// run starts a container's script and waits until it has printed "ready".
func (d *daemon) run(t *testing.T, c containerd.Container) containerd.Task {
	t.Helper()
	ctx := scoped(t)
	task, err := c.NewTask(ctx, cio.LogFile(filepath.Join(d.dir, c.ID()+".log")))
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Start(ctx); err != nil {
		t.Fatal(err)
	}
	d.waitLog(t, c.ID(), "ready")
	return task
}

func (d *daemon) waitLog(t *testing.T, id, text string) {
	t.Helper()
	eventually(t, id+" prints "+text, func() error {
		b, err := os.ReadFile(filepath.Join(d.dir, id+".log"))
		if err == nil && !strings.Contains(string(b), text) {
			err = fmt.Errorf("it has printed %q", b)
		}
		return err
	})
}
