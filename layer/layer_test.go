package layer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

func overlay(options ...string) []mount.Mount {
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
}

func TestFromMounts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mounts []mount.Mount
		want   Writable
		is     func(error) bool
	}{
		{"writable", overlay("index=off", "workdir=/r/m/1/work", "upperdir=/r/l/1", "lowerdir=/r/l/0"),
			Writable{Upperdir: "/r/l/1", Workdir: "/r/m/1/work"}, nil},
		{"readonly", overlay("lowerdir=/r/l/1:/r/l/0"), Writable{}, errdefs.IsFailedPrecondition},
		{"no workdir", overlay("upperdir=/r/l/1", "lowerdir=/r/l/0"), Writable{}, errdefs.IsFailedPrecondition},
		{"bind", []mount.Mount{{Type: "bind", Source: "/r/l/1", Options: []string{"rw"}}}, Writable{}, errdefs.IsNotImplemented},
		{"nothing", nil, Writable{}, errdefs.IsNotImplemented},
		{"two mounts", append(overlay("upperdir=/a", "workdir=/b"), overlay()...), Writable{}, errdefs.IsNotImplemented},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := FromMounts(tt.mounts)
			if tt.is != nil {
				if !tt.is(err) {
					t.Errorf("unexpected error %v", err)
				}
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

func TestImages(t *testing.T) {
	for workdir, want := range map[string]string{
		"/r/m/1/work":         "/r/m/1/criu",
		"/r/snapshots/1/work": "/r/snapshots/1/criu",
	} {
		if got := (Writable{Workdir: workdir}).Images(); got != want {
			t.Errorf("images of workdir %q are in %q, want %q", workdir, got, want)
		}
	}
}

func TestKeepsLineage(t *testing.T) {
	for name, tt := range map[string]struct {
		content string
		want    bool
	}{
		"this version":    {LayoutVersion + "\n", true},
		"another version": {LayoutVersion + "1\n", false},
		"empty":           {"", false},
	} {
		root := t.TempDir()
		w := Writable{Workdir: filepath.Join(root, "m", "1", "work")}
		if w.KeepsLineage() {
			t.Errorf("%s: a root without the file keeps lineages", name)
		}
		if err := os.WriteFile(filepath.Join(root, LayoutFile), []byte(tt.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := w.KeepsLineage(); got != tt.want {
			t.Errorf("%s: got %v", name, got)
		}
		if got := LineageKept(w.Images()); got != tt.want {
			t.Errorf("%s: of the images: got %v", name, got)
		}
	}
}

// containerd drops other labels on the way to the snapshotter.
func TestLabelsReachTheSnapshotter(t *testing.T) {
	for _, l := range []string{LabelNode, LabelFrom} {
		kept := snapshots.FilterInheritedLabels(map[string]string{l: "x"})
		if kept[l] != "x" || !strings.HasPrefix(l, "containerd.io/snapshot/") {
			t.Errorf("label %q is not handed down", l)
		}
	}
}
