package doctor

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"unsafe"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"golang.org/x/sys/unix"
)

func withNamespace(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, namespaces.Default)
}

// userfaultfd lets a restored container run before all of its memory is there.
func userfaultfd() Finding {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return Finding{"userfaultfd", Warn, errno.Error(), "memory is restored before a container runs; build the kernel with CONFIG_USERFAULTFD"}
	}
	unix.Close(int(fd))
	return Finding{"userfaultfd", OK, "available", ""}
}

// memoryTracking looks for a way to tell which pages were written since the
// last checkpoint: the ioctl of Linux 6.7, or soft-dirty bits, which criu knows
// how to test.
func memoryTracking(ctx context.Context) Finding {
	const check = "memory tracking"
	err := pagemapScan()
	if err == nil {
		return Finding{check, OK, "PAGEMAP_SCAN", ""}
	}
	if path, lerr := findCRIU(); lerr == nil {
		if exec.CommandContext(ctx, path, "check", "--feature", "mem_dirty_track").Run() == nil {
			return Finding{check, OK, "soft-dirty", ""}
		}
	}
	return Finding{check, Warn, fmt.Sprintf("no soft-dirty bits, and PAGEMAP_SCAN: %v", err),
		"checkpoints write all memory each time; use Linux 6.7 or newer"}
}

// scanArg is struct pm_scan_arg of linux/fs.h.
type scanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages uint64
	inverted, mask, anyof, ret                              uint64
}

const (
	pagemapScanIoctl = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	pageIsWritten    = 1 << 1
)

// pagemapScan asks for the written pages of an empty range, which does nothing
// but show that the kernel knows the call.
func pagemapScan() error {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return err
	}
	defer f.Close()
	arg := scanArg{mask: pageIsWritten, ret: pageIsWritten}
	arg.size = uint64(unsafe.Sizeof(arg))
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScanIoctl, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		return errno
	}
	return nil
}
