package shim

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/emptypb"
)

// listener collects what is forwarded to it.
type listener struct {
	// came has a value for each event.
	came chan struct{}

	mu  sync.Mutex
	ids []string // guarded by mu
}

// Forward implements the events service.
func (l *listener) Forward(_ context.Context, r *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	v, err := typeurl.UnmarshalAny(r.Envelope.Event)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ids = append(l.ids, r.Envelope.Namespace+" "+v.(*events.TaskExit).ID)
	l.came <- struct{}{}
	return &emptypb.Empty{}, nil
}

// serveEvents is a daemon's life, until the returned function is called.
func serveEvents(t *testing.T, address string, l *listener) (stop func()) {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	eventsapi.RegisterTTRPCEventsService(server, l)
	socket, err := net.Listen("unix", address)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(context.Background(), socket) // ends by being closed
	}()
	return func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		<-done
	}
}

// TestPublisher has the daemon away at first, and again in the middle: all events
// come, in order.
func TestPublisher(t *testing.T) {
	address := filepath.Join(t.TempDir(), "s")
	p, err := newPublisher(address)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(context.Background(), "ns"))
	defer cancel()
	const all = 40
	published := make(chan error, 1)
	halfway := make(chan struct{})
	go func() {
		for n := range all {
			if n == all/2 {
				<-halfway
			}
			if err := p.Publish(ctx, "/tasks/exit", &events.TaskExit{ID: fmt.Sprint(n)}); err != nil {
				published <- err
				return
			}
		}
		published <- nil
	}()
	l := &listener{came: make(chan struct{}, 2*all)}
	stop := serveEvents(t, address, l)
	for range all / 2 {
		<-l.came
	}
	stop()
	close(halfway)
	stop = serveEvents(t, address, l)
	if err := <-published; err != nil {
		stop()
		t.Fatal(err)
	}
	var want []string
	for n := range all {
		want = append(want, fmt.Sprint("ns ", n))
	}
	// What a daemon did not live to confirm comes again.
	if !slices.Equal(slices.Compact(l.ids), want) {
		t.Errorf("got %v, want %v", l.ids, want)
	}

	// Without a daemon, it ends with its caller.
	stop()
	cancel()
	if err := p.Publish(ctx, "/tasks/exit", &events.TaskExit{ID: "late"}); err == nil {
		t.Error("published after the end")
	}
}
