package container

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/opencontainers/runc/libcontainer/system"
)

// TestKillWorkers gives a bundle the note of a process group, whose file has
// any name, and checks that only the group that the note means is killed.
func TestKillWorkers(t *testing.T) {
	own, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		exe    string // "" for the right one
		later  uint64
		killed bool
	}{
		{name: "the worker", killed: true},
		{name: "runs another file", exe: own},
		{name: "older than the worker", later: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bundle := t.TempDir()
			cmd := exec.Command("sleep", "1000")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			pid := cmd.Process.Pid
			stat, err := system.Stat(pid)
			if err != nil {
				t.Fatal(err)
			}
			exe, err := executable(pid)
			if err != nil {
				t.Fatal(err)
			}
			if tt.exe != "" {
				exe = tt.exe
			}
			note := filepath.Join(bundle, workerPrefix+fmt.Sprint(pid))
			if err := os.WriteFile(note, fmt.Appendf(nil, "%d %s", stat.StartTime+tt.later, exe), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := killWorkers(t.Context(), bundle); err != nil {
				t.Error(err)
			}
			if !tt.killed {
				// It would have died of the other signal.
				if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
					t.Error(err)
				}
			}
			_ = cmd.Wait()
			want := syscall.SIGTERM
			if tt.killed {
				want = syscall.SIGKILL
			}
			if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != want {
				t.Errorf("it died of %v, want %v", ws.Signal(), want)
			}
		})
	}
}
