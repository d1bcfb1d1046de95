package snapshotter

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
)

// TestSweep opens a root that a crash left with directories of no record.
func TestSweep(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	chain(t, s, 2)
	remove(t, s, "node-"+nodeID(1)) // removed, but the next one stands on it
	l, m := names(t, s, "l"), names(t, s, "m")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"l/zz", "m/zz/work", "m/2/criu", "trash/1"} {
		if err := os.MkdirAll(filepath.Join(root, dir, "sub"), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(root, dir, "sub", "f"), "left over")
	}
	s = open(t, root)
	if got := names(t, s, "l"); !slices.Equal(got, l) {
		t.Errorf("layers are %q, want %q", got, l)
	}
	if got := names(t, s, "m"); !slices.Equal(got, m) {
		t.Errorf("beside the layers there is %q, want %q", got, m)
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s, "trash"); len(got) != 0 {
		t.Errorf("trash holds %q", got)
	}
	if _, err := s.Mounts(t.Context(), "head"); err != nil {
		t.Error(err)
	}
}

// A crash right after the record of a snapshot was removed leaves its
// directories, and the next start takes them.
func TestCrashInRemove(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	chain(t, s, 1)
	err := s.store.update(t.Context(), func(ctx context.Context, tx *tx) error {
		sid, _, err := storage.Remove(ctx, "head")
		if err != nil {
			return err
		}
		id, err := parseID(sid)
		if err != nil {
			return err
		}
		_, err = tx.release(id)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	if got, want := names(t, s, "l"), []string{"1", "2"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
	prepare(t, s, "head", "image", from(nodeID(1)))
}

// A crash before the record of a snapshot was committed leaves directories of
// an id that is given again.
func TestCrashInPrepare(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	chain(t, s, 1)
	crash := errors.New("crash")
	err := s.store.update(t.Context(), func(ctx context.Context, tx *tx) error {
		snap, err := storage.CreateSnapshot(ctx, snapshots.KindActive, "lost", "image")
		if err != nil {
			return err
		}
		id, err := parseID(snap.ID)
		if err != nil {
			return err
		}
		return errors.Join(s.dirs.make(id, snapshots.KindActive, nil), crash)
	})
	if !errors.Is(err, crash) {
		t.Fatal(err)
	}
	write(t, filepath.Join(root, "l", "4", "f"), "lost")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	m := prepare(t, s, "next", "image")
	if got := filepath.Base(upperOf(m)); got != "4" {
		t.Fatalf("the new snapshot is layer %q, want the one that was lost", got)
	}
	if n := files(t, upperOf(m)); n != 0 {
		t.Errorf("the new snapshot shows %d lost files", n)
	}
}

// A snapshot whose directories cannot be made leaves nothing, and the next
// try succeeds.
func TestFailedPrepare(t *testing.T) {
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	write(t, filepath.Join(s.dirs.root, "l", "2"), "in the way")
	if _, err := s.Prepare(t.Context(), "head", "image"); err == nil {
		t.Fatal("prepared over a file that was in the way")
	}
	if _, err := s.Stat(t.Context(), "head"); !errdefs.IsNotFound(err) {
		t.Errorf("a record is left: %v", err)
	}
	if got, want := names(t, s, "l"), []string{"1"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
	prepare(t, s, "head", "image")
}

// What cannot be moved to the trash is not forgotten.
func TestCleanupFindsWhatRemoveLeft(t *testing.T) {
	s := open(t, t.TempDir())
	chain(t, s, 1)
	if err := os.Rename(s.dirs.trash(), s.dirs.trash()+".away"); err != nil {
		t.Fatal(err)
	}
	write(t, s.dirs.trash(), "no directory")
	remove(t, s, "head")
	if err := os.Remove(s.dirs.trash()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(s.dirs.trash()+".away", s.dirs.trash()); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, s, "l"), []string{"1", "2", "3"}; !slices.Equal(got, want) {
		t.Fatalf("layers are %q, want %q: the test does not test", got, want)
	}
	if err := s.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, s, "l"), []string{"1", "2"}; !slices.Equal(got, want) {
		t.Errorf("layers are %q, want %q", got, want)
	}
}

func TestRootIsRefused(t *testing.T) {
	dir := t.TempDir()
	busy := filepath.Join(dir, "busy")
	open(t, busy)
	other := filepath.Join(dir, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(other, layer.LayoutFile), "2\n")
	for _, tt := range []struct {
		root, says string
		is         func(error) bool
	}{
		{dir + "/a:b", "':'", errdefs.IsInvalidArgument},
		{dir + "/a,b", "','", errdefs.IsInvalidArgument},
		{dir + `/a\b`, `'\\'`, errdefs.IsInvalidArgument},
		{"relative", "absolute", errdefs.IsInvalidArgument},
		{busy, "another", errdefs.IsFailedPrecondition},
		{other, `layout "2"`, errdefs.IsFailedPrecondition},
	} {
		s, err := New(t.Context(), Config{Root: tt.root, LockTimeout: time.Millisecond})
		if err == nil {
			t.Errorf("root %q was taken", tt.root)
			s.Close()
			continue
		}
		if !tt.is(err) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("root %q: unexpected error %v", tt.root, err)
		}
	}
}

func TestLayout(t *testing.T) {
	root := filepath.Join(t.TempDir(), "a b", strings.Repeat("r", 100))
	s := open(t, root)
	for _, dir := range []string{"", "l", "m", "trash"} {
		fi, err := os.Stat(filepath.Join(root, dir))
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm() != 0o700 {
			t.Errorf("%q has mode %v", dir, fi.Mode())
		}
	}
	base(t, s, "image", "")
	w, err := layer.FromMounts(prepare(t, s, "head", "image"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := w.Images(), filepath.Join(root, "m", "2", "criu"); got != want {
		t.Errorf("process images go to %q, want %q", got, want)
	}
	if !w.KeepsLineage() {
		t.Error("the root is not known as one that keeps lineages")
	}
}
