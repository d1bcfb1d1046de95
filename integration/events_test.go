package integration_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"sync"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"
)

// exits collects the exit events of the test's namespace.
type exits struct {
	e      *env
	cancel context.CancelFunc
	done   chan struct{}

	mu sync.Mutex
	// list has a line for each event of an init process, processes the id of
	// each process that ended, and marks what was seen of our own events. All
	// are guarded by mu.
	list      []string
	processes []string
	marks     map[string]bool
}

// markTopic is that of the events by which a test finds its place in the stream.
const markTopic = "/statefork/test"

// watchExits returns when events are being collected.
func (e *env) watchExits() *exits {
	e.Helper()
	ctx, cancel := context.WithCancel(e.ctx)
	x := &exits{e: e, cancel: cancel, done: make(chan struct{}), marks: map[string]bool{}}
	filter := fmt.Sprintf("namespace==%q,topic~=", e.ns.NS)
	stream, errs := e.ns.Client().EventService().Subscribe(ctx, filter+`"^/tasks/exit$"`, filter+`"^`+markTopic+`$"`)
	go func() {
		defer close(x.done)
		for {
			select {
			case env := <-stream:
				x.add(env)
			case <-errs:
				return
			}
		}
	}()
	e.Cleanup(func() { cancel(); <-x.done })
	x.sync()
	return x
}

func (x *exits) add(env *events.Envelope) {
	v, err := typeurl.UnmarshalAny(env.Event)
	if err != nil {
		return // of a kind that nobody asked for
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch ev := v.(type) {
	case *eventsapi.TaskExit:
		x.processes = append(x.processes, ev.ID)
		if ev.ID == ev.ContainerID {
			x.list = append(x.list, fmt.Sprintf("%s exited with %d", ev.ContainerID, ev.ExitStatus))
		}
	case *eventsapi.NamespaceCreate:
		x.marks[ev.Name] = true
	}
}

// sync returns when everything has been collected that was published before.
func (x *exits) sync() {
	x.e.Helper()
	mark := rand.Text()
	x.e.eventually(func() error {
		ev := &eventsapi.NamespaceCreate{Name: mark} // any event will do
		if err := x.e.ns.Client().EventService().Publish(x.e.ctx, markTopic, ev); err != nil {
			return err
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		if !x.marks[mark] {
			return fmt.Errorf("no event of topic %s has come", markTopic)
		}
		return nil
	})
}

// expect compares all events so far with "<container> exited with <code>".
func (x *exits) expect(want ...string) {
	x.e.Helper()
	x.sync()
	x.mu.Lock()
	defer x.mu.Unlock()
	if !slices.Equal(x.list, want) {
		x.e.Errorf("exit events are [%s], want [%s]", strings.Join(x.list, ", "), strings.Join(want, ", "))
	}
}

// ids are those of all processes that have ended, in the order of their events.
func (x *exits) ids() []string {
	x.e.Helper()
	x.sync()
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.processes)
}

// wait waits until there is an exit event of that container.
func (x *exits) wait(id string) {
	x.e.Helper()
	x.e.eventually(func() error {
		x.mu.Lock()
		defer x.mu.Unlock()
		if !slices.ContainsFunc(x.list, func(s string) bool { return strings.HasPrefix(s, id+" ") }) {
			return fmt.Errorf("container %s has not exited", id)
		}
		return nil
	})
}
