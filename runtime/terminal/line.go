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
	pty      *pty
	to       listener
	commands queue
	// replaced says that the shell has become another program.
	replaced atomic.Bool
	// readers are the goroutines that read from the channels.
	readers sync.WaitGroup
	// ended is closed once the shell has ended, settled once the listener has
	// been told.
	ended, settled chan struct{}
	// token is that of the report that counts. It is no part of the parser: who
	// hands on a report holds reading, and waits for who wants to expect one.
	token atomic.Pointer[string]

	// typing holds one element while somebody types, or nobody may. column is
	// how much of a line was typed then.
	typing chan struct{}
	column int
	// held says that nobody may type.
	held atomic.Bool

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
		commands: queue{file: ch.Commands},
		ended:    make(chan struct{}), settled: make(chan struct{}),
		typing: make(chan struct{}, 1),
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
			close(l.settled)
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

// send gives text to the shell.
func (l *line) send(text shell.Text) { l.commands.send(text) }

// expect makes the report with a token the one that counts. It comes before the
// text that asks for it.
func (l *line) expect(token string) { l.token.Store(&token) }

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
			l.feed(buf[:n])
		}
	}
}

// feed hands on a report when it is whole. What is no report is dropped: the
// shell then waits for a command, is asked for another report, and ended if that
// is no better.
func (l *line) feed(p []byte) {
	for len(p) > 0 {
		if token := l.token.Load(); token != nil && *token != l.parser.Token() {
			l.parser.Expect(*token)
		}
		n, state, err := l.parser.Feed(p)
		if err != nil {
			log.L.WithError(err).WithField("pid", l.Pid).Warn("read report of shell")
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
	return l.ask(ctx, text)
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
	<-l.commands.written()
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

// errHeld says that the session was held before all was typed.
var errHeld = errors.New("session is held")

// typeIn types input, and returns how much of it. A program that reads by lines
// cannot get a longer one than the kernel keeps.
func (l *line) typeIn(ctx context.Context, p []byte) (int, error) {
	select {
	case l.typing <- struct{}{}:
	case <-ctx.Done():
		return 0, fmt.Errorf("type input: %w", ctx.Err())
	}
	defer func() { <-l.typing }()
	if l.held.Load() {
		return 0, errHeld
	}
	column, err := l.checkLines(p)
	if err != nil {
		return 0, err
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		_ = l.Master.SetWriteDeadline(time.Now())
	})
	n, err := l.Master.Write(p)
	if !stop() {
		<-stopped // or it would stop the next one
		_ = l.Master.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		l.column = column
		return n, nil
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, os.ErrClosed):
		err = errHeld
	}
	return n, fmt.Errorf("type input: %w", err)
}

// holdTyping stops who types, and has all wait until the returned function is
// called.
func (l *line) holdTyping(ctx context.Context) (free func(), _ error) {
	l.held.Store(true)
	_ = l.Master.SetWriteDeadline(time.Unix(1, 0))
	select {
	case l.typing <- struct{}{}:
		// For what is put back.
		_ = l.Master.SetWriteDeadline(time.Time{})
		return func() { l.held.Store(false); <-l.typing }, nil
	case <-ctx.Done():
		_ = l.Master.SetWriteDeadline(time.Time{})
		l.held.Store(false)
		return nil, ctx.Err()
	}
}

// checkLines refuses a line that the kernel would cut, and returns how much of
// the last one has been typed then.
func (l *line) checkLines(p []byte) (column int, _ error) {
	t, err := mode(l.pty.slave)
	if err != nil || t.Lflag&unix.ICANON == 0 {
		return 0, err
	}
	column = l.column
	for _, c := range p {
		// A character that controls ends the line, or may.
		if column++; c < ' ' && c != '\t' {
			column = 0
		}
		if column > maxLine {
			return 0, fmt.Errorf("input has a line of more than %d bytes, and the program reads by lines: the kernel would cut it: %w",
				maxLine, errdefs.ErrInvalidArgument)
		}
	}
	return column, nil
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
// does not mind, like what runs in its foreground. Then keep is called, if there
// is one, before the terminal goes.
func (l *line) hangUp(keep func() error) error {
	_, targets, _ := l.inForeground() // none are as good as those that are not known
	err := errors.Join(l.signal(unix.SIGHUP), killAll(targets, unix.SIGHUP))
	select {
	case <-l.ended:
	case <-time.After(hangUpGrace):
		err = errors.Join(err, l.signal(unix.SIGKILL))
	}
	err = errors.Join(err, killAll(targets, unix.SIGKILL))
	if keep != nil {
		err = errors.Join(err, keep())
	}
	return errors.Join(err, l.close())
}

// close lets the channel go, without a word to the shell. It waits for the
// goroutines that use it.
func (l *line) close() error {
	err := l.Channel.close()
	if serr := l.pty.slave.Close(); !errors.Is(serr, os.ErrClosed) {
		err = errors.Join(err, serr)
	}
	<-l.commands.written()
	l.readers.Wait()
	return err
}
