// Package layer describes how a sealed layer lies on disk: it is all that the
// shim and a snapshotter know of each other.
//
// An overlay mount of an active snapshot names an upperdir and a workdir. The
// process images of a checkpoint are written into the directory "criu" beside
// the workdir, before the snapshot is committed. They live and die with the
// snapshot's directory, so a failed operation leaves nothing to clean up but
// that one directory:
//
//	statefork snapshotter        containerd's overlayfs snapshotter
//	<root>/layout                (absent)
//	<root>/l/<id>                <root>/snapshots/<id>/fs     upperdir
//	<root>/m/<id>/work           <root>/snapshots/<id>/work   workdir
//	<root>/m/<id>/criu           <root>/snapshots/<id>/criu   process images
//
// A snapshotter that keeps its lineage to itself (flat parents) says so by the
// file "layout" in its root.
package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
)

// LayoutFile is the file in a snapshotter's root that says that active
// snapshots may be stacked by a lineage label below an unchanged visible
// parent. Its content is LayoutVersion and a newline.
const (
	LayoutFile    = "layout"
	LayoutVersion = "1"
)

const imagesDir = "criu"

// DescriptionFile is the file that is written last into a directory of process
// images: without it they are not whole.
const DescriptionFile = "statefork.json"

// Writable is the writable part of an active snapshot's overlay mount.
type Writable struct {
	Upperdir string
	Workdir  string
}

// FromMounts finds the writable layer in the mounts of an active snapshot. It
// fails with ErrNotImplemented where these are no overlay: such a snapshot
// cannot be sealed without copying.
func FromMounts(mounts []mount.Mount) (Writable, error) {
	var w Writable
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return w, fmt.Errorf("root is not one overlay mount (the snapshotter must be statefork or overlayfs): %w", errdefs.ErrNotImplemented)
	}
	for _, o := range mounts[0].Options {
		if v, ok := strings.CutPrefix(o, "upperdir="); ok {
			w.Upperdir = v
		}
		if v, ok := strings.CutPrefix(o, "workdir="); ok {
			w.Workdir = v
		}
	}
	if w.Upperdir == "" || w.Workdir == "" {
		return w, fmt.Errorf("overlay has no upperdir: read-only snapshot: %w", errdefs.ErrFailedPrecondition)
	}
	return w, nil
}

// Images returns the directory of the process images that belong to w.
func (w Writable) Images() string {
	return filepath.Join(filepath.Dir(w.Workdir), imagesDir)
}

// Interrupted says whether w holds whole process images. Those of a finished
// checkpoint belong to the sealed layer; in a writable one they are left of a
// checkpoint that died between its dump and its commit.
func (w Writable) Interrupted() bool {
	_, err := os.Stat(filepath.Join(w.Images(), DescriptionFile))
	return err == nil
}

// Empty says whether nothing was written into w.
func (w Writable) Empty() (bool, error) {
	d, err := os.Open(w.Upperdir)
	if err != nil {
		return false, fmt.Errorf("read upper directory: %w", err)
	}
	defer d.Close()
	_, err = d.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// KeepsLineage says whether the snapshotter that owns w honours the lineage
// label, so that visible parents stay flat.
func (w Writable) KeepsLineage() bool { return LineageKept(w.Images()) }

// LineageKept says the same of the snapshotter that owns a directory of
// process images.
func LineageKept(images string) bool {
	// <root>/m/<id>/criu
	root := filepath.Dir(filepath.Dir(filepath.Dir(images)))
	b, err := os.ReadFile(filepath.Join(root, LayoutFile))
	return err == nil && strings.TrimSpace(string(b)) == LayoutVersion
}
