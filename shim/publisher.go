package shim

import (
	"context"
	"errors"
	"fmt"
	"time"

	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/ttrpcutil"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// forwardTimeout bounds one try to hand an event over.
	forwardTimeout = 5 * time.Second
	// retryFirst and retryMost bound the waits between tries.
	retryFirst, retryMost = 20 * time.Millisecond, time.Second
)

// publisher hands events to containerd, one after the other. That of
// containerd's own shim tries each failed event again beside the others, a few
// times: an exit can come before its start, or never, if containerd is away for
// long.
type publisher struct {
	client *ttrpcutil.Client
}

var _ events.Publisher = (*publisher)(nil)

// newPublisher returns a publisher to the ttrpc socket of a containerd that may
// be away at the moment.
func newPublisher(address string) (*publisher, error) {
	client, err := ttrpcutil.NewClient(address)
	if err != nil {
		return nil, fmt.Errorf("connect to containerd's events: %w", err)
	}
	return &publisher{client: client}, nil
}

// Publish implements events.Publisher: it returns when containerd has the event,
// has refused it, or ctx is done.
func (p *publisher) Publish(ctx context.Context, topic string, event events.Event) error {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return err
	}
	body, err := typeurl.MarshalAnyToProto(event)
	if err != nil {
		return fmt.Errorf("encode event %q: %w", topic, err)
	}
	request := &eventsapi.ForwardRequest{Envelope: &types.Envelope{
		Timestamp: timestamppb.Now(),
		Namespace: ns,
		Topic:     topic,
		Event:     body,
	}}
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		err := p.forward(ctx, request)
		if err == nil {
			return nil
		}
		if errdefs.IsInvalidArgument(err) {
			return fmt.Errorf("forward event %q: %w", topic, err) // as it would be the next time
		}
		log.G(ctx).WithError(err).WithField("topic", topic).Debug("event waits for containerd")
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("forward event %q: %w", topic, err), ctx.Err())
		case <-time.After(wait):
		}
	}
}

// forward tries once, on a new connection if the present one is at its end.
func (p *publisher) forward(ctx context.Context, request *eventsapi.ForwardRequest) error {
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()
	if ctx.Err() != nil {
		return ctx.Err() // connecting waits for a daemon
	}
	service, err := p.client.EventsService()
	if err != nil {
		return err
	}
	_, err = service.Forward(ctx, request)
	if errors.Is(err, ttrpc.ErrClosed) {
		if err := p.client.Reconnect(); err != nil {
			return err
		}
		if service, err = p.client.EventsService(); err != nil {
			return err
		}
		_, err = service.Forward(ctx, request)
	}
	return errgrpc.ToNative(err)
}

// Close ends the connection.
func (p *publisher) Close() error { return p.client.Close() }
