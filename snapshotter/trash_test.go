package snapshotter

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// tree makes a directory with what containers leave: deep, unreadable, links
// that lead out.
func tree(t *testing.T, dir, outside string) {
	t.Helper()
	deep := filepath.Join(dir, strings.Repeat("d/", 100))
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{filepath.Join(dir, "out"), filepath.Join(deep, "out")} {
		if err := os.Symlink(outside, link); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(deep, "f"), "")
}

func TestTrash(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	if err := os.MkdirAll(filepath.Join(dir, "trash"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(outside, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(outside, "keep"), "")
	tr := newTrash(filepath.Join(dir, "trash"))
	for _, name := range []string{"a", "b"} {
		tree(t, filepath.Join(dir, name), outside)
		if err := tr.take(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.take(filepath.Join(dir, "none")); err != nil {
		t.Errorf("take what is not there: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tr.empty(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("empty with an ended context: %v", err)
	}
	if n := files(t, tr.dir); n == 0 {
		t.Error("an ended context did not end the work")
	}
	if err := tr.empty(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := files(t, tr.dir); n != 0 {
		t.Errorf("%d entries are left", n)
	}
	if _, err := os.Stat(filepath.Join(outside, "keep")); err != nil {
		t.Errorf("a file outside went: %v", err)
	}
}

// Names that an earlier run left in the trash are passed over.
func TestTrashNames(t *testing.T) {
	dir := t.TempDir()
	tr := newTrash(filepath.Join(dir, "trash"))
	tr.last.Store(34) // the next are z, 10, 11
	for _, d := range []string{"trash/z", "trash/10", "a"} {
		if err := os.MkdirAll(filepath.Join(dir, d, "sub"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.take(filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "trash/11/sub")); err != nil {
		t.Error(err)
	}
}

// The worker empties the trash without being asked.
func TestTrashWorker(t *testing.T) {
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	remove(t, s, "image")
	deadline := time.Now().Add(10 * time.Second)
	for len(names(t, s, "trash")) > 0 {
		if time.Now().After(deadline) {
			t.Fatal("the trash was not emptied")
		}
		runtime.Gosched()
	}
}
