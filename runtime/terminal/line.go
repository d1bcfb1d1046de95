package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

const (
	// startTimeout bounds how long a new shell may take to report.
	startTimeout = 10 * time.Second
	// hangUpGrace is what a shell gets to end after SIGHUP.
	hangUpGrace = 200 * time.Millisecond
	// maxLine is what the kernel takes of a line while programs read by lines;
	// it drops the rest without a word.
	maxLine = 4095
)

// listener is told what comes from a line.
type listener interface {
	printed(l *line, p []byte)
	reported(l *line, token string, s *shell.State)
	exited(l *line)
}

// line is one shell, from its start or its restore to its end.
type line struct {
	*Channel
	pty *pty
	to  listener
	// writes counts the writes to the command pipe that are under way.
	writes sync.WaitGroup
	// replaced says that the shell has become another program.
	replaced atomic.Bool
	// readers are the goroutines that read from the channels.
	readers sync.WaitGroup
	// ended is closed once the shell has ended.
	ended chan struct{}

	// reading is held from a read of the report pipe until what came is handed
	// on.
	reading sync.Mutex
	parser  *shell.Parser     // guarded by reading
	first   chan *shell.State // takes the next report; guarded by reading
}

// newLine takes a channel over, except on an error.
func newLine(ch *Channel, to listener) (*line, error) {
	l := &line{
		Channel: ch, to: to, parser: &shell.Parser{},
		ended: make(chan struct{}),
	}
	var err error
	l.pty, err = newPTY(ch.Master, func(p []byte) { to.printed(l, p) })
	return l, err
}

// serve begins to read from the line. It tells the listener of the shell's end,
// unless the line is closed before.
func (l *line) serve() {
	l.readers.Go(func() {
		if err := l.pty.read(); err != nil {
			log.L.WithError(err).WithField("pid", l.Pid).Warn("read terminal")
		}
	})
	l.readers.Go(func() {
		if err := l.readReports(); err != nil && !errors.Is(err, os.ErrClosed) {
			log.L.WithError(err).WithField("pid", l.Pid).Warn("read reports of shell")
		}
	})
	go func() {
		if awaitExit(l.Exit) {
			close(l.ended)
			l.to.exited(l)
		}
	}()
}

// gone says whether the shell has ended.
func (l *line) gone() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// send gives text to the shell. It takes more than a pipe holds: the shell may
// read it late.
func (l *line) send(text shell.Text) {
	l.writes.Go(func() {
		for _, part := range text {
			if _, err := l.Commands.Write(part); err != nil {
				if !errors.Is(err, os.ErrClosed) && !errors.Is(err, unix.EPIPE) {
					log.L.WithError(err).WithField("pid", l.Pid).Warn("give command to shell")
				}
				return
			}
		}
	})
}

// expect makes the report with a token the one that counts.
func (l *line) expect(token string) {
	l.reading.Lock()
	defer l.reading.Unlock()
	l.parser.Expect(token)
}

// readReports hands on what the shell reports, until it has closed the pipe.
func (l *line) readReports() error {
	raw, err := l.Reports.SyscallConn()
	if err != nil {
		return err
	}
	var over error
	for over == nil {
		err := raw.Read(func(fd uintptr) bool {
			over = l.readReportsNow(int(fd))
			return over != nil
		})
		if err != nil {
			return nil // closed
		}
	}
	if errors.Is(over, errHungUp) {
		l.replaced.Store(true)
		return nil
	}
	return over
}

var errHungUp = errors.New("other side is closed")

// readReportsNow hands on what is in the report pipe, without waiting.
func (l *line) readReportsNow(fd int) error {
	l.reading.Lock()
	defer l.reading.Unlock()
	buf := make([]byte, 16<<10)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return os.NewSyscallError("read", err)
		case n == 0:
			return errHungUp
		default:
			if err := l.feed(buf[:n]); err != nil {
				return fmt.Errorf("read report of shell: %w", err)
			}
		}
	}
}

// feed hands on a report when it is whole.
func (l *line) feed(p []byte) error {
	for len(p) > 0 {
		n, state, err := l.parser.Feed(p)
		if err != nil {
			return err
		}
		p = p[n:]
		switch {
		case state == nil:
		case l.first != nil:
			l.first <- state
			l.first = nil
		default:
			l.to.reported(l, l.parser.Token(), state)
		}
	}
	return nil
}

// drain hands on all that the shell and its programs have written up to now.
func (l *line) drain() error {
	err := control(l.Reports, func(fd int) error { return l.readReportsNow(fd) })
	if errors.Is(err, errHungUp) {
		err = nil
	}
	return errors.Join(err, l.pty.drain())
}

