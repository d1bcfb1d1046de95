package snapshotter

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/snapshots"
	cfs "github.com/containerd/continuity/fs"
	"github.com/containerd/continuity/sysx"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/layer"
)

// dirs knows where everything lies below the root.
type dirs struct{ root string }

func (d dirs) layers() string   { return filepath.Join(d.root, "l") }
func (d dirs) others() string   { return filepath.Join(d.root, "m") }
func (d dirs) trash() string    { return filepath.Join(d.root, "trash") }
func (d dirs) metadata() string { return filepath.Join(d.root, "metadata.db") }

// name is the short name of a layer: several hundred must fit into the options
// of one mount.
func (d dirs) name(id uint64) string { return strconv.FormatUint(id, 36) }

func (d dirs) upper(id uint64) string  { return filepath.Join(d.layers(), d.name(id)) }
func (d dirs) other(id uint64) string  { return filepath.Join(d.others(), d.name(id)) }
func (d dirs) work(id uint64) string   { return filepath.Join(d.other(id), "work") }
func (d dirs) images(id uint64) string { return layer.Writable{Workdir: d.work(id)}.Images() }

// checkRoot refuses a root whose name cannot stand in overlay's options, where
// these characters part and quote directories.
func checkRoot(root string) error {
	if !filepath.IsAbs(root) {
		return fmt.Errorf("root %q is not an absolute path: %w", root, errdefs.ErrInvalidArgument)
	}
	if i := strings.IndexAny(root, `:,\`); i >= 0 {
		return fmt.Errorf("root %q: overlay mount options cannot hold a path with %q: %w", root, root[i], errdefs.ErrInvalidArgument)
	}
	return nil
}

// init makes the directories. Layers hold set-user-id files and other people's
// data, so nobody else may enter the root.
func (d dirs) init() error {
	for _, dir := range []string{d.root, d.layers(), d.others(), d.trash()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// checkFilesystem refuses a filesystem that overlay takes no upperdir from.
func (d dirs) checkFilesystem() error {
	ok, err := cfs.SupportsDType(d.root)
	if err != nil {
		return fmt.Errorf("examine filesystem of root: %w", err)
	}
	if !ok {
		return fmt.Errorf("root %q: overlay needs a filesystem with file types in directories (xfs: made with ftype=1): %w", d.root, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// checkLayout marks a new root with the version of its layout, and refuses a
// root of another version.
func (d dirs) checkLayout() error {
	file := filepath.Join(d.root, layer.LayoutFile)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		tmp := file + ".new"
		if err := os.WriteFile(tmp, []byte(layer.LayoutVersion+"\n"), 0o600); err != nil {
			return err
		}
		return os.Rename(tmp, file)
	}
	if err != nil {
		return err
	}
	if v := strings.TrimSpace(string(b)); v != layer.LayoutVersion {
		return fmt.Errorf("root %q has layout %q, this program knows %q: %w", d.root, v, layer.LayoutVersion, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// make makes the directories of a new snapshot. The upperdir is the root of
// what will be mounted: it gets the attributes of the root below it, so that
// stacking a layer is not seen inside.
func (d dirs) make(id uint64, kind snapshots.Kind, below []lower) error {
	upper := d.upper(id)
	if err := os.Mkdir(upper, 0o755); err != nil {
		return err
	}
	// whatever the umask is
	if err := os.Chmod(upper, 0o755); err != nil {
		return err
	}
	if kind == snapshots.KindActive {
		if err := os.MkdirAll(d.work(id), 0o700); err != nil {
			return err
		}
	}
	if len(below) == 0 {
		return nil
	}
	return copyAttributes(upper, d.upper(below[0].id))
}

// copyAttributes gives a directory the owner, mode, extended attributes and
// times of another.
func copyAttributes(to, from string) error {
	fi, err := os.Lstat(from)
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("stat %q gave no owner: %w", from, errdefs.ErrInternal)
	}
	if err := os.Lchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := os.Chmod(to, fi.Mode()); err != nil {
		return err
	}
	if err := copyXattrs(to, from); err != nil {
		return err
	}
	times := []syscall.Timespec{st.Atim, st.Mtim}
	if err := syscall.UtimesNano(to, times); err != nil {
		return fmt.Errorf("set times of %q: %w", to, err)
	}
	return nil
}

func copyXattrs(to, from string) error {
	names, err := sysx.LListxattr(from)
	if errors.Is(err, syscall.ENOTSUP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list attributes of %q: %w", from, err)
	}
	for _, name := range names {
		if ofLayer(name) {
			continue
		}
		v, err := sysx.LGetxattr(from, name)
		if err == nil {
			err = sysx.LSetxattr(to, name, v, 0)
		}
		if err != nil {
			return fmt.Errorf("copy attribute %q of %q: %w", name, from, err)
		}
	}
	return nil
}

// ofLayer says whether an extended attribute belongs to the one directory:
// overlay's own marks, and signatures over the inode.
func ofLayer(name string) bool {
	return strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") ||
		name == "security.evm" || name == "security.ima"
}

// isEmpty says whether a directory has no entries, by one read of it.
func isEmpty(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = f.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}
