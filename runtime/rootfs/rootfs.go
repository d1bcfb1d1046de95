// Package rootfs mounts a container's root from a list of mounts and takes it
// down again.
package rootfs

import (
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// Mount mounts all of mounts on target, which must exist. If one fails, none
// is left.
func Mount(mounts []mount.Mount, target string) error {
	if err := mount.All(mounts, target); err != nil {
		return errors.Join(fmt.Errorf("mount %q: %w", target, err), Unmount(target))
	}
	return nil
}

// Unmount takes down everything that is mounted at target and below. A root
// that a process outside of the container still uses is detached: nobody can
// find it any more, and it goes with its last user. It is no error if nothing
// is mounted there.
func Unmount(target string) error {
	err := mount.UnmountRecursive(target, 0)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if derr := mount.UnmountRecursive(target, unix.MNT_DETACH); derr != nil {
		return fmt.Errorf("unmount %q: %w", target, errors.Join(err, derr))
	}
	return nil
}
