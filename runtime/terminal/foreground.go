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
	var st unix.Stat_t
	if err := control(p.slave, func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		return false, err
	}
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
	if l.replaced.Load() {
		return false
	}
	number, args, ok := call(fmt.Sprintf("/proc/%d", l.Pid))
	if !ok {
		return false
	}
	if number == unix.SYS_FUTEX {
		return l.Dialect == shell.Ash
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
	case unix.SYS_POLL, unix.SYS_PPOLL:
		return polls(pid, args[0], int(args[1]), tty)
	case unix.SYS_SELECT, unix.SYS_PSELECT6:
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

// signalForeground sends a signal to what runs in the foreground of a terminal.
// It spares the shell unless that is all there is, and says whether it was.
func signalForeground(p *pty, shell int, sig unix.Signal) (onlyShell bool, err error) {
	pgid, err := p.foreground()
	if err != nil {
		return false, err
	}
	if pgid <= 0 || pgid == shell {
		return true, kill(shell, sig)
	}
	return false, kill(-pgid, sig)
}

func kill(pid int, sig unix.Signal) error {
	if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to %d: %w", unix.SignalName(sig), pid, err)
	}
	return nil
}
