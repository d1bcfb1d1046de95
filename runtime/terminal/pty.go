package terminal

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Size is that of a terminal's window in characters.
type Size struct {
	Columns uint16 `json:"columns"`
	Rows    uint16 `json:"rows"`
}

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

// newPTY takes a master over, except on an error. What comes from the terminal
// goes to sink once read runs.
func newPTY(master *os.File, sink func([]byte)) (*pty, error) {
	p := &pty{master: master, sink: sink, buf: make([]byte, 64<<10)}
	// Not by its path, which is the container's to change.
	err := p.control(func(fd int) error {
		slave, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK)
		if errno != 0 {
			return os.NewSyscallError("ioctl TIOCGPTPEER", errno)
		}
		p.slave = os.NewFile(slave, "pts")
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open the other side of a terminal: %w", err)
	}
	return p, nil
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
			over = p.readAll(int(fd))
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

// readAll hands on all that can be read without waiting.
func (p *pty) readAll(fd int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		n, err := unix.Read(fd, p.buf)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return err
		case n == 0:
			return unix.EIO
		default:
			p.sink(p.buf[:n])
		}
	}
}

// drain hands on all that was printed up to now. What a program wrote reaches
// the master some time later, by a worker of the kernel, for which poll waits.
func (p *pty) drain() error {
	return p.control(func(fd int) error {
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			_, err := unix.Poll(fds, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return os.NewSyscallError("poll", err)
			}
			if fds[0].Revents&unix.POLLIN == 0 {
				return nil
			}
			if err := p.readAll(fd); err != nil {
				return nil // hung up: that was all
			}
		}
	})
}

// resize sets the window's size; the kernel tells the foreground.
func (p *pty) resize(s Size) error {
	return p.control(func(fd int) error {
		return os.NewSyscallError("ioctl TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Columns}))
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

func (p *pty) index() (int, error) { return Index(p.master) }

// Index is the number of a master's terminal in its devpts.
func Index(master *os.File) (n int, err error) {
	err = control(master, func(fd int) error {
		v, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
		n = int(v)
		return os.NewSyscallError("ioctl TIOCGPTN", err)
	})
	return n, err
}

// plain has the terminal hand on output as it was written, and all of it:
// programs' bytes are to be told exactly. An interrupt would else discard what
// was printed and not read yet.
func (p *pty) plain() error {
	return p.setting(func(t *unix.Termios) {
		t.Oflag &^= unix.ONLCR
		t.Lflag |= unix.NOFLSH
	})
}

func (p *pty) setting(change func(*unix.Termios)) error {
	return control(p.slave, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err != nil {
			return os.NewSyscallError("ioctl TCGETS", err)
		}
		change(t)
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

// putInput types what takeInput has taken. It has been echoed and acted on.
func (p *pty) putInput(typed []byte) error {
	if len(typed) == 0 {
		return nil
	}
	err := control(p.slave, func(fd int) error {
		return inMode(fd, func(t *unix.Termios) {
			t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ISIG
			t.Iflag &^= unix.IXON
		}, func() error {
			if _, err := p.master.Write(typed); err != nil {
				return err
			}
			// poll has the kernel hand it on before the mode changes again.
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("put back unread input: %w", err)
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
