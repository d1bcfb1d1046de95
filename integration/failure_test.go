package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/integration/testbed"
)

// leftTimeout is what users were promised after containerd's restart.
const leftTimeout = 30 * time.Second

// noShims waits until no shim of the testbed and no socket of one is there.
func noShims(t *testing.T, tb *testbed.Testbed) {
	t.Helper()
	err := testbed.Poll(t.Context(), leftTimeout, func(context.Context) error {
		inv, err := testbed.TakeInventory(tb.Dir)
		if err != nil {
			return testbed.Permanent(err)
		}
		var left []error
		for _, i := range inv.New(nil) {
			if i.Ours && i.Kind == "process" && strings.Contains(i.Name, "containerd-shim") {
				left = append(left, errors.New(i.String()))
			}
		}
		sockets, err := os.ReadDir(filepath.Join(tb.Dir, "s"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return testbed.Permanent(err)
		}
		for _, s := range sockets {
			left = append(left, errors.New("socket "+s.Name()))
		}
		return errors.Join(left...)
	})
	if err != nil {
		t.Errorf("left: %v", err)
	}
}

// TestB81CreateKilled kills containerd at many moments of a create, and starts
// it again. A shim must then have a task that containerd knows, or be gone.
func TestB81CreateKilled(t *testing.T) {
	t.Parallel()
	tb := private(t)
	e := setup(t, tb)
	const rounds, at = 5, 4
	tasks := 0
	for round := range rounds {
		var wg sync.WaitGroup
		for k := range at {
			c, err := e.ns.Create(e.ctx, fmt.Sprintf("c%d-%d", round, k), testbed.Runtime, testbed.Snapshotter,
				oci.WithProcessArgs("sleep", "1000"))
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				// Any moment will do: creates are at many points when the kill comes.
				time.Sleep(time.Duration(k) * 30 * time.Millisecond)
				task, err := c.NewTask(e.ctx, cio.NullIO)
				if err == nil {
					_ = task.Start(e.ctx) // containerd may go
				}
			})
		}
		time.Sleep(time.Duration(50+round*50) * time.Millisecond)
		if err := tb.Containerd.Restart(e.ctx); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}
	all, err := e.ns.Client().Containers(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if _, err := c.Task(e.ctx, nil); err == nil {
			tasks++
		} else if !errdefs.IsNotFound(err) {
			t.Error(err)
		}
		if err := testbed.Destroy(e.ctx, c); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of %d containers had a task", tasks, rounds*at)
	noShims(t, tb)
}
