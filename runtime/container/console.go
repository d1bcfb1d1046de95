package container

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/containerd/log"
	"github.com/opencontainers/runc/libcontainer/utils"
	"golang.org/x/sys/unix"
)

// console is the terminal of a process, seen from its master side. The master
// can be replaced: each generation of init has a terminal of its own.
type console struct {
	mu sync.Mutex
	// changed is closed, and made anew, whenever one of the following changes.
	changed chan struct{}
	// masters are the present master and those after it that the output has
	// not reached yet: each is read to its end before the next one.
	masters []*os.File
	// size is the last size that was asked for.
	size *unix.Winsize
	// held says that input waits: the present master is about to be replaced.
	held bool
	// finished says that there will be no other master.
	finished bool
	closed   bool
}

func newConsole() *console { return &console{changed: make(chan struct{})} }

// changedLocked wakes up all who wait for a change.
func (c *console) changedLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// replace goes on with another master. It consumes the file unless it fails.
func (c *console) replace(master *os.File) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		// The client has hung up; so does the terminal.
		return master.Close()
	}
	if c.size != nil {
		if err := setSize(master, c.size); err != nil {
			return err
		}
	}
	c.masters = append(c.masters, master)
	c.held = false
	c.changedLocked()
	return nil
}

// hold has input wait, or go on. A write to a terminal whose last process is
// dying can succeed and be lost.
func (c *console) hold(held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held != held {
		c.held = held
		c.changedLocked()
	}
}

// finish says that there will be no other master.
func (c *console) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.finished {
		c.finished = true
		c.changedLocked()
	}
}

// close hangs up.
func (c *console) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed, c.finished = true, true
	for _, m := range c.masters {
		closeQuietly(m)
	}
	c.masters = nil
	c.changedLocked()
}

func (c *console) resize(width, height uint16) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.size = &unix.Winsize{Row: height, Col: width}
	if len(c.masters) == 0 {
		return nil
	}
	return setSize(c.masters[len(c.masters)-1], c.size)
}

func setSize(master *os.File, size *unix.Winsize) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) {
		ioctlErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, size)
	})
	if err := errors.Join(err, ioctlErr); err != nil {
		return fmt.Errorf("resize terminal: %w", err)
	}
	return nil
}

// oldest waits for the master that the output comes from. It returns nil if
// there is none and will be none.
func (c *console) oldest(done *os.File) *os.File {
	for {
		c.mu.Lock()
		if done != nil && len(c.masters) > 1 && c.masters[0] == done {
			closeQuietly(done)
			c.masters = c.masters[1:]
		}
		if len(c.masters) > 0 && c.masters[0] != done {
			defer c.mu.Unlock()
			return c.masters[0]
		}
		if c.finished {
			c.mu.Unlock()
			return nil
		}
		changed := c.changed
		c.mu.Unlock()
		<-changed
	}
}

// copyOutput copies what the masters give to dst, until the console is
// finished and the last one has given all. A read fails with EIO once nobody
// has the other side open.
func (c *console) copyOutput(dst io.Writer) {
	for m := c.oldest(nil); m != nil; m = c.oldest(m) {
		_, err := io.Copy(dst, m)
		if err == nil || isClosed(err) || errors.Is(err, unix.EIO) {
			continue
		}
		log.L.WithError(err).Warn("output of terminal is dropped from here on")
		dst = io.Discard
		if _, err := io.Copy(dst, m); err != nil && !isClosed(err) && !errors.Is(err, unix.EIO) {
			log.L.WithError(err).Warn("read output of terminal")
		}
	}
}

// Write gives input to the newest master. Between two generations it waits.
func (c *console) Write(p []byte) (int, error) {
	written := 0
	for {
		c.mu.Lock()
		var m *os.File
		if n := len(c.masters); n > 0 && !c.held {
			m = c.masters[n-1]
		}
		changed, over := c.changed, c.finished
		c.mu.Unlock()
		if m != nil {
			n, err := m.Write(p[written:])
			written += n
			if err == nil {
				return written, nil
			}
			if !errors.Is(err, unix.EIO) && !isClosed(err) {
				return written, err
			}
		}
		if over {
			return written, io.ErrClosedPipe
		}
		<-changed
	}
}

// consoleSocket is how a process hands out the master of its terminal.
type consoleSocket struct {
	parent, child *os.File
}

func newConsoleSocket() (*consoleSocket, error) {
	parent, child, err := utils.NewSockPair("console")
	if err != nil {
		return nil, fmt.Errorf("make socket for terminal: %w", err)
	}
	return &consoleSocket{parent: parent, child: child}, nil
}

// Close closes both ends.
func (s *consoleSocket) Close() error {
	closeQuietly(s.child)
	return s.parent.Close()
}

// receive returns the master. The process has been started, so that without our
// own end of its side a dead one is noticed.
func (s *consoleSocket) receive() (*os.File, error) {
	closeQuietly(s.child)
	data, control := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	var n int
	for {
		var err error
		_, n, _, _, err = unix.Recvmsg(int(s.parent.Fd()), data, control, unix.MSG_CMSG_CLOEXEC)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return nil, os.NewSyscallError("recvmsg", err)
		}
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, errors.New("process ended without giving its terminal")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "ptmx"), nil
}
