package snapshotter

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

const (
	// maxLowers is how many lower layers the kernel's overlay takes.
	maxLowers = 500
	// maxOptions bounds the options of a mount. mount(2) takes a page of them;
	// containerd makes the lower directories relative to their common one when
	// the options come within 512 bytes of that. CRIU up to 4.2.1 cannot dump
	// a container with a line of mountinfo longer than 4096 bytes, and the
	// rest of the line needs its room too.
	maxOptions = 4096 - 512
)

// stack is all that the mounts of a snapshot are made of.
type stack struct {
	kind snapshots.Kind
	// upper and work are the snapshot's own directories.
	upper, work string
	// lowers lie below, topmost first, all directly under one directory.
	lowers []lowerdir
	// options are given to overlay mounts that can be written to; readonly
	// ones get roOptions.
	options, roOptions []string
}

type lowerdir struct {
	path  string
	empty bool
}

// mounts returns the mounts of a snapshot. Layers without entries are left
// out: overlay takes the root's own attributes from the topmost layer alone.
func (s stack) mounts() ([]mount.Mount, error) {
	if s.kind == snapshots.KindActive {
		return s.writable()
	}
	return s.readonly()
}

func (s stack) writable() ([]mount.Mount, error) {
	lowers := s.paths(false)
	if len(lowers) == 0 {
		return bind(s.upper, "rw"), nil
	}
	// One is left for a readonly mount of the same snapshot, as a diff makes
	// it: there the upperdir becomes one more lower layer.
	if err := checkDepth(len(lowers), maxLowers-1); err != nil {
		return nil, err
	}
	return overlay(append([]string{"workdir=" + s.work, "upperdir=" + s.upper}, s.options...), lowers)
}

func (s stack) readonly() ([]mount.Mount, error) {
	lowers := s.paths(true)
	switch len(lowers) {
	case 0:
		return bind(s.upper, "ro"), nil
	case 1:
		return bind(lowers[0], "ro"), nil
	}
	if err := checkDepth(len(lowers), maxLowers); err != nil {
		return nil, err
	}
	return overlay(s.roOptions, lowers)
}

// paths lists the lower directories that have entries, and the topmost in any
// case if it gives the root its attributes. At least one is left.
func (s stack) paths(keepTop bool) []string {
	var paths []string
	for i, l := range s.lowers {
		last := i == len(s.lowers)-1
		if !l.empty || keepTop && i == 0 || last && len(paths) == 0 {
			paths = append(paths, l.path)
		}
	}
	return paths
}

func bind(source, mode string) []mount.Mount {
	return []mount.Mount{{Type: "bind", Source: source, Options: []string{mode, "rbind"}}}
}

func overlay(options, lowers []string) ([]mount.Mount, error) {
	options = append(options[:len(options):len(options)], "lowerdir="+strings.Join(lowers, ":"))
	if size := optionsSize(options, lowers); size >= maxOptions {
		return nil, fmt.Errorf("stack %d layers: mount options take %d bytes, at most %d are possible (a shorter root directory helps): %w",
			len(lowers), size, maxOptions-1, errdefs.ErrResourceExhausted)
	}
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}, nil
}

// optionsSize is the size of the option string as it reaches the kernel:
// containerd uses relative names as soon as the absolute ones are too long.
func optionsSize(options, lowers []string) int {
	size := len(strings.Join(options, ","))
	if size < maxOptions || len(lowers) < 2 {
		return size
	}
	for _, l := range lowers {
		size -= len(l) - len(filepath.Base(l))
	}
	return size
}

func checkDepth(n, limit int) error {
	if n <= limit {
		return nil
	}
	return fmt.Errorf("stack %d layers: at most %d are possible, go on from an earlier node or from an image of this one: %w",
		n, limit, errdefs.ErrResourceExhausted)
}
