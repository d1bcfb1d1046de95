package container

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs fn on an OS thread of its own that is thrown away afterwards:
// the thread may enter namespaces and need not come back.
func onThread(fn func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		errc <- fn()
	}()
	return <-errc
}

// enterMountNamespace moves the calling thread into a mount namespace. The
// kernel demands that the thread shares its root and working directory with no
// other thread first.
func enterMountNamespace(ns *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter mount namespace: %w", os.NewSyscallError("setns", err))
	}
	return nil
}
