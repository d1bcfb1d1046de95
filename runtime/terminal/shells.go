package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// Launch says what shell to start.
type Launch struct {
	// Shell is a name or a path in the container; empty for bash if it is
	// there, else sh.
	Shell string `json:"shell,omitempty"`
	// Cwd and User are the container's own if they are empty.
	Cwd  string `json:"cwd,omitempty"`
	User string `json:"user,omitempty"`
	// Env is added to the container's own.
	Env []string `json:"env,omitempty"`
	// Size is 80 by 24 if it is zero.
	Size Size `json:"size"`
}

// Channel is a running shell and the ways to it.
type Channel struct {
	// Path of the shell in the container.
	Path    string
	Dialect shell.Dialect
	// Pid is the host's, Inner the container's.
	Pid, Inner int
	// Exit is a pidfd.
	Exit *os.File
	// Master is that of the shell's terminal, Commands the writing end and
	// Reports the reading end of its pipes. None of them blocks.
	Master, Commands, Reports *os.File
}

// close closes all of a channel that there is.
func (ch *Channel) close() error {
	var errs []error
	for _, f := range []*os.File{ch.Master, ch.Commands, ch.Reports, ch.Exit} {
		if f == nil {
			continue
		}
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Host is the container as the sessions need it.
type Host interface {
	// Acquire waits until the container is not being changed and keeps it so.
	Acquire(ctx context.Context) (release func(), err error)
	// StartShell starts a shell below init, while the container is acquired. The
	// channel is the caller's.
	StartShell(ctx context.Context, l Launch) (*Channel, error)
	// Processes returns the pids of the container's processes.
	Processes() ([]int, error)
}

// exitStatus is how a process has ended: an exit code or a signal.
type exitStatus struct {
	known  bool
	code   int
	signal unix.Signal
}

// waited returns how a process has ended that is not a child of ours. The
// kernel tells once its parent has reaped it (Linux 6.15); before that, and for
// ever if the container's init reaps nobody, its zombie tells.
func waited(pidfd *os.File, pid int) exitStatus {
	if ws, ok := reapedStatus(pidfd); ok {
		return statusOf(ws)
	}
	ws, ok := zombieStatus(pid)
	if !ok {
		// It was reaped in between.
		ws, ok = reapedStatus(pidfd)
	}
	if !ok {
		return exitStatus{}
	}
	return statusOf(ws)
}

func statusOf(ws unix.WaitStatus) exitStatus {
	if ws.Signaled() {
		return exitStatus{known: true, code: 128 + int(ws.Signal()), signal: ws.Signal()}
	}
	return exitStatus{known: true, code: ws.ExitStatus()}
}

func reapedStatus(pidfd *os.File) (unix.WaitStatus, bool) {
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	err := control(pidfd, func(fd int) error { return unix.IoctlPidfdInfo(fd, &info) })
	if err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	return unix.WaitStatus(info.Exit_code), true
}

// zombieStatus reads the last field of /proc/<pid>/stat.
func zombieStatus(pid int) (unix.WaitStatus, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
	f := strings.Fields(rest)
	if !ok || len(f) < 50 || f[0] != "Z" {
		return 0, false
	}
	ws, err := strconv.ParseUint(f[49], 10, 32)
	return unix.WaitStatus(ws), err == nil
}

// awaitExit waits until the process of a pidfd has ended, or it is closed.
func awaitExit(pidfd *os.File) (ended bool) {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, 0)
		return err == nil && fds[0].Revents != 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return err == nil
}

// directory returns the working directory of a process as itself sees it.
func directory(pid int) string {
	dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(dir, " (deleted)")
}

// Sides of a pipe that a Channel has.
const (
	Reading = iota
	Writing
)

// NewPipe makes a pipe of which one side is a Channel's: that one does not block.
func NewPipe(ours int) (r, w *os.File, _ error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	if err := unix.SetNonblock(fds[ours], true); err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[Reading]), "pipe"), os.NewFile(uintptr(fds[Writing]), "pipe"), nil
}
