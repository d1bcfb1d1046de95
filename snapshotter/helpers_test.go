package snapshotter

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/testutil"

	"github.com/statefork/statefork/layer"
)

// needRoot skips a test that mounts, unless the test binary is told by
// -test.root that it may.
func needRoot(t *testing.T) {
	t.Helper()
	if f := flag.Lookup("test.root"); f.Value.String() != "true" {
		t.Skip("needs root, and -test.root")
	}
	testutil.RequiresRoot(t)
}

// open opens a snapshotter and closes it with the test.
func open(t *testing.T, root string) *Snapshotter {
	t.Helper()
	s, err := New(t.Context(), Config{Root: root, LockTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// nodeID makes a node id of a number.
func nodeID(n int) string { return fmt.Sprintf("%012x", n) }

func asNode(id string) snapshots.Opt {
	return snapshots.WithLabels(map[string]string{layer.LabelNode: id})
}

func from(id string) snapshots.Opt {
	return snapshots.WithLabels(map[string]string{layer.LabelFrom: id})
}

func prepare(t *testing.T, s snapshots.Snapshotter, key, parent string, opts ...snapshots.Opt) []mount.Mount {
	t.Helper()
	m, err := s.Prepare(t.Context(), key, parent, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func commit(t *testing.T, s snapshots.Snapshotter, name, key string, opts ...snapshots.Opt) {
	t.Helper()
	if err := s.Commit(t.Context(), name, key, opts...); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, s snapshots.Snapshotter, key string) {
	t.Helper()
	if err := s.Remove(t.Context(), key); err != nil {
		t.Fatal(err)
	}
}

// upperOf returns the layer that a snapshot's mounts write to.
func upperOf(m []mount.Mount) string {
	for _, o := range m[0].Options {
		if v, ok := strings.CutPrefix(o, "upperdir="); ok {
			return v
		}
	}
	return m[0].Source
}

// lowersOf returns the names of the lower directories of an overlay mount.
func lowersOf(m []mount.Mount) []string {
	var names []string
	for _, o := range m[0].Options {
		if v, ok := strings.CutPrefix(o, "lowerdir="); ok {
			for _, l := range strings.Split(v, ":") {
				names = append(names, filepath.Base(l))
			}
		}
	}
	return names
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// base makes a committed snapshot with one file, as an image would be.
func base(t *testing.T, s *Snapshotter, name, parent string) {
	t.Helper()
	m := prepare(t, s, "unpack "+name, parent)
	write(t, filepath.Join(upperOf(m), name), name)
	commit(t, s, name, "unpack "+name)
}

// seal turns an active snapshot into a node with a file of its own.
func seal(t *testing.T, s *Snapshotter, key string, n int) {
	t.Helper()
	m, err := s.Mounts(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(upperOf(m), nodeID(n)), key)
	commit(t, s, "node-"+nodeID(n), key, asNode(nodeID(n)))
}

// names lists a directory below the root.
func names(t *testing.T, s *Snapshotter, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(s.dirs.root, dir))
	if err != nil {
		t.Fatal(err)
	}
	list := []string{}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	slices.Sort(list)
	return list
}

// files counts everything below a directory.
func files(t *testing.T, dir string) int {
	t.Helper()
	n := 0
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if path != dir {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// noWalk makes a snapshotter that fails the test when it walks over files.
func noWalk(t *testing.T, s *Snapshotter) {
	s.measure = func(context.Context, ...string) (snapshots.Usage, error) {
		t.Error("files were walked over")
		return snapshots.Usage{}, nil
	}
}
