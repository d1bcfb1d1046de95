package snapshotter

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/continuity/sysx"
)

// The tests here mount snapshots, as containerd and the shim do.

// mounted mounts at a directory of the test's own and returns that.
func mounted(t *testing.T, m []mount.Mount) string {
	t.Helper()
	dir := t.TempDir()
	if err := mount.All(m, dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.UnmountAll(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// within mounts an active snapshot, runs fn in it and unmounts.
func within(t *testing.T, m []mount.Mount, fn func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	if err := mount.All(m, dir); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := mount.UnmountAll(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	fn(dir)
}

// content reads all files below a directory.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// checksum covers what overlay reads of a layer: names, types, owners, modes,
// content, and its marks.
func checksum(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		fmt.Fprintln(h, path, fi.Mode(), st.Uid, st.Gid, st.Rdev, st.Mtim, st.Ctim)
		attrs, err := sysx.LListxattr(path)
		if err != nil {
			return err
		}
		for _, a := range slices.Sorted(slices.Values(attrs)) {
			v, err := sysx.LGetxattr(path, a)
			if err != nil {
				return err
			}
			fmt.Fprintln(h, a, v)
		}
		if fi.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			h.Write(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s:\ngot  %v\nwant %v", what, got, want)
	}
}

// steps are what a container does between checkpoints, and what it then sees.
var steps = []struct {
	do   func(dir string) []error
	want map[string]string
}{
	{
		func(dir string) []error {
			return []error{
				os.WriteFile(filepath.Join(dir, "new"), []byte("1"), 0o644),
				os.Remove(filepath.Join(dir, "etc/b")),
				os.Rename(filepath.Join(dir, "opt"), filepath.Join(dir, "moved")),
			}
		},
		map[string]string{"/etc/a": "a", "/new": "1", "/moved/x": "x", "/moved/y": "y"},
	},
	{
		func(dir string) []error {
			return []error{
				os.RemoveAll(filepath.Join(dir, "moved")),
				os.Mkdir(filepath.Join(dir, "moved"), 0o755), // opaque: what was in it stays away
				os.WriteFile(filepath.Join(dir, "moved/z"), []byte("z"), 0o644),
				os.WriteFile(filepath.Join(dir, "etc/b"), []byte("again"), 0o644),
			}
		},
		map[string]string{"/etc/a": "a", "/etc/b": "again", "/new": "1", "/moved/z": "z"},
	},
	{
		func(dir string) []error {
			return []error{
				os.Remove(filepath.Join(dir, "new")),
				os.WriteFile(filepath.Join(dir, "etc/a"), []byte("changed"), 0o644),
			}
		},
		map[string]string{"/etc/a": "changed", "/etc/b": "again", "/moved/z": "z"},
	},
}

// threeNodes makes an image of two layers and a node after each of the steps.
func threeNodes(t *testing.T, s *Snapshotter) {
	t.Helper()
	within(t, prepare(t, s, "unpack 1", ""), func(dir string) {
		must(t, os.Mkdir(filepath.Join(dir, "etc"), 0o755), os.Mkdir(filepath.Join(dir, "opt"), 0o755))
		write(t, filepath.Join(dir, "etc/a"), "a")
		write(t, filepath.Join(dir, "opt/x"), "x")
	})
	commit(t, s, "layer", "unpack 1")
	within(t, prepare(t, s, "unpack 2", "layer"), func(dir string) {
		write(t, filepath.Join(dir, "etc/b"), "b")
		write(t, filepath.Join(dir, "opt/y"), "y")
	})
	commit(t, s, "image", "unpack 2")
	m := prepare(t, s, "head", "image")
	for i, step := range steps {
		within(t, m, func(dir string) { must(t, step.do(dir)...) })
		commit(t, s, "node-"+nodeID(i+1), "head", asNode(nodeID(i+1)))
		m = prepare(t, s, "head", "image", from(nodeID(i+1)))
	}
}

func TestNodesShowTheirFiles(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	threeNodes(t, s)
	for i, step := range steps {
		id := nodeID(i + 1)
		view, err := s.View(t.Context(), "view "+id, "image", from(id))
		must(t, err)
		equal(t, "view of node "+id, content(t, mounted(t, view)), step.want)
		fork := mounted(t, prepare(t, s, "fork "+id, "image", from(id)))
		equal(t, "fork of node "+id, content(t, fork), step.want)
		write(t, filepath.Join(fork, "mine"), id)
	}
}

// A diff of a container against its visible parent, such as an image is made
// of, must see what is in sealed layers.
func TestDiffSeesSealedLayers(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	threeNodes(t, s)
	for i, step := range steps {
		m := prepare(t, s, fmt.Sprint("fork ", i), "image", from(nodeID(i+1)))
		must(t, mount.WithReadonlyTempMount(t.Context(), m, func(dir string) error {
			equal(t, "readonly mount at node "+nodeID(i+1), content(t, dir), step.want)
			return nil
		}))
	}
}

// Nodes in the middle go, as by a garbage collection, with live snapshots on
// both sides.
func TestRemovedNodesStayBelow(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	threeNodes(t, s)
	prepare(t, s, "early", "image", from(nodeID(1)))
	for _, n := range []int{2, 1} {
		remove(t, s, "node-"+nodeID(n))
	}
	must(t, s.Cleanup(t.Context()))
	for key, want := range map[string]map[string]string{"early": steps[0].want, "head": steps[2].want} {
		m, err := s.Mounts(t.Context(), key)
		must(t, err)
		equal(t, key, content(t, mounted(t, m)), want)
	}
	fork := prepare(t, s, "late", "image", from(nodeID(3)))
	equal(t, "a fork afterwards", content(t, mounted(t, fork)), steps[2].want)
}

// Siblings that run at the same time write into none of the layers that they
// share.
func TestSealedLayersStay(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	threeNodes(t, s)
	sums := func() map[string]string {
		all := map[string]string{}
		for _, l := range []string{"1", "2", "3", "4", "5"} {
			all[l] = checksum(t, filepath.Join(s.dirs.layers(), l))
		}
		return all
	}
	before := sums()
	var siblings []string
	for i := range 3 {
		siblings = append(siblings, mounted(t, prepare(t, s, fmt.Sprint("sibling ", i), "image", from(nodeID(3)))))
	}
	for i, dir := range siblings {
		must(t,
			os.WriteFile(filepath.Join(dir, "etc/a"), fmt.Append(nil, i), 0o600),
			os.Rename(filepath.Join(dir, "moved"), filepath.Join(dir, "again")),
			os.Chmod(filepath.Join(dir, "etc"), 0o700),
			os.Chown(filepath.Join(dir, "etc/b"), 1, 1),
			os.RemoveAll(filepath.Join(dir, "again")),
			os.Chtimes(dir, time.Unix(1, 0), time.Unix(1, 0)),
		)
	}
	for i, dir := range siblings {
		equal(t, dir, content(t, dir), map[string]string{"/etc/a": fmt.Sprint(i), "/etc/b": "again"})
	}
	equal(t, "sealed layers", sums(), before)
}

// The root of what is mounted looks the same after a layer was sealed, also
// through layers that nothing was written to.
func TestRootKeepsItsAttributes(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	stamp := time.Unix(1234567890, 123456789)
	within(t, prepare(t, s, "head", "image"), func(dir string) {
		must(t, os.Chown(dir, 12, 34), os.Chmod(dir, 0o710|fs.ModeSticky),
			sysx.LSetxattr(dir, "user.mark", []byte("x"), 0), os.Chtimes(dir, stamp, stamp))
	})
	commit(t, s, "node-1", "head", asNode(nodeID(1)))
	check := func(what string, m []mount.Mount) {
		within(t, m, func(dir string) {
			fi, err := os.Stat(dir)
			must(t, err)
			st := fi.Sys().(*syscall.Stat_t)
			v, err := sysx.LGetxattr(dir, "user.mark")
			if st.Uid != 12 || st.Gid != 34 || fi.Mode() != fs.ModeDir|fs.ModeSticky|0o710 ||
				!fi.ModTime().Equal(stamp) || err != nil || string(v) != "x" {
				t.Errorf("%s: owner %d:%d, mode %v, time %v, attribute %q %v", what, st.Uid, st.Gid, fi.Mode(), fi.ModTime(), v, err)
			}
		})
	}
	for n := 2; n < 4; n++ {
		m := prepare(t, s, "head", "image", from(nodeID(n-1)))
		if got, want := lowersOf(m), []string{"1"}; !slices.Equal(got, want) {
			t.Fatalf("lowers are %q, want %q: the test does not test empty layers", got, want)
		}
		check("active", m)
		commit(t, s, fmt.Sprint("node-", n), "head", asNode(nodeID(n)))
	}
	view, err := s.View(t.Context(), "look", "image", from(nodeID(3)))
	must(t, err)
	check("view", view)
}

// TestDeepChains goes as deep as the kernel allows.
func TestDeepChains(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	base(t, s, "image", "")
	m := prepare(t, s, "head", "image")
	n := 1
	for _, depth := range []int{25, 300, maxLowers - 2} {
		for ; n <= depth; n++ {
			write(t, filepath.Join(upperOf(m), "last"), fmt.Sprint(n))
			seal(t, s, "head", n)
			m = prepare(t, s, "head", "image", from(nodeID(n)))
		}
		check := func(dir string) error {
			all := content(t, dir)
			if len(all) != depth+2 || all["/last"] != fmt.Sprint(depth) {
				t.Errorf("at depth %d there are %d files, the last is %q", depth, len(all), all["/last"])
			}
			return nil
		}
		within(t, m, func(dir string) {
			must(t, check(dir))
			checkMountinfo(t, dir)
			must(t, os.Remove(filepath.Join(dir, nodeID(1))))
			write(t, filepath.Join(dir, nodeID(1)), "head")
		})
		must(t, mount.WithReadonlyTempMount(t.Context(), m, check))
		view, err := s.View(t.Context(), fmt.Sprint("view ", depth), "image", from(nodeID(depth)))
		must(t, err)
		must(t, mount.WithTempMount(t.Context(), view, check))
	}
}

// checkMountinfo looks at the line that CRIU has to read.
func checkMountinfo(t *testing.T, dir string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " "+dir+" ") {
			if len(line) >= 4096 {
				t.Errorf("line of mountinfo has %d bytes, CRIU takes 4095", len(line))
			}
			return
		}
	}
	t.Errorf("no mount at %q", dir)
}

// A mounted snapshot may be removed, as happens to the old root of a container
// that went back to a node; the others do not notice.
func TestRemoveMounted(t *testing.T) {
	needRoot(t)
	s := open(t, t.TempDir())
	threeNodes(t, s)
	m, err := s.Mounts(t.Context(), "head")
	must(t, err)
	write(t, filepath.Join(mounted(t, m), "f"), "")
	other := mounted(t, prepare(t, s, "other", "image", from(nodeID(3))))
	remove(t, s, "head")
	must(t, s.Cleanup(context.WithoutCancel(t.Context())))
	equal(t, "the other", content(t, other), steps[2].want)
	var infos []string
	must(t, s.Walk(t.Context(), func(_ context.Context, i snapshots.Info) error {
		infos = append(infos, i.Name)
		return nil
	}, "kind==active"))
	if !slices.Equal(infos, []string{"other"}) {
		t.Errorf("active snapshots are %q", infos)
	}
}
