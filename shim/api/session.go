package api

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
)

// ErrStale says that a step belongs to a state of the container that a restore
// has left behind.
var ErrStale = fmt.Errorf("stale generation: %w", errdefs.ErrAborted)

// EndOffset is beyond the end of everything that is printed: ReadScreen with it
// tells where the end is.
const EndOffset = 1<<63 - 1

// The methods below set the container of the request that they are given.

// OpenSession starts a session's shell, unless it is there.
func (c *Client) OpenSession(ctx context.Context, r *OpenSessionRequest) (*Session, error) {
	r.ContainerId = c.cfg.ContainerID
	resp, err := c.service.OpenSession(c.outgoing(ctx), r)
	if err != nil {
		return nil, sessionError(ctx, err)
	}
	return resp.Session, nil
}

// ListSessions returns the container's sessions by name.
func (c *Client) ListSessions(ctx context.Context) ([]*Session, error) {
	resp, err := c.service.ListSessions(c.outgoing(ctx), &ListSessionsRequest{ContainerId: c.cfg.ContainerID})
	if err != nil {
		return nil, sessionError(ctx, err)
	}
	return resp.Sessions, nil
}

// CloseSession ends a session, its shell and what runs on its terminal.
func (c *Client) CloseSession(ctx context.Context, session string) error {
	_, err := c.service.CloseSession(c.outgoing(ctx), &CloseSessionRequest{ContainerId: c.cfg.ContainerID, Session: session})
	return sessionError(ctx, err)
}

// StartStep gives a session a command. While the container is checkpointed it
// takes as long as that.
func (c *Client) StartStep(ctx context.Context, r *StartStepRequest) (*StepResponse, error) {
	r.ContainerId = c.cfg.ContainerID
	resp, err := c.service.StartStep(c.outgoing(ctx), r)
	return stepResponse(ctx, resp, err)
}

// WaitStep goes on waiting for a step. It fails with ErrStale for a step that a
// restore has left behind.
func (c *Client) WaitStep(ctx context.Context, r *WaitStepRequest) (*StepResponse, error) {
	r.ContainerId = c.cfg.ContainerID
	resp, err := c.service.WaitStep(c.outgoing(ctx), r)
	return stepResponse(ctx, resp, err)
}

// SendInput types on a session's terminal.
func (c *Client) SendInput(ctx context.Context, session string, input []byte) error {
	_, err := c.service.SendInput(c.outgoing(ctx), &SendInputRequest{
		ContainerId: c.cfg.ContainerID, Session: session, Input: input,
	})
	return sessionError(ctx, err)
}

// SignalSession sends a signal to what runs in a session's foreground.
func (c *Client) SignalSession(ctx context.Context, session string, signal uint32) error {
	_, err := c.service.SignalSession(c.outgoing(ctx), &SignalSessionRequest{
		ContainerId: c.cfg.ContainerID, Session: session, Signal: signal,
	})
	return sessionError(ctx, err)
}

// ResizeSession sets the size of a session's terminal.
func (c *Client) ResizeSession(ctx context.Context, session string, columns, rows uint32) error {
	_, err := c.service.ResizeSession(c.outgoing(ctx), &ResizeSessionRequest{
		ContainerId: c.cfg.ContainerID, Session: session, Columns: columns, Rows: rows,
	})
	return sessionError(ctx, err)
}

// ReadScreen reads what came from a session's terminal, in steps and between
// them.
func (c *Client) ReadScreen(ctx context.Context, r *ReadScreenRequest) (*ReadScreenResponse, error) {
	r.ContainerId = c.cfg.ContainerID
	resp, err := c.service.ReadScreen(c.outgoing(ctx), r)
	if err != nil {
		return nil, sessionError(ctx, err)
	}
	return resp, nil
}

func stepResponse(ctx context.Context, resp *StepResponse, err error) (*StepResponse, error) {
	if err != nil {
		return nil, sessionError(ctx, err)
	}
	if resp.Stale {
		return nil, fmt.Errorf("container was restored to a node since: %w", ErrStale)
	}
	return resp, nil
}

// sessionError is toNative for calls that callers give up as a matter of
// course: what ttrpc then says has lost that it is the context's end.
func sessionError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("call shim: %w", ctx.Err())
	}
	return toNative(err)
}
