package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/fifo"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// Stdio are the standard streams of a process, as containerd names them: each
// is empty, the path of a fifo or a file, or a URI with one of the schemes
// fifo, file, binary and binary-v2.
type Stdio struct {
	Stdin    string
	Stdout   string
	Stderr   string
	Terminal bool
}

// stdio are the opened standard streams of one process.
//
// Without a terminal all three are pipes, also those that nobody asked for: an
// empty stdin is a pipe at its end, and the output that nobody wants is read
// and dropped. The host's /dev/null would do, but CRIU cannot dump a process
// that has a file from outside of its mount namespace open.
//
// For init both ends of every pipe stay open here as long as the task lives, so
// that neither its readers nor its writers notice when one generation has died
// and the next one is not there yet.
type stdio struct {
	// console is set for a terminal, which has no pipes.
	console *console
	// ends are the container's ends of the pipes by descriptor.
	ends     [3]*os.File
	endsOnce sync.Once

	// hold keeps the stdin fifo from ending before CloseIO is called.
	hold     io.Closer
	holdOnce sync.Once

	// outputs counts the goroutines that copy output.
	outputs sync.WaitGroup
	// closers are our sides of all that was opened.
	closers []io.Closer
	logger  *logger
}

// openStdio opens the standard streams. Like containerd's own shim, it waits
// until the client has opened its side of the output fifos, or ctx is done.
func (c *Container) openStdio(ctx context.Context, want Stdio) (_ *stdio, retErr error) {
	s := &stdio{}
	defer func() {
		if retErr != nil {
			s.finish()
			retErr = errors.Join(retErr, s.close())
		}
	}()
	out, err := parseTarget(want.Stdout)
	if err != nil {
		return nil, fmt.Errorf("open stdout: %w", err)
	}
	errOut, err := parseTarget(want.Stderr)
	if err != nil {
		return nil, fmt.Errorf("open stderr: %w", err)
	}
	if out.kind == targetBinary {
		if err := s.startLogger(c, out); err != nil {
			return nil, err
		}
	}
	if want.Terminal {
		return s, s.openTerminal(ctx, want.Stdin, out)
	}
	if s.logger != nil {
		s.ends[1], s.ends[2] = s.logger.stdout, s.logger.stderr
	} else if err := errors.Join(s.openOutput(ctx, 1, out), s.openOutput(ctx, 2, errOut)); err != nil {
		return nil, err
	}
	if err := s.openInput(ctx, want.Stdin); err != nil {
		return nil, err
	}
	for _, end := range s.ends {
		if err := end.Chown(c.ioUID, c.ioGID); err != nil {
			return nil, fmt.Errorf("give pipe to the container's user: %w", err)
		}
	}
	return s, nil
}

// openOutput makes the pipe of an output stream and copies what comes out.
func (s *stdio) openOutput(ctx context.Context, fd int, t target) error {
	sink, err := t.open(ctx)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, sink)
	r, w, err := newPipe()
	if err != nil {
		return err
	}
	ours, err := pollable(r)
	if err != nil {
		return errors.Join(err, w.Close())
	}
	s.ends[fd] = w
	s.closers = append(s.closers, ours)
	s.outputs.Go(func() {
		copyOutput(sink, ours)
		closeQuietly(sink)
	})
	return nil
}

// openInput makes the pipe of stdin. Without a fifo its writing end is closed
// at once.
func (s *stdio) openInput(ctx context.Context, name string) error {
	r, w, err := newPipe()
	if err != nil {
		return err
	}
	s.ends[0] = r
	if name == "" {
		return w.Close()
	}
	ours, err := pollable(w)
	if err != nil {
		return err
	}
	in, err := s.openStdin(name)
	if err != nil {
		return errors.Join(err, ours.Close())
	}
	s.closers = append(s.closers, ours)
	go func() {
		if _, err := io.Copy(ours, in); err != nil && !isClosed(err) {
			log.G(ctx).WithError(err).Debug("copy stdin")
		}
		closeQuietly(ours)
		closeQuietly(in)
	}()
	return nil
}

// openStdin opens the stdin fifo for reading, and also for writing: a client
// that goes away must not end the process' input. close ends the reading.
func (s *stdio) openStdin(name string) (io.ReadWriteCloser, error) {
	// These are not bound to a request: they are open when the other side is.
	ctx := context.Background()
	in, err := fifo.OpenFifo(ctx, name, syscall.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open stdin: %w", err)
	}
	hold, err := fifo.OpenFifo(ctx, name, syscall.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open stdin: %w", err), in.Close())
	}
	s.hold = hold
	s.closers = append(s.closers, in)
	return in, nil
}

