package integration_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/statefork/statefork/integration/testbed"
)

// TestCheckerSees leaves things behind on purpose: all other tests rely on the
// checker to see them.
func TestCheckerSees(t *testing.T) {
	mayRun(t)
	tb, err := testbed.Start(t.Context(), t.Logf)
	started(t, err)
	tb.Settle = time.Second
	dir := filepath.Join(tb.Dir, "forgotten")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("none", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	sleeper := exec.Command("sleep", "1000")
	sleeper.Dir = tb.Dir
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	dead := exec.Command("true")
	if err := dead.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dead.Wait() })
	cgroup := filepath.Join("/sys/fs/cgroup", "unified", tb.Name)
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		cgroup = filepath.Join("/sys/fs/cgroup", tb.Name)
		if err := os.Mkdir(cgroup, 0o755); err != nil {
			t.Fatal(err)
		}
	}

	err = tb.Stop(t.Context())
	_ = sleeper.Wait()
	var left *testbed.Leftovers
	if !errors.As(err, &left) {
		t.Fatalf("Stop = %v, want leftovers", err)
	}
	for _, want := range []string{"mount " + dir, "sleep 1000", "zombie ", "cgroup " + cgroup} {
		if !strings.Contains(left.Error(), want) {
			t.Errorf("not seen: %s, only\n%v", want, left)
		}
	}
	for _, name := range []string{dir, cgroup, tb.Dir} {
		if _, err := os.Stat(name); err == nil {
			t.Errorf("not swept: %s", name)
		}
	}
}