// partial returns the beginning of a report of which the rest is to come.
func (l *line) partial() []byte {
	l.reading.Lock()
	defer l.reading.Unlock()
	return l.parser.Pending()
}

// begin brings a new shell to where it takes steps, with the exported variables
// of the one before.
func (l *line) begin(ctx context.Context, before shell.State) (*shell.State, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if l.Dialect == shell.Unknown {
		if err := l.probe(ctx); err != nil {
			return nil, err
		}
	}
	if err := setPackets(l.Channel); err != nil {
		return nil, err
	}
	token, err := shell.NewToken()
	if err != nil {
		return nil, err
	}
	var last *shell.State
	if before.Exports != "" {
		last = &before
	}
	text, err := l.Dialect.Start(token, last)
	if err != nil {
		return nil, err
	}
	l.expect(token)
	state, err := l.ask(ctx, text)
	if err != nil {
		return nil, err
	}
	return state, l.pty.plain()
}

// ask sends text and waits for the report that is expected.
func (l *line) ask(ctx context.Context, text shell.Text) (*shell.State, error) {
	first := make(chan *shell.State, 1)
	l.reading.Lock()
	l.first = first
	l.reading.Unlock()
	l.send(text)
	select {
	case s := <-first:
		return s, nil
	case <-l.ended:
		return nil, fmt.Errorf("it ended at once, with status %d: %w", waited(l.Exit, l.Pid).code, errdefs.ErrFailedPrecondition)
	case <-ctx.Done():
		return nil, fmt.Errorf("it does not answer: %w", ctx.Err())
	}
}

// probe finds out what an unknown shell is, and has it begin anew as that.
func (l *line) probe(ctx context.Context) error {
	token, err := shell.NewToken()
	if err != nil {
		return err
	}
	l.reading.Lock()
	l.parser.ExpectProbe(token)
	l.reading.Unlock()
	s, err := l.ask(ctx, shell.Probe(token))
	if err != nil {
		return err
	}
	if l.Dialect, err = s.Probed(); err != nil {
		return err
	}
	text, err := l.Dialect.Exec(l.Path)
	if err != nil {
		return err
	}
	l.send(text)
	l.writes.Wait()
	return nil
}

// setPackets has the command pipe keep writes apart, for shells that need it.
// Only the writing end is told: CRIU refuses a reading one with that flag.
func setPackets(ch *Channel) error {
	if !ch.Dialect.Packets() {
		return nil
	}
	return control(ch.Commands, func(fd int) error {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_DIRECT)
		}
		return os.NewSyscallError("fcntl", err)
	})
}

// typeIn types input. A program that reads by lines cannot get a longer one
// than the kernel keeps.
func (l *line) typeIn(ctx context.Context, p []byte) error {
	if err := l.checkLines(p); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Master.SetWriteDeadline(time.Now()) })
	defer func() {
		if !stop() {
			_ = l.Master.SetWriteDeadline(time.Time{})
		}
	}()
	if _, err := l.Master.Write(p); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("type input: %w", err)
	}
	return nil
}

func (l *line) checkLines(p []byte) error {
	if len(p) <= maxLine {
		return nil
	}
	return control(l.pty.slave, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err != nil {
			return os.NewSyscallError("ioctl TCGETS", err)
		}
		if t.Lflag&unix.ICANON == 0 {
			return nil
		}
		n := 0
		for _, c := range p {
			if n++; c == '\n' || c == '\r' {
				n = 0
			}
			if n > maxLine {
				return fmt.Errorf("input has a line of more than %d bytes, and the program reads by lines: the kernel would cut it: %w",
					maxLine, errdefs.ErrInvalidArgument)
			}
		}
		return nil
	})
}

// signal sends a signal to the shell's process, whatever it runs.
func (l *line) signal(sig unix.Signal) error {
	err := control(l.Exit, func(fd int) error { return unix.PidfdSendSignal(fd, sig, nil, 0) })
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to shell: %w", unix.SignalName(sig), err)
	}
	return nil
}

// hangUp ends the shell as a terminal that goes away does, and by force if it
// does not mind.
func (l *line) hangUp() error {
	err := errors.Join(l.pty.close(), l.signal(unix.SIGHUP))
	select {
	case <-l.ended:
	case <-time.After(hangUpGrace):
		err = errors.Join(err, l.signal(unix.SIGKILL))
	}
	return errors.Join(err, l.close())
}

// close lets the channel go, without a word to the shell. It waits for the
// goroutines that use it.
func (l *line) close() error {
	var errs []error
	for _, f := range []*os.File{l.pty.master, l.pty.slave, l.Commands, l.Reports, l.Exit} {
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	l.writes.Wait()
	l.readers.Wait()
	return errors.Join(errs...)
}
