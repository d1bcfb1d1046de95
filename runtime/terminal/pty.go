package terminal

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Size is that of a terminal's window in characters.
type Size struct {
	Columns uint16 `json:"columns"`
	Rows    uint16 `json:"rows"`
}

var defaultSize = Size{Columns: 80, Rows: 24}

func (s Size) winsize() *unix.Winsize { return &unix.Winsize{Row: s.Rows, Col: s.Columns} }

// pty is a pseudo terminal. Holding the slave open has two uses: a read of the
// master does not fail while no process of the container has the terminal open,
// and what was typed but not read yet can be taken out.
type pty struct {
	master, slave *os.File
	sink          func([]byte)

	// mu is held from a read of the master until what came is handed on: two
	// goroutines read, and the order must stay.
	mu  sync.Mutex
	buf []byte
}

// Open makes a terminal for a user. It is one of the host's: CRIU cannot dump a
// tree that has more than one terminal whose master is outside of the tree, but
// lets any number of terminals be replaced that lie outside with both sides.
// Such a terminal has no name in the container: "tty" knows none.
func Open(size Size, uid int) (master, slave *os.File, retErr error) {
	defer func() {
		if retErr != nil {
			retErr = fmt.Errorf("make terminal: %w", retErr)
		}
	}()
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	master = os.NewFile(uintptr(m), "ptmx")
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, master.Close())
		}
	}()
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, os.NewSyscallError("ioctl TIOCSPTLCK", err)
	}
	if size == (Size{}) {
		size = defaultSize
	}
	if err := unix.IoctlSetWinsize(m, unix.TIOCSWINSZ, size.winsize()); err != nil {
		return nil, nil, os.NewSyscallError("ioctl TIOCSWINSZ", err)
	}
	if slave, err = peer(master, 0); err != nil {
		return nil, nil, err
	}
	if err := slave.Chown(uid, -1); err != nil {
		return nil, nil, errors.Join(err, slave.Close())
	}
	return master, slave, nil
}

// peer opens the other side of a terminal: not by its path, which another
// process can change.
func peer(master *os.File, flags uintptr) (slave *os.File, _ error) {
	err := control(master, func(fd int) error {
		s, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|flags)
		if errno != 0 {
			return os.NewSyscallError("ioctl TIOCGPTPEER", errno)
		}
		slave = os.NewFile(s, "pts")
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open the other side of a terminal: %w", err)
	}
	return slave, nil
}

// stat returns what the file system says of the terminal.
func (p *pty) stat() (st unix.Stat_t) {
	// It cannot fail on a file that is open.
	_ = control(p.slave, func(fd int) error { return unix.Fstat(fd, &st) })
	return st
}

// device identifies a terminal among those of one machine.
type device struct{ rdev, dev uint64 }

func deviceOf(st unix.Stat_t) device { return device{st.Rdev, st.Dev} }

func (p *pty) device() device { return deviceOf(p.stat()) }

// key is what CRIU calls a terminal that lies outside of the container.
func (d device) key() string { return fmt.Sprintf("tty[%x:%x]", d.rdev, d.dev) }

// newPTY takes a master over, except on an error. What comes from the terminal
// goes to sink once read runs.
func newPTY(master *os.File, sink func([]byte)) (*pty, error) {
	p := &pty{master: master, sink: sink, buf: make([]byte, 64<<10)}
	var err error
	p.slave, err = peer(master, unix.O_NONBLOCK)
	return p, err
}

func (p *pty) close() error { return errors.Join(p.master.Close(), p.slave.Close()) }

func (p *pty) control(fn func(fd int) error) error { return control(p.master, fn) }

func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = fn(int(fd)) })
	return errors.Join(err, inner)
}

// read hands on what comes from the terminal until it is closed, or hung up by
// the end of its session's leader.
func (p *pty) read() error {
	raw, err := p.master.SyscallConn()
	if err != nil {
		return err
	}
	var over error
	for over == nil {
		err := raw.Read(func(fd uintptr) bool {
			for more := true; more && over == nil; {
				more, over = p.readSome(int(fd))
			}
			return over != nil
		})
		if err != nil {
			return nil // closed
		}
	}
	if errors.Is(over, unix.EIO) {
		return nil
	}
	return over
}

// readSome hands on what can be read without waiting, as much as buf takes: the
// kernel gives a page at a time, and to hand on more of them at once is much
// cheaper. It says whether there may be more. Between two calls drain gets its
// turn, however much a program prints.
func (p *pty) readSome(fd int) (more bool, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	full := 0
	defer func() {
		if full > 0 {
			p.sink(p.buf[:full])
		}
	}()
	for full < len(p.buf) {
		n, err := unix.Read(fd, p.buf[full:])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return false, nil
		case err != nil:
			return false, err
		case n == 0:
			return false, unix.EIO
		default:
			full += n
		}
	}
	return true, nil
}

// drain hands on all that was printed up to now. What a program wrote reaches
// the master some time later, by a worker of the kernel, for which poll waits.
// What the kernel holds fits into buf: it takes some 12 KiB for a terminal. More
// than that has been printed since, and there may be no end to it. One read in
// any case, for it waits for what another goroutine has read and not handed on.
func (p *pty) drain() error {
	return p.control(func(fd int) error {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			_, err := unix.Poll(fds, 0)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EINTR) {
				return os.NewSyscallError("poll", err)
			}
		}
		if _, err := p.readSome(fd); err != nil && !errors.Is(err, unix.EIO) {
			return os.NewSyscallError("read", err)
		}
		return nil
	})
}

// settle has the kernel act on what was typed: echo it, above all. That is the
// work of a worker, for which poll waits.
func (p *pty) settle() error {
	return control(p.slave, func(fd int) error {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if errors.Is(err, unix.EINTR) {
			return nil // poll has looked before
		}
		return os.NewSyscallError("poll", err)
	})
}

