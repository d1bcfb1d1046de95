package task

import (
	"context"
	"sync"

	eventsapi "github.com/containerd/containerd/api/events"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/core/runtime"
	runcexit "github.com/containerd/go-runc"
	"github.com/containerd/log"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/statefork/statefork/runtime/container"
)

// eventQueue publishes events in the order in which they are sent. Sending
// never waits: containerd may be away for long, and a container must be able to
// end meanwhile.
type eventQueue struct {
	mu sync.Mutex
	// changed is signalled when pending or closed changes.
	changed *sync.Cond
	pending []any
	closed  bool
	// done is closed once all is published after close.
	done chan struct{}
}

func newEventQueue() *eventQueue {
	q := &eventQueue{done: make(chan struct{})}
	q.changed = sync.NewCond(&q.mu)
	return q
}

func (q *eventQueue) send(event any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pending = append(q.pending, event)
	q.changed.Signal()
}

// next waits for an event. It returns nil if there will be none any more.
func (q *eventQueue) next() any {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.pending) == 0 {
		if q.closed {
			return nil
		}
		q.changed.Wait()
	}
	event := q.pending[0]
	q.pending = q.pending[1:]
	return event
}

// run publishes until the queue is closed and empty.
func (q *eventQueue) run(ctx context.Context, publisher events.Publisher) {
	defer close(q.done)
	for event := q.next(); event != nil; event = q.next() {
		topic := runtime.GetTopic(event)
		if err := publisher.Publish(ctx, topic, event); err != nil {
			log.G(ctx).WithError(err).WithField("topic", topic).Error("publish event")
		}
	}
}

// close waits until all events that were sent are published.
func (q *eventQueue) close(ctx context.Context) error {
	q.mu.Lock()
	q.closed = true
	q.changed.Signal()
	q.mu.Unlock()
	select {
	case <-q.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// observer turns the life of one container into events.
type observer struct {
	events  *eventQueue
	request *taskapi.CreateTaskRequest
}

var _ container.Observer = (*observer)(nil)

// Created implements container.Observer.
func (o *observer) Created(pid int) {
	r := o.request
	o.events.send(&eventsapi.TaskCreate{
		ContainerID: r.ID,
		Bundle:      r.Bundle,
		Rootfs:      r.Rootfs,
		IO: &eventsapi.TaskIO{
			Stdin:    r.Stdin,
			Stdout:   r.Stdout,
			Stderr:   r.Stderr,
			Terminal: r.Terminal,
		},
		Checkpoint: r.Checkpoint,
		Pid:        uint32(pid),
	})
}

// Started implements container.Observer.
func (o *observer) Started(execID string, pid int) {
	if execID == "" {
		o.events.send(&eventsapi.TaskStart{ContainerID: o.request.ID, Pid: uint32(pid)})
		return
	}
	o.events.send(&eventsapi.TaskExecStarted{ContainerID: o.request.ID, ExecID: execID, Pid: uint32(pid)})
}

// Exited implements container.Observer. Init's exit is also kept in the bundle,
// for the delete action after the shim's death.
func (o *observer) Exited(e container.Exit) {
	id := e.ExecID
	if id == "" {
		id = o.request.ID
		err := runc.WriteExitStatus(o.request.Bundle, runcexit.Exit{Timestamp: e.At, Pid: e.Pid, Status: e.Status})
		if err != nil {
			log.L.WithError(err).WithField("task", id).Error("keep exit status")
		}
	}
	o.events.send(&eventsapi.TaskExit{
		ContainerID: o.request.ID,
		ID:          id,
		Pid:         uint32(e.Pid),
		ExitStatus:  uint32(e.Status),
		ExitedAt:    timestamppb.New(e.At),
	})
}

// OOM implements container.Observer.
func (o *observer) OOM() {
	o.events.send(&eventsapi.TaskOOM{ContainerID: o.request.ID})
}
