package integration_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// secondPass says that contrib/setup/cgroup2.sh runs the tests, under cgroup v2
// on a machine that is of v1.
var secondPass = os.Getenv("STATEFORK_PASS") == "cgroup2"

// oncePerRun names the tests that the second pass leaves out, and why. All
// others run in both.
var oncePerRun = map[string]string{
	"TestSessionPidsLimit":         "needs the pids controller, which the machine uses in v1",
	"TestSessionRestrictions/pids": "needs the pids controller, which the machine uses in v1",
	"TestCtr":                      "ctr always asks for shares of the cpu, and the machine uses that controller in v1",
	"TestOOM":                      "needs the memory controller, which the machine uses in v1",
	"TestEveryday":                 "compares with runc what has little to do with cgroups, and takes long",
	"TestSecondPass":               "starts what it runs in",
}

// leaveOut skips the test in the second pass if it is named for that.
func leaveOut(t *testing.T) {
	t.Helper()
	if why, ok := oncePerRun[t.Name()]; ok && secondPass {
		t.Skip(why)
	}
}

// TestSecondPass shows that what runs under cgroup v2 is told what it left
// there, and that its own exit code counts.
func TestSecondPass(t *testing.T) {
	mayRun(t)
	if unified() {
		t.Skip("the machine has cgroup v2 alone: there is one pass")
	}
	for _, tt := range []struct {
		script string
		code   int
		want   string
	}{
		{"test $(stat -fc %T /sys/fs/cgroup) = cgroup2fs && ! grep -E ' - cgroup ' /proc/self/mountinfo", 0, ""},
		{"exit 3", 3, ""},
		{"mkdir -p /sys/fs/cgroup/a/b", 1, "left behind: ./a ./a/b"},
	} {
		out, err := exec.CommandContext(t.Context(), "../contrib/setup/cgroup2.sh", "sh", "-c", tt.script).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		code := 0
		if exit != nil {
			code = exit.ExitCode()
		}
		if code != tt.code || !strings.Contains(string(out), tt.want) {
			t.Errorf("%s: exit code %d, %q; want %d and %q", tt.script, code, out, tt.code, tt.want)
		}
		left, err := filepath.Glob(cgroupRoot + "/unified/cgroup2-*/[ab]")
		if err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", tt.script, left, err)
		}
	}
}

const cgroupRoot = "/sys/fs/cgroup"

// unified says that the tests see cgroup v2 and nothing else.
func unified() bool {
	var st unix.Statfs_t
	err := unix.Statfs(cgroupRoot, &st)
	return err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// controller says whether limits of that kind can be had. Only the second pass
// may lack one.
func controller(t *testing.T, name string) bool {
	t.Helper()
	var found bool
	if unified() {
		b, err := os.ReadFile(filepath.Join(cgroupRoot, "cgroup.controllers"))
		if err != nil {
			t.Fatal(err)
		}
		found = slices.Contains(strings.Fields(string(b)), name)
	} else {
		_, err := os.Stat(filepath.Join(cgroupRoot, name))
		found = err == nil
	}
	if !found && !secondPass {
		t.Fatalf("the machine has no cgroup controller %q", name)
	}
	return found
}
