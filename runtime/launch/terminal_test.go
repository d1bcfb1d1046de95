package launch

import (
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// screen is what has come out of a terminal.
type screen struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// TestTerminal has a shell control jobs on a terminal that was free, or that had
// been made the launcher's own before it was executed.
func TestTerminal(t *testing.T) {
	for name, attr := range map[string]*syscall.SysProcAttr{
		"free":           nil,
		"the launcher's": {Setsid: true, Setctty: true, Ctty: 6},
	} {
		for _, mode := range []Mode{Orphan, Monitor} {
			t.Run(name+" "+string(mode), func(t *testing.T) { testTerminal(t, mode, attr) })
		}
	}
}

func testTerminal(t *testing.T, mode Mode, attr *syscall.SysProcAttr) {
	b := newBox(t)
	master, slave := b.openPTY()
	var device unix.Stat_t
	if err := unix.Fstat(int(slave.Fd()), &device); err != nil {
		t.Fatal(err)
	}
	s := b.start(start{
		mode: mode, argv: []string{"busybox", "sh"}, attr: attr,
		files: map[int]*os.File{0: slave, 1: slave, 2: slave}, terminal: true,
	})
	p := s.command()
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	var seen screen
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(&seen, master) // ends with an error once nobody has it open
	}()
	if got := stat(t, p.Pid)(statTTY); uint64(got) != device.Rdev {
		t.Errorf("terminal is %#x, not %#x", got, device.Rdev)
	}
	foreground := func() int { return stat(t, p.Pid)(statForeground) }
	typed := func(line, what string, foregroundIsShell bool) {
		t.Helper()
		if _, err := io.WriteString(master, line); err != nil {
			t.Fatal(err)
		}
		eventually(t, what, func() bool { return (foreground() == p.Pid) == foregroundIsShell })
	}
	eventually(t, "prompt", func() bool { return strings.Contains(seen.String(), "# ") })
	if got := foreground(); got != p.Pid {
		t.Errorf("foreground is %d, not the shell %d", got, p.Pid)
	}
	typed("busybox sleep 86400\n", "job is in the foreground", false)
	typed("\x1a", "job is stopped", true)
	eventually(t, "shell knows", func() bool { return strings.Contains(seen.String(), "Stopped") })
	typed("fg\n", "job is in the foreground again", false)
	typed("\x03", "job is interrupted", true)
	if _, err := io.WriteString(master, "exit 7\n"); err != nil {
		t.Fatal(err)
	}
	// The monitor must not keep the terminal open.
	awaitEnd(t, p)
	<-copied
	if strings.Contains(seen.String(), "job control turned off") {
		t.Errorf("shell says %q", seen.String())
	}
	want := syscall.WaitStatus(0)
	if mode == Monitor {
		want = 7 << 8
	}
	if got := s.end(); got != want {
		t.Errorf("launcher ends with %#x", got)
	}
}

// TestTerminalOfAnother refuses a terminal that another session has.
func TestTerminalOfAnother(t *testing.T) {
	b := newBox(t)
	_, slave := b.openPTY()
	shell := b.start(start{
		mode: Orphan, argv: []string{"busybox", "cat"}, files: map[int]*os.File{0: slave, 2: slave}, terminal: true,
	})
	shell.command()
	s := b.start(start{
		mode: Orphan, argv: []string{"busybox", "true"}, files: map[int]*os.File{0: slave, 2: slave}, terminal: true,
	})
	s.wait()
	err := s.Release(bounded())
	if err == nil || err.Error() != `start "busybox": take terminal: operation not permitted` {
		t.Errorf("error is %v", err)
	}
}
