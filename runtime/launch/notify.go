package launch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// stage is what a message of the launcher's is about. The numbers are those of
// launcher.c.
type stage int32

const (
	stageReady stage = iota
	stageFork
	stageSession
	stageFiles
	stageTerminal
	stageExec
)

// String says what failed; for the execution itself the error says enough.
func (s stage) String() string {
	return map[stage]string{
		stageFork:     "fork: ",
		stageSession:  "make session: ",
		stageFiles:    "arrange files: ",
		stageTerminal: "take terminal: ",
	}[s]
}

// messageSize is that of two C ints: stage and errno.
const messageSize = 8

// Process is a command as this process sees it, whichever pid namespace the
// command is in.
type Process struct {
	Pid int
	// Pidfd refers to the process, also after its end. The caller closes it.
	Pidfd *os.File
}

// Notify is how one launcher tells of its command: make it, pass File on and
// start the launcher; then Wait, Release and Close.
type Notify struct {
	name string
	conn *net.UnixConn
	// inside is the launcher's end. Once it is started it must be open nowhere
	// else: that all of them are closed says that the command was executed.
	inside *os.File
}

// NewNotify makes a notification for the command called name in errors.
func NewNotify(name string) (*Notify, error) { return newNotify(name, true) }

func newNotify(name string, passPidfd bool) (_ *Notify, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make notification: %w", err)
		}
	}()
	// Packets keep messages apart. The pair has no network namespace that would
	// matter: what is connected stays so.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "notify")
	inside := os.NewFile(uintptr(fds[1]), "notify")
	conn, err := listen(ours, passPidfd)
	if err := errors.Join(err, ours.Close()); err != nil {
		return nil, errors.Join(err, inside.Close())
	}
	return &Notify{name: name, conn: conn, inside: inside}, nil
}

// listen prepares our end. The kernel notes the sender with every message that is
// sent while the receiver wants that, and gives its pid in the pid namespace of
// whoever receives it: the launcher need not know its own.
func listen(f *os.File, passPidfd bool) (*net.UnixConn, error) {
	fd := int(f.Fd())
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if passPidfd {
		// Linux 6.5; without it the pidfd is made from the pid.
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSPIDFD, 1)
		if err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// File is the end for the launcher. It is valid until Wait.
func (n *Notify) File() *os.File { return n.inside }

// Wait waits until the launcher, which has been started, has forked the command,
// and returns it. The command does nothing before Release: neither has it begun,
// nor can it have ended unless it was killed.
func (n *Notify) Wait(ctx context.Context) (*Process, error) {
	if err := n.inside.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return nil, n.errorf("%w", err)
	}
	s, errno, p, err := n.receive(ctx)
	switch {
	case errors.Is(err, io.EOF):
		return nil, n.errorf("launcher ended too early: %w", errdefs.ErrAborted)
	case err != nil:
		return nil, n.errorf("%w", err)
	case s != stageReady:
		return nil, errors.Join(n.failed(s, errno), p.close())
	case p.Pid <= 0:
		return nil, errors.Join(n.errorf("its pid is not known here: %w", errdefs.ErrFailedPrecondition), p.close())
	}
	if p.Pidfd != nil {
		return p, nil
	}
	// The pid may belong to another process if the command has been killed, but
	// then Release fails.
	fd, err := unix.PidfdOpen(p.Pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, n.killed()
	}
	if err != nil {
		return nil, n.errorf("%w", os.NewSyscallError("pidfd_open", err))
	}
	p.Pidfd = os.NewFile(uintptr(fd), "pidfd")
	return p, nil
}

