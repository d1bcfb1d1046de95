package terminal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// members returns the pids of a process group. pgid and they are numbered by
// this process' pid namespace.
func members(pgid int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if group, err := unix.Getpgid(pid); err == nil && group == pgid {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// waitsForInput says whether a thread of the foreground process group waits in
// the kernel for the terminal to be readable, and for nothing else that could
// come by itself.
func waitsForInput(p *pty) (bool, error) {
	pgid, err := p.foreground()
	if err != nil || pgid <= 0 {
		return false, err
	}
	pids, err := members(pgid)
	if err != nil {
		return false, err
	}
	st := p.stat()
	for _, pid := range pids {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil {
			return false, err
		}
		for _, thread := range threads {
			if threadReads(pid, thread, st.Rdev) {
				return true, nil
			}
		}
	}
	return false, nil
}

// call returns the system call that a thread is in, and its arguments. It is not
// ok if the thread runs, or has gone.
func call(thread string) (number int, args [6]uint64, ok bool) {
	b, err := os.ReadFile(filepath.Join(thread, "syscall"))
	if err != nil {
		return 0, args, false
	}
	f := strings.Fields(string(b))
	if len(f) < 7 {
		return 0, args, false
	}
	for i := range args {
		if args[i], err = strconv.ParseUint(strings.TrimPrefix(f[i+1], "0x"), 16, 64); err != nil {
			return 0, args, false
		}
	}
	number, err = strconv.Atoi(f[0])
	return number, args, err == nil
}

// forgetful says whether the shell waits for a command although it was given
// one, or will wait for ever: busybox' ash can be interrupted in the middle of
// a library function, and then finds a lock taken by itself.
func (l *line) forgetful() bool {
	if l.replaced.Load() || l.commands.writing() {
		return false
	}
	number, args, ok := call(fmt.Sprintf("/proc/%d", l.Pid))
	if !ok {
		return false
	}
	if number == unix.SYS_FUTEX {
		return l.Dialect == shell.Ash && l.itself()
	}
	if number != unix.SYS_READ {
		return false
	}
	var ours, theirs unix.Stat_t
	err := control(l.Commands, func(fd int) error {
		unread, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
		if err == nil && unread > 0 {
			err = unix.EBUSY
		}
		return errors.Join(err, unix.Fstat(fd, &ours))
	})
	if err != nil {
		return false
	}
	err = unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", l.Pid, args[0]), &theirs)
	return err == nil && theirs.Ino == ours.Ino && theirs.Dev == ours.Dev
}

// itself says whether the shell has not become another program: that would not
// have the command pipe, while a background process may keep the report pipe.
func (l *line) itself() bool {
	var key string
	if err := control(l.Commands, func(fd int) (err error) { key, err = pipeKey(fd); return err }); err != nil {
		return false
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", l.Pid))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == key {
			return true
		}
	}
	return false
}

// threadReads says whether a thread is in a call that waits for the terminal.
func threadReads(pid int, thread string, rdev uint64) bool {
	number, args, ok := call(thread)
	if !ok {
		return false
	}
	tty := func(fd int) bool {
		var st unix.Stat_t
		err := unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), &st)
		// A process' own name of its controlling terminal is another device.
		return err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && (st.Rdev == rdev || st.Rdev == unix.Mkdev(5, 0))
	}
	switch number {
	case unix.SYS_READ, unix.SYS_READV:
		return tty(int(args[0]))
	case sysPoll, unix.SYS_PPOLL, unix.SYS_RESTART_SYSCALL:
		// The last is what poll has become after its process was stopped or
		// frozen. It has the same arguments; those of the few other calls that
		// it can stand for are nothing that poll could wait for.
		return polls(pid, args[0], int(args[1]), tty)
	case sysSelect, unix.SYS_PSELECT6:
		return selects(pid, int(args[0]), args[1], tty)
	}
	return false
}

// polls says whether all that poll waits for is input from the terminal.
func polls(pid int, addr uint64, n int, tty func(int) bool) bool {
	const size, most = 8, 16
	if n <= 0 || n > most {
		return false
	}
	b, err := readMemory(pid, addr, n*size)
	if err != nil {
		return false
	}
	for ; len(b) > 0; b = b[size:] {
		fd := int(int32(binary.NativeEndian.Uint32(b)))
		events := binary.NativeEndian.Uint16(b[4:])
		if fd < 0 || events == 0 {
			continue
		}
		if events&unix.POLLIN == 0 || !tty(fd) {
			return false
		}
	}
	return true
}

// selects says whether all that select waits for is input from the terminal.
func selects(pid, n int, addr uint64, tty func(int) bool) bool {
	if n <= 0 || n > unix.FD_SETSIZE || addr == 0 {
		return false
	}
	b, err := readMemory(pid, addr, (n+63)/64*8)
	if err != nil {
		return false
	}
	found := false
	for fd := range n {
		if binary.NativeEndian.Uint64(b[fd/64*8:])>>(fd%64)&1 == 0 {
			continue
		}
		if !tty(fd) {
			return false
		}
		found = true
	}
	return found
}

func readMemory(pid int, addr uint64, n int) ([]byte, error) {
	b := make([]byte, n)
	local := []unix.Iovec{{Base: &b[0], Len: uint64(n)}}
	got, err := unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: uintptr(addr), Len: n}}, 0)
	if err != nil {
		return nil, os.NewSyscallError("process_vm_readv", err)
	}
	if got != n {
		return nil, fmt.Errorf("read %d of %d bytes", got, n)
	}
	return b, nil
}

// signalForeground sends a signal to what runs in the foreground of the
// terminal. What the terminal's keys send, the shell gets too if it has the
// foreground; it is spared all others unless it is all there is.
func (l *line) signalForeground(sig unix.Signal) error {
	group, targets, err := l.inForeground()
	if err != nil {
		return err
	}
	if group == l.Pid && (sig == unix.SIGINT || sig == unix.SIGQUIT) {
		targets = []int{-group}
	}
	if len(targets) == 0 {
		return l.signal(sig)
	}
	return killAll(targets, sig)
}

// inForeground returns the foreground process group, and what a signal has to be
// sent to that is for what runs in it. Without job control that is in the
// shell's own group.
func (l *line) inForeground() (group int, targets []int, _ error) {
	group, err := l.pty.foreground()
	if err != nil || group <= 0 {
		return 0, nil, err
	}
	if group != l.Pid {
		return group, []int{-group}, nil
	}
	pids, err := members(group)
	for _, pid := range pids {
		if pid != l.Pid && !inBackground(pid) {
			targets = append(targets, pid)
		}
	}
	return group, targets, err
}

func killAll(targets []int, sig unix.Signal) error {
	var errs []error
	for _, pid := range targets {
		errs = append(errs, kill(pid, sig))
	}
	return errors.Join(errs...)
}

// inBackground says whether a process is as a shell without job control starts
// one in the background: it ignores what the terminal's keys send, and does not
// read from the terminal.
func inBackground(pid int) bool {
	if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", pid)); err == nil && strings.HasPrefix(to, "/dev/pts/") {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return true // gone
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			ignored, err := strconv.ParseUint(strings.TrimSpace(rest), 16, 64)
			const keys = 1<<(unix.SIGINT-1) | 1<<(unix.SIGQUIT-1)
			return err == nil && ignored&keys == keys
		}
	}
	return false
}

func kill(pid int, sig unix.Signal) error {
	if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to %d: %w", unix.SignalName(sig), pid, err)
	}
	return nil
}
