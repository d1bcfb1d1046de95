package container

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"
)

// makeMountpoints makes what a root lacks of the mountpoints of process images:
// who restores by containerd's own calls may do it onto a bare image. Whatever
// lies in another mount comes with that.
func makeMountpoints(root string, desc *Description, cfg *libConfig) error {
	dirs := map[string]bool{} // whether a mountpoint is a directory
	for _, m := range cfg.Mounts {
		if m.Device != "bind" {
			dirs[path.Clean(m.Destination)] = true
		}
	}
	for _, m := range desc.Mounts {
		dirs[path.Clean(m.Mountpoint)] = m.Dir
	}
	handle, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open root: %w", err)
	}
	defer handle.Close()
	points := slices.Sorted(maps.Keys(dirs))
	for _, p := range points {
		inAnother := slices.ContainsFunc(points, func(o string) bool { return o != p && strings.HasPrefix(p, o+"/") })
		if p == "/" || inAnother {
			continue
		}
		if err := makeMountpoint(handle, p, dirs[p]); err != nil {
			return fmt.Errorf("make mountpoint %q: %w", p, err)
		}
	}
	return nil
}

// makeMountpoint makes one, and the directories above it. Links of the image
// cannot lead out of the root.
func makeMountpoint(root *os.File, p string, dir bool) error {
	if f, err := openIn(root, p, unix.O_PATH); err == nil {
		return f.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if dir {
		d, err := pathrs.MkdirAllHandle(root, p, 0o755)
		if err != nil {
			return err
		}
		return d.Close()
	}
	parent, err := pathrs.MkdirAllHandle(root, path.Dir(p), 0o755)
	if err != nil {
		return err
	}
	defer parent.Close()
	fd, err := unix.Openat(int(parent.Fd()), path.Base(p), unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return os.NewSyscallError("openat", err)
	}
	return unix.Close(fd)
}
