package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// CRIU leaves cgroups to us, and with them the cgroup namespace: restored
// processes are in the one that CRIU itself runs in.

// cgroupNamespaceOf opens the cgroup namespace of process pid, or returns nil if
// the configuration leaves the container in the host's.
func cgroupNamespaceOf(cfg *libConfig, pid int) (*os.File, error) {
	if !cfg.Namespaces.Contains(configs.NEWCGROUP) {
		return nil, nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/cgroup", pid))
	if err != nil {
		return nil, fmt.Errorf("open cgroup namespace: %w", err)
	}
	return f, nil
}

// newCgroupNamespace makes the cgroup namespace of a new container whose cgroups
// are cg, or opens that which the configuration names. It is nil for the host's.
func newCgroupNamespace(cfg *libConfig, cg cgroups.Manager) (*os.File, error) {
	if !cfg.Namespaces.Contains(configs.NEWCGROUP) {
		return nil, nil
	}
	if path := cfg.Namespaces.PathOf(configs.NEWCGROUP); path != "" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("open cgroup namespace: %w", err)
		}
		return f, nil
	}
	var f *os.File
	err := onThread(func() (err error) {
		f, err = unshareCgroup(cg)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make cgroup namespace: %w", err)
	}
	return f, nil
}

// unshareCgroup has a child make the namespace, as a namespace begins where its
// maker is. A child is born in the cgroups of the thread that starts it, but in
// cgroup v2, where threads stay with their process, in the one it is told. The
// calling thread must not be used any more.
func unshareCgroup(cg cgroups.Manager) (*os.File, error) {
	attr := &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWCGROUP, Ptrace: true, Pdeathsig: syscall.SIGKILL}
	for _, dir := range cg.GetPaths() {
		unified, err := isUnified(dir)
		if err != nil {
			return nil, err
		}
		if !unified {
			if err := os.WriteFile(filepath.Join(dir, "tasks"), []byte(strconv.Itoa(unix.Gettid())), 0); err != nil {
				return nil, err
			}
			continue
		}
		fd, err := os.Open(dir)
		if err != nil {
			return nil, err
		}
		defer fd.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(fd.Fd())
	}
	// A traced child stops before it runs anything: any program will do.
	const self = "/proc/self/exe"
	pid, err := syscall.ForkExec(self, []string{self}, &syscall.ProcAttr{Sys: attr})
	if err != nil {
		return nil, os.NewSyscallError("fork", err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/cgroup", pid))
	return f, errors.Join(err, killTraced(pid))
}

// killTraced ends a child that the calling thread traces. The kernel tells of its
// stop first.
func killTraced(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return os.NewSyscallError("kill", err)
	}
	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(pid, &status, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("wait4", err)
		}
		if status.Exited() || status.Signaled() {
			return nil
		}
	}
}

func isUnified(dir string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return false, fmt.Errorf("stat cgroup %q: %w", dir, os.NewSyscallError("statfs", err))
	}
	return st.Type == unix.CGROUP2_SUPER_MAGIC, nil
}
