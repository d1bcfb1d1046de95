package task

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/core/events"

	"github.com/statefork/statefork/runtime/container"
)

// press is a publisher that remembers.
type press struct {
	// open lets one event through for each value.
	open chan struct{}

	mu     sync.Mutex
	topics []string
}

func (p *press) Publish(_ context.Context, topic string, _ events.Event) error {
	<-p.open
	p.mu.Lock()
	defer p.mu.Unlock()
	p.topics = append(p.topics, topic)
	if topic == "/tasks/oom" {
		return errors.New("lost on the way")
	}
	return nil
}

func TestEventsInOrder(t *testing.T) {
	bundle := t.TempDir()
	p := &press{open: make(chan struct{})}
	q := newEventQueue()
	go q.run(context.Background(), p)
	o := &observer{events: q, request: &taskapi.CreateTaskRequest{ID: "c", Bundle: bundle}}
	// Nothing of this waits for the publisher, which takes none yet.
	o.Created(1)
	o.Started("", 1)
	o.Started("e", 2)
	o.OOM()
	o.Exited(container.Exit{ExecID: "e", Pid: 2, Status: 3, At: time.Now()})
	at := time.Now().Add(-time.Hour)
	o.Exited(container.Exit{Pid: 1, Status: 137, At: at})
	q.send(&eventsapi.TaskDelete{ContainerID: "c"})

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := q.close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("closed with events pending: got %v", err)
	}
	close(p.open)
	if err := q.close(context.Background()); err != nil {
		t.Fatal(err)
	}
	want := []string{"/tasks/create", "/tasks/start", "/tasks/exec-started", "/tasks/oom", "/tasks/exit", "/tasks/exit", "/tasks/delete"}
	if !reflect.DeepEqual(p.topics, want) {
		t.Errorf("published %q, want %q", p.topics, want)
	}
	e, err := runc.ReadExitStatus(bundle)
	if err != nil || e.Status != 137 || e.Pid != 1 || !e.Timestamp.Equal(at) {
		t.Errorf("exit status in the bundle: %+v, %v; want init's", e, err)
	}
}

// TestExitNames has the identity of exits told as clients expect it.
func TestExitNames(t *testing.T) {
	q := newEventQueue()
	o := &observer{events: q, request: &taskapi.CreateTaskRequest{ID: "c", Bundle: t.TempDir()}}
	o.Exited(container.Exit{ExecID: "e", Pid: 2, At: time.Now()})
	o.Exited(container.Exit{Pid: 1, At: time.Now()})
	for _, want := range []string{"c/e", "c/c"} {
		exit, ok := q.next().(*eventsapi.TaskExit)
		if !ok {
			t.Fatal("not an exit")
		}
		if got := fmt.Sprintf("%s/%s", exit.ContainerID, exit.ID); got != want {
			t.Errorf("exit of %s, want %s", got, want)
		}
	}
}