// resize sets the window's size; the kernel tells the foreground.
func (p *pty) resize(s Size) error {
	return p.control(func(fd int) error {
		return os.NewSyscallError("ioctl TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, s.winsize()))
	})
}

func (p *pty) size() (Size, error) {
	var s Size
	err := p.control(func(fd int) error {
		w, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		if err != nil {
			return os.NewSyscallError("ioctl TIOCGWINSZ", err)
		}
		s = Size{Columns: w.Col, Rows: w.Row}
		return nil
	})
	return s, err
}

// foreground returns the foreground process group, as this process' pid
// namespace numbers it; 0 if there is none.
func (p *pty) foreground() (pgid int, err error) {
	err = p.control(func(fd int) error {
		pgid, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return os.NewSyscallError("ioctl TIOCGPGRP", err)
	})
	return pgid, err
}

// Plain has a terminal hand on output as it was written, and all of it: what
// programs print is to be told exactly. An interrupt would else discard what was
// not read yet. It must come before the shell, which takes the settings that it
// finds for those to go back to when a job has spoilt them.
func Plain(slave *os.File) error {
	t, err := mode(slave)
	if err != nil {
		return err
	}
	t.Oflag &^= unix.OPOST
	t.Lflag |= unix.NOFLSH
	return setMode(slave, t)
}

// mode returns a terminal's settings.
func mode(slave *os.File) (t *unix.Termios, err error) {
	err = control(slave, func(fd int) error {
		t, err = unix.IoctlGetTermios(fd, unix.TCGETS)
		return os.NewSyscallError("ioctl TCGETS", err)
	})
	return t, err
}

func setMode(slave *os.File, t *unix.Termios) error {
	return control(slave, func(fd int) error {
		return os.NewSyscallError("ioctl TCSETS", unix.IoctlSetTermios(fd, unix.TCSETS, t))
	})
}

// takeInput takes out what was typed and is not read yet. The programs on the
// terminal must stand still.
func (p *pty) takeInput() ([]byte, error) {
	var typed []byte
	err := control(p.slave, func(fd int) (err error) {
		return inMode(fd, func(t *unix.Termios) {
			t.Lflag &^= unix.ICANON | unix.ECHO | unix.ISIG
			t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 0, 0
		}, func() error {
			buf := make([]byte, 4096)
			for {
				n, err := unix.Read(fd, buf)
				switch {
				case errors.Is(err, unix.EINTR):
				case n <= 0 && (err == nil || errors.Is(err, unix.EAGAIN)):
					return nil
				case err != nil:
					return os.NewSyscallError("read", err)
				default:
					typed = append(typed, buf[:n]...)
				}
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("take unread input: %w", err)
	}
	return typed, nil
}

// putInput types what takeInput has taken. It has been echoed and acted on, but
// for what did not fit into the kernel's line buffer.
func (p *pty) putInput(typed []byte) error {
	known := bytes.Clone(typed[:min(len(typed), maxLine)])
	if len(known) == 0 {
		return nil
	}
	err := control(p.slave, func(fd int) error {
		return inMode(fd, func(t *unix.Termios) { literal(t, known) }, func() error {
			if err := p.push(fd, known); err != nil {
				return err
			}
			// poll has the kernel hand it on before the mode changes again.
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return err
		})
	})
	if err == nil {
		_, err = p.master.Write(typed[len(known):])
	}
	if err != nil {
		return fmt.Errorf("put back unread input: %w", err)
	}
	return nil
}

// literal has a terminal take input as it is, without an echo. In a line buffer
// a NUL is where the end of the input was typed; with VEOF a byte that the input
// does not have, the NULs of known become that.
func literal(t *unix.Termios, known []byte) {
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ISIG
	t.Iflag &^= unix.IXON | unix.ICRNL | unix.INLCR | unix.IGNCR | unix.ISTRIP | unix.IUCLC | unix.PARMRK
	if t.Lflag&unix.ICANON == 0 {
		return
	}
	// 0 is no character at all.
	for _, c := range []int{unix.VERASE, unix.VKILL, unix.VWERASE, unix.VREPRINT, unix.VLNEXT} {
		t.Cc[c] = 0
	}
	for c := byte(1); c != 0 && bytes.IndexByte(known, 0) >= 0; c++ {
		if c != '\n' && c != t.Cc[unix.VEOL] && c != t.Cc[unix.VEOL2] && bytes.IndexByte(known, c) < 0 {
			t.Cc[unix.VEOF] = c
			copy(known, bytes.ReplaceAll(known, []byte{0}, []byte{c}))
			return
		}
	}
	t.Cc[unix.VEOF] = 0
}

// push makes bytes a terminal's input. TIOCSTI is done when it returns. Kernels
// that know it no more take a write to the master, which a worker hands on.
func (p *pty) push(fd int, b []byte) error {
	for i := range b {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCSTI, uintptr(unsafe.Pointer(&b[i])))
		if i == 0 && (errno == unix.EIO || errno == unix.EPERM) {
			_, err := p.master.Write(b)
			return err
		}
		if errno != 0 {
			return os.NewSyscallError("ioctl TIOCSTI", errno)
		}
	}
	return nil
}

// inMode runs fn with the terminal's mode changed.
func inMode(fd int, change func(*unix.Termios), fn func() error) error {
	before, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return os.NewSyscallError("ioctl TCGETS", err)
	}
	mode := *before
	change(&mode)
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &mode); err != nil {
		return os.NewSyscallError("ioctl TCSETS", err)
	}
	return errors.Join(fn(), os.NewSyscallError("ioctl TCSETS", unix.IoctlSetTermios(fd, unix.TCSETS, before)))
}