// Release lets the command begin, and waits until it has been executed. An error
// says that it has not been, and will not be unless ctx is done.
func (n *Notify) Release(ctx context.Context) error {
	// A process that is gone cannot be sent to. If it went before it read this,
	// the kernel says so once instead of what else there is to receive.
	_, err := n.conn.Write([]byte{0})
	gone := errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
	if err != nil && !gone {
		return n.errorf("%w", err)
	}
	for {
		s, errno, p, err := n.receive(ctx)
		switch {
		case errors.Is(err, unix.ECONNRESET):
			gone = true
		case errors.Is(err, io.EOF) && gone:
			return n.killed()
		case errors.Is(err, io.EOF):
			return nil // the socket is close-on-exec
		case err != nil:
			return n.errorf("%w", err)
		default:
			return errors.Join(n.failed(s, errno), p.close())
		}
	}
}

// Close gives up the notification. A command that was not released ends.
func (n *Notify) Close() error {
	err := n.inside.Close()
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	return errors.Join(err, n.conn.Close())
}

// receive receives one message and its sender.
func (n *Notify) receive(ctx context.Context) (stage, unix.Errno, *Process, error) {
	if err := n.conn.SetReadDeadline(time.Time{}); err != nil {
		return 0, 0, nil, err
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		_ = n.conn.SetReadDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-done // or it would end the next one
		}
	}()
	message := make([]byte, messageSize)
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred)+unix.CmsgSpace(4))
	size, oobSize, _, _, err := n.conn.ReadMsgUnix(message, oob)
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil {
			err = ctx.Err()
		}
		return 0, 0, nil, err
	}
	p, err := sender(oob[:oobSize])
	if err == nil && size != messageSize {
		err = fmt.Errorf("message of %d bytes: %w", size, errdefs.ErrDataLoss)
	}
	if err != nil {
		return 0, 0, nil, errors.Join(err, p.close())
	}
	s := stage(binary.NativeEndian.Uint32(message))
	return s, unix.Errno(binary.NativeEndian.Uint32(message[4:])), p, nil
}

// sender returns who sent a message. Whoever may do as it likes in the command's
// pid namespace can name another process of that namespace there, and none else.
func sender(oob []byte) (*Process, error) {
	p := &Process{}
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return p, err
	}
	for _, m := range all {
		switch m.Header.Type {
		case unix.SCM_CREDENTIALS:
			cred, err := unix.ParseUnixCredentials(&m)
			if err != nil {
				return p, err
			}
			p.Pid = int(cred.Pid)
		case unix.SCM_PIDFD:
			// Negative if the process has ended in the meantime.
			if fd := int32(binary.NativeEndian.Uint32(m.Data)); fd >= 0 {
				p.Pidfd = os.NewFile(uintptr(fd), "pidfd")
			}
		}
	}
	return p, nil
}

func (p *Process) close() error {
	if p == nil || p.Pidfd == nil {
		return nil
	}
	return p.Pidfd.Close()
}

func (n *Notify) errorf(format string, args ...any) error {
	return fmt.Errorf("start %q: "+format, append([]any{n.name}, args...)...)
}

func (n *Notify) killed() error {
	return n.errorf("process was killed before it began: %w", errdefs.ErrAborted)
}

// failed is the error that the launcher has met.
func (n *Notify) failed(s stage, errno unix.Errno) error { return n.errorf("%s%w", s, failure{errno}) }

// failure is an errno that belongs to a class of errdefs without saying so twice.
type failure struct{ unix.Errno }

// Unwrap returns the errno and its class.
func (f failure) Unwrap() []error { return []error{f.Errno, f.class()} }

func (f failure) class() error {
	switch f.Errno {
	case unix.ENOENT, unix.ENOTDIR:
		return errdefs.ErrNotFound
	case unix.EACCES, unix.EPERM:
		return errdefs.ErrPermissionDenied
	case unix.ENOEXEC, unix.E2BIG, unix.EINVAL, unix.EBADF, unix.ENOTTY, unix.ELOOP, unix.ENAMETOOLONG, unix.EISDIR:
		return errdefs.ErrInvalidArgument
	case unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE:
		return errdefs.ErrResourceExhausted
	case unix.ETXTBSY:
		return errdefs.ErrFailedPrecondition
	default:
		return errdefs.ErrUnknown
	}
}
