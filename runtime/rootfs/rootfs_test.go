package rootfs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
)

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("needs root")
	}
	t.Skip("needs root")
}

func mounted(t *testing.T, dir string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), " "+dir+" ")
}

func tmpfs(options ...string) mount.Mount {
	return mount.Mount{Type: "tmpfs", Source: "tmpfs", Options: options}
}

func TestMountAndUnmount(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	if err := Mount([]mount.Mount{tmpfs("size=1m"), tmpfs("size=2m")}, dir); err != nil {
		t.Fatal(err)
	}
	if got := mounted(t, dir); got != 2 {
		t.Errorf("%d mounts, want 2", got)
	}
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Mount([]mount.Mount{tmpfs()}, below); err != nil {
		t.Fatal(err)
	}
	// Twice: the second time there is nothing to do.
	for range 2 {
		if err := Unmount(dir); err != nil {
			t.Fatal(err)
		}
	}
	if got := mounted(t, dir) + mounted(t, below); got != 0 {
		t.Errorf("%d mounts are left", got)
	}
	if err := Unmount(filepath.Join(dir, "missing")); err != nil {
		t.Errorf("unmount of a missing directory: %v", err)
	}
}

// TestMountFails has none of the mounts left if one cannot be mounted.
func TestMountFails(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	err := Mount([]mount.Mount{tmpfs(), {Type: "no-such-type", Source: "x"}}, dir)
	if err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want an error that names %q", err, dir)
	}
	if got := mounted(t, dir); got != 0 {
		t.Errorf("%d mounts are left", got)
	}
}

// TestUnmountBusy takes a root down that somebody has a file open in.
func TestUnmountBusy(t *testing.T) {
	requireRoot(t)
	dir := t.TempDir()
	if err := Mount([]mount.Mount{tmpfs()}, dir); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "held"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Unmount(dir); err != nil {
		t.Fatal(err)
	}
	if got := mounted(t, dir); got != 0 {
		t.Errorf("%d mounts are left", got)
	}
	if _, err := f.WriteString("still there"); err != nil {
		t.Error(err)
	}
}