// openTerminal opens what the terminal is copied from and to. The terminal
// itself comes from the process: see attachConsole.
func (s *stdio) openTerminal(ctx context.Context, stdin string, out target) error {
	s.console = newConsole()
	var sink io.WriteCloser
	var err error
	if s.logger != nil {
		// A terminal has one output only.
		if err := s.logger.stderr.Close(); err != nil {
			return err
		}
		sink = s.logger.stdout
	} else if sink, err = out.open(ctx); err != nil {
		return err
	}
	s.closers = append(s.closers, sink)
	s.outputs.Go(func() {
		s.console.copyOutput(sink)
		closeQuietly(sink)
	})
	if stdin == "" {
		return nil
	}
	in, err := s.openStdin(stdin)
	if err != nil {
		return err
	}
	go func() {
		if _, err := io.Copy(s.console, in); err != nil && !isClosed(err) {
			log.G(ctx).WithError(err).Debug("copy stdin to terminal")
		}
		// The input has ended for good: the terminal hangs up, as it does
		// under containerd's own shim.
		s.console.close()
		closeQuietly(in)
	}()
	return nil
}

// terminal says whether the process has a terminal instead of pipes.
func (s *stdio) terminal() bool { return s.console != nil }

// attachConsole gives a new process its terminal.
func (s *stdio) attachConsole(master *os.File) error {
	m, err := pollable(master)
	if err != nil {
		return err
	}
	return s.console.replace(m)
}

// replaceConsole goes on with the terminal of the next generation. What the old
// one still holds is copied first; input waits for the new one. The window
// keeps its size.
func (s *stdio) replaceConsole(master *os.File) error { return s.attachConsole(master) }

// holdInput has the input of a terminal wait while its processes are replaced,
// or go on. The input of a pipe waits in the pipe.
func (s *stdio) holdInput(held bool) {
	if s.console != nil {
		s.console.hold(held)
	}
}

// containerEnds returns the container's ends of init's pipes by descriptor: for
// stdin the reading end, else the writing ends. They are open as long as the
// task lives. A terminal has none.
func (s *stdio) containerEnds() map[int]*os.File {
	ends := map[int]*os.File{}
	for fd, f := range s.ends {
		if f != nil {
			ends[fd] = f
		}
	}
	return ends
}

// closeContainerEnds lets the readers of the pipes see their end once the
// processes have closed theirs.
func (s *stdio) closeContainerEnds() {
	s.endsOnce.Do(func() {
		for _, f := range s.ends {
			if f != nil {
				closeQuietly(f)
			}
		}
	})
}

// finish is called when the process has ended: there will be no other output
// than what is in the pipes or the terminal.
func (s *stdio) finish() {
	s.closeContainerEnds()
	if s.console != nil {
		s.console.finish()
	}
}

// resize sets the size of the terminal, if there is one.
func (s *stdio) resize(width, height uint16) error {
	if s.console == nil {
		return nil
	}
	return s.console.resize(width, height)
}

// closeStdin lets stdin end with the client's side of the fifo.
func (s *stdio) closeStdin() (err error) {
	if s.hold != nil {
		s.holdOnce.Do(func() { err = s.hold.Close() })
	}
	return err
}

// drain waits until all output has been read. The process has ended.
func (s *stdio) drain(ctx context.Context, timeout time.Duration) error {
	done := make(chan struct{})
	go func() {
		s.outputs.Wait()
		close(done)
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return fmt.Errorf("output was not read to its end within %s", timeout)
	case <-ctx.Done():
		return fmt.Errorf("wait for output to be read: %w", ctx.Err())
	}
}

// close gives up what drain could not wait for, and waits for the goroutines
// that copy output.
func (s *stdio) close() error {
	s.finish()
	err := s.closeStdin()
	if s.console != nil {
		s.console.close()
	}
	for _, c := range s.closers {
		closeQuietly(c)
	}
	if s.logger != nil {
		err = errors.Join(err, s.logger.stop())
	}
	s.outputs.Wait()
	return err
}

// copyOutput copies until src ends. If dst cannot be written the rest is still
// read: a full disk must not stop the container.
func copyOutput(dst io.Writer, src io.Reader) {
	if _, err := io.Copy(dst, src); err == nil || isClosed(err) {
		return
	} else {
		log.L.WithError(err).Warn("output of process is dropped from here on")
	}
	if _, err := io.Copy(io.Discard, src); err != nil && !isClosed(err) {
		log.L.WithError(err).Warn("read output of process")
	}
}

// newPipe makes a pipe whose ends block, as a container's process expects.
func newPipe() (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// pollable makes reads and writes of f end when it is closed. It consumes f.
func pollable(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), f.Close())
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func isClosed(err error) bool {
	return errors.Is(err, os.ErrClosed) || errors.Is(err, io.ErrClosedPipe) ||
		errors.Is(err, fifo.ErrReadClosed) || errors.Is(err, fifo.ErrWriteClosed)
}

// closeQuietly closes what may be closed already.
func closeQuietly(c io.Closer) {
	if err := c.Close(); err != nil && !isClosed(err) {
		log.L.WithError(err).Debug("close stream")
	}
}
