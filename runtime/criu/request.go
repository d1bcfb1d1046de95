package criu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

const (
	// maxMessage is well above the largest message of CRIU's service.
	maxMessage = 256 << 10
	// maxFiles is how many files one message may carry.
	maxFiles = 16
)

// errGone says that the worker ended before it answered.
var errGone = errors.New("criu ended without an answer")

// call is one request to a worker.
type call struct {
	op      string
	typ     rpc.CriuReqType
	opts    *rpc.CriuOpts
	log     string // path, for people
	timeout time.Duration
	// cancellable requests end with their context.
	cancellable bool
	// notify, if set, is given each notification, and owns its files.
	notify func(n *rpc.CriuNotify, files []*os.File)
}

// do sends the request and returns CRIU's final answer, which is a success. On
// an error the worker and what it has left are gone when do returns, unless
// they resist being killed.
func (w *Worker) do(ctx context.Context, c *call) (_ *rpc.CriuResp, retErr error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("criu %s: %w", c.op, err)
	}
	if err := w.begin(); err != nil {
		return nil, fmt.Errorf("criu %s: %w", c.op, err)
	}
	// The log of an earlier request must not explain this one.
	_ = os.Remove(c.log)
	timeout := c.timeout
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	_ = w.conn.SetDeadline(time.Now().Add(timeout))
	if c.cancellable {
		stop := context.AfterFunc(ctx, func() { _ = w.conn.SetDeadline(time.Unix(1, 0)) })
		defer stop()
	}
	resp, err := w.exchange(c)
	if err == nil && resp.GetSuccess() {
		w.end(true)
		return resp, nil
	}
	if err != nil {
		_ = w.kill()
	}
	w.end(false)
	_ = w.awaitExit()
	switch {
	case err == nil:
		return nil, newError(c, resp.GetCrErrno(), resp.GetCrErrmsg())
	case errors.Is(err, os.ErrDeadlineExceeded) && c.cancellable && ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("no answer in %v: %w", timeout, context.DeadlineExceeded)
	case errors.Is(err, errGone):
		err = fmt.Errorf("%w: %s: %w", err, w.exit(), errdefs.ErrInternal)
	}
	return nil, brokenError(c, err, w.printed())
}

// exchange sends the request and answers notifications until the final message.
func (w *Worker) exchange(c *call) (*rpc.CriuResp, error) {
	err := w.send(&rpc.CriuReq{Type: c.typ.Enum(), Opts: c.opts})
	if err != nil {
		return nil, err
	}
	buf := make([]byte, maxMessage)
	for {
		resp, files, err := w.receive(buf)
		if err != nil {
			return nil, err
		}
		if resp.GetType() != rpc.CriuReqType_NOTIFY {
			closeAll(files)
			if t := resp.GetType(); t != c.typ && resp.GetSuccess() {
				return nil, fmt.Errorf("answer of type %v: %w", t, errdefs.ErrInternal)
			}
			return resp, nil
		}
		if c.notify != nil {
			c.notify(resp.GetNotify(), files)
		} else {
			closeAll(files)
		}
		ack := &rpc.CriuReq{Type: rpc.CriuReqType_NOTIFY.Enum(), NotifySuccess: proto.Bool(true)}
		if err := w.send(ack); err != nil {
			return nil, err
		}
	}
}

func (w *Worker) send(req *rpc.CriuReq) error {
	data, err := proto.Marshal(req)
	if err != nil {
		return fmt.Errorf("encode request: %w", err)
	}
	if _, err := w.conn.Write(data); err != nil {
		return gone(fmt.Errorf("send request: %w", err))
	}
	return nil
}

// receive reads one message with the files that came along.
func (w *Worker) receive(buf []byte) (_ *rpc.CriuResp, files []*os.File, retErr error) {
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	n, oobn, flags, _, err := w.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, nil, gone(fmt.Errorf("receive answer: %w", err))
	}
	if files, err = receivedFiles(oob[:oobn]); err != nil {
		return nil, nil, err
	}
	defer func() {
		if retErr != nil {
			closeAll(files)
		}
	}()
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, files, fmt.Errorf("answer is cut off: %w", errdefs.ErrInternal)
	}
	var resp rpc.CriuResp
	if err := proto.Unmarshal(buf[:n], &resp); err != nil {
		return nil, files, fmt.Errorf("decode answer: %w", err)
	}
	return &resp, files, nil
}

// gone turns the ways in which a connection ends into errGone.
func gone(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return errGone
	}
	return err
}

// receivedFiles takes the files out of a control message. The kernel has set
// close-on-exec on each.
func receivedFiles(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("decode control message: %w", err)
	}
	var files []*os.File
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("decode control message: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "from criu"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
