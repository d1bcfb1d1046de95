package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/statefork/statefork/integration/testbed"
)

// TestExecsWhileInitExits starts 500 short commands in a container, whose init is
// killed when most run or have ended: each that was started has exactly one exit
// event, and then comes the only one of init.
func TestExecsWhileInitExits(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	c, err := e.ns.Create(e.ctx, "many", testbed.Runtime, e.snapshotter, oci.WithProcessArgs("sleep", "infinity"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := testbed.Destroy(e.cleanupContext(), c); err != nil {
			t.Error(err)
		}
	})
	task, err := c.NewTask(e.ctx, cio.NullIO)
	if err != nil {
		t.Fatal(err)
	}
	exits := e.watchExits()
	if err := task.Start(e.ctx); err != nil {
		t.Fatal(err)
	}
	const all, atOnce = 500, 50
	prepared := e.prepareExecs(task, all, atOnce)
	var began atomic.Int32
	var mu sync.Mutex
	var started []string // guarded by mu
	killed := make(chan error, 1)
	parallel(all, atOnce, func(n int) {
		if err := prepared[n].Start(e.ctx); err == nil {
			mu.Lock()
			started = append(started, prepared[n].ID())
			mu.Unlock()
		} else if began.Load() < all*9/10 {
			t.Errorf("start of exec %d before init's end: %v", n, err)
		}
		if began.Add(1) == all*9/10 {
			killed <- task.Kill(e.ctx, syscall.SIGKILL)
		}
	})
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	if len(started) < all*9/10 {
		t.Fatalf("%d of %d were started", len(started), all)
	}
	exits.wait("many")
	slices.Sort(started)
	got := exits.ids()
	told := len(got)
	if last := got[len(got)-1]; last != "many" {
		t.Errorf("the last exit is that of %s", last)
	}
	got = got[:len(got)-1]
	slices.Sort(got)
	e.equal("exits", strings.Join(got, "\n"), strings.Join(started, "\n"))
	parallel(all, atOnce, func(n int) {
		if _, err := prepared[n].Delete(e.ctx); err != nil {
			t.Errorf("delete exec %d: %v", n, err)
		}
	})
	if more := exits.ids()[told:]; len(more) > 0 {
		t.Errorf("further exits: %v", more)
	}
}

// parallel calls f with 0 to n-1, so many at once.
func parallel(n, atOnce int, f func(int)) {
	var wg sync.WaitGroup
	var next atomic.Int32
	for range atOnce {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	wg.Wait()
}

// prepareExecs adds commands, a third of which end at once.
func (e *env) prepareExecs(task containerd.Task, n, atOnce int) []containerd.Process {
	e.Helper()
	spec, err := task.Spec(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	prepared := make([]containerd.Process, n)
	parallel(n, atOnce, func(i int) {
		p := *spec.Process
		p.Args = []string{"sleep", fmt.Sprint(i % 3)}
		process, err := task.Exec(e.ctx, fmt.Sprintf("exec-%d", i), &p, cio.NullIO)
		if err != nil {
			e.Error(err)
		}
		prepared[i] = process
	})
	if e.Failed() {
		e.FailNow()
	}
	return prepared
}
