package container

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/rootfs"
)

// oldRoot is the root of a dead tree: unmounted, but its file system is held.
//
// The end of an overlay writes back all of the file system below it, whoever
// dirtied it, and everything that is synced meanwhile waits for that, such as
// the record of the node. So the end begins at once only where there is little
// to write, otherwise when the container is back.
//
// The kernel warns when a sealed layer is mounted before the old root has
// ended. No harm can come of it: nobody is left to write through the old root.
type oldRoot struct {
	end func() (gone <-chan struct{})
	// early says that the end has begun.
	early bool
}

const (
	// littleDirty is how much written data is worth no delay.
	littleDirty = 8 << 20
	// endPatience is how long a switch waits for an end that has begun.
	endPatience = 10 * time.Millisecond
)

// takeRoot unmounts the root of the dead container.
func (c *Container) takeRoot() (*oldRoot, error) {
	tree, _, err := openTree(unix.AT_FDCWD, c.rootfs, unix.OPEN_TREE_CLONE)
	if err != nil {
		return nil, fmt.Errorf("hold root: %w", err)
	}
	o := &oldRoot{end: sync.OnceValue(func() <-chan struct{} {
		gone := make(chan struct{})
		c.waiters.Go(func() {
			defer close(gone)
			tree.Close() //nolint:errcheck // nothing was written through it
		})
		return gone
	})}
	if err := rootfs.Unmount(c.rootfs); err != nil {
		o.end()
		return nil, fmt.Errorf("unmount root: %w", err)
	}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil && dirtyBytes(string(b)) < littleDirty {
		o.early = true
		o.end()
	}
	return o, nil
}

// await waits a little for an end that has begun.
func (o *oldRoot) await() {
	if !o.early {
		return
	}
	timer := time.NewTimer(endPatience)
	defer timer.Stop()
	select {
	case <-o.end():
	case <-timer.C:
	}
}

// dirtyBytes reads from /proc/meminfo how much data waits to be written back.
func dirtyBytes(meminfo string) uint64 {
	for line := range strings.Lines(meminfo) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "Dirty: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	return 0
}
