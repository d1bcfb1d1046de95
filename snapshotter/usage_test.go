package snapshotter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
)

// images writes process images for an active snapshot, as the shim does.
func images(t *testing.T, s *Snapshotter, key string, size int) string {
	t.Helper()
	m, err := s.Mounts(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	w, err := layer.FromMounts(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(w.Images(), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(w.Images(), "pages-1.img"), string(bytes.Repeat([]byte{1}, size)))
	return w.Images()
}

func TestUsage(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	base(t, s, "image", "")
	m := prepare(t, s, "head", "image")
	usage := func(key string) snapshots.Usage {
		t.Helper()
		u, err := s.Usage(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	before := usage("head")
	write(t, filepath.Join(upperOf(m), "f"), string(bytes.Repeat([]byte{2}, 1<<20)))
	if err := os.Link(filepath.Join(upperOf(m), "f"), filepath.Join(upperOf(m), "g")); err != nil {
		t.Fatal(err)
	}
	images(t, s, "head", 1<<20)
	after := usage("head")
	if got := after.Size - before.Size; got < 2<<20 || got > 2<<20+64<<10 {
		t.Errorf("two files of 1 MiB take %d bytes", got)
	}
	if got := after.Inodes - before.Inodes; got != 3 { // file, images, their directory
		t.Errorf("they take %d inodes, want 3", got)
	}
	commit(t, s, "node", "head", asNode(nodeID(1)))
	if got := usage("node"); got != after {
		t.Errorf("committed, it takes %+v, want %+v", got, after)
	}
	noWalk(t, s)
	if got := usage("node"); got != after {
		t.Errorf("the second time it takes %+v, want %+v", got, after)
	}
	if _, err := s.View(t.Context(), "look", "image"); err != nil {
		t.Fatal(err)
	}
	if got := usage("look"); got != (snapshots.Usage{}) {
		t.Errorf("a view takes %+v", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	noWalk(t, s)
	if got := usage("node"); got != after {
		t.Errorf("after a restart it takes %+v, want %+v", got, after)
	}
}

// A snapshot that is removed while it is measured is not found; one that fails
// to be measured says why.
func TestUsageErrors(t *testing.T) {
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	broken := errors.New("broken disk")
	s.measure = func(context.Context, ...string) (snapshots.Usage, error) { return snapshots.Usage{}, broken }
	if _, err := s.Usage(t.Context(), "image"); !errors.Is(err, broken) {
		t.Errorf("got %v, want the cause", err)
	}
	s.measure = func(ctx context.Context, roots ...string) (snapshots.Usage, error) {
		remove(t, s, "image")
		return diskUsage(ctx, roots...)
	}
	if _, err := s.Usage(t.Context(), "image"); !errdefs.IsNotFound(err) {
		t.Errorf("got %v, want the class not found", err)
	}
}

// Commit and Remove do not look at files: nothing is walked over, and all
// files of what was removed are still there in the trash.
func TestCommitAndRemoveTouchNoFiles(t *testing.T) {
	s := open(t, t.TempDir())
	noWalk(t, s)
	base(t, s, "image", "")
	m := prepare(t, s, "head", "image")
	for i := range 200 {
		write(t, filepath.Join(upperOf(m), fmt.Sprint(i)), "")
	}
	images(t, s, "head", 1)
	commit(t, s, "node", "head", asNode(nodeID(1)))
	if n := files(t, upperOf(m)); n != 200 {
		t.Errorf("%d files after the commit, want 200", n)
	}
	if _, err := s.Stat(t.Context(), "node"); err != nil {
		t.Fatal(err)
	}
	s.trash.mu.Lock()
	remove(t, s, "node")
	left := files(t, s.dirs.trash())
	s.trash.mu.Unlock()
	if left != 205 { // the files; layer, m/<id>, work, criu, one image
		t.Errorf("the trash holds %d entries after Remove, want 205", left)
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := files(t, s.dirs.trash()); left != 0 {
		t.Errorf("the trash holds %d entries after Cleanup", left)
	}
}

// The images of a removed node go at once, even if its layer has to stay.
func TestRemoveTakesImages(t *testing.T) {
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	prepare(t, s, "head", "image")
	dir := images(t, s, "head", 1)
	seal(t, s, "head", 1)
	prepare(t, s, "head", "image", from(nodeID(1)))
	remove(t, s, "node-"+nodeID(1))
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("process images are still there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(s.dirs.root, "l", "2", nodeID(1))); err != nil {
		t.Errorf("the layer is gone: %v", err)
	}
}
