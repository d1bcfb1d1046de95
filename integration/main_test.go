// Package integration_test runs statefork as its users do: with a real
// containerd, nerdctl, CRIU and kernel. The tests need root, and the flag
// -test.root to say that they may use it.
package integration_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"

	_ "github.com/containerd/containerd/v2/pkg/testutil" // registers -test.root

	"github.com/statefork/statefork/integration/testbed"
)

// bed is the testbed of all tests that leave both daemons alone. It is started
// by the first of them.
var bed struct {
	once sync.Once
	tb   *testbed.Testbed
	err  error
}

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if bed.tb != nil {
		// It was there first, and the others are gone. In CI there is nobody else.
		bed.tb.Alone = os.Getenv("CI") == "true"
		if err := bed.tb.Stop(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, "stop the common testbed:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// mayRun skips a test without -test.root; in CI it fails, so that nobody
// believes it has run. The pass under cgroup v2 leaves out what oncePerRun names.
func mayRun(t *testing.T) {
	t.Helper()
	leaveOut(t)
	if f := flag.Lookup("test.root"); f == nil || f.Value.String() != "true" {
		skip(t, "needs root: give -test.root")
	}
}

func skip(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// common returns the shared testbed.
func common(t *testing.T) *testbed.Testbed {
	t.Helper()
	mayRun(t)
	bed.once.Do(func() { bed.tb, bed.err = testbed.Start(context.Background(), nil) })
	started(t, bed.err)
	return bed.tb
}

// private returns a testbed whose daemons the test may kill. It is stopped, and
// the machine looked at, after the test.
func private(t *testing.T) *testbed.Testbed {
	t.Helper()
	return own(t, testbed.Start)
}

// apart is private in a network namespace of its own.
func apart(t *testing.T) *testbed.Testbed {
	t.Helper()
	return own(t, testbed.StartApart)
}

func own(t *testing.T, start func(context.Context, func(string, ...any)) (*testbed.Testbed, error)) *testbed.Testbed {
	t.Helper()
	mayRun(t)
	tb, err := start(t.Context(), t.Logf)
	started(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(tb.Containerd.Tail())
			t.Log(tb.Snapshotterd.Tail())
		}
		if err := tb.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return tb
}

func started(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, testbed.ErrMissing) {
		skip(t, "needs "+err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
}
