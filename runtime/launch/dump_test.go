package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/criu"
)

// needCRIU returns the repository's CRIU, or the host's.
func needCRIU(t *testing.T) *criu.Binary {
	t.Helper()
	// What the set-up installs is not in PATH unless make runs the test.
	if own, err := filepath.Abs("../../bin/criu"); err == nil && os.Getenv("STATEFORK_CRIU") == "" {
		if _, err := os.Stat(own); err == nil {
			t.Setenv("STATEFORK_CRIU", own)
		}
	}
	b, err := criu.Find(t.Context())
	if err != nil {
		missing(t, "criu: "+err.Error())
	}
	return b
}

// dump dumps the tree of the box' init, which runs on, and says whether the
// process is in the images: they are named by the pids in the namespace.
func (b *box) dump(t *testing.T, binary *criu.Binary, p *Process) bool {
	t.Helper()
	images := t.TempDir()
	w, err := binary.Spawn(t.Context(), criu.SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := w.Dump(t.Context(), criu.DumpOptions{Pid: b.pid, Images: images, LeaveRunning: true}); err != nil {
		log, _ := os.ReadFile(filepath.Join(images, "dump.log"))
		t.Fatalf("%v\n%s", err, log)
	}
	if _, err := os.Stat(filepath.Join(images, "core-1.img")); err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(status(t, p.Pid, "NSpid"))
	_, err = os.Stat(filepath.Join(images, fmt.Sprintf("core-%s.img", fields[len(fields)-1])))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

// TestDump shows what all this is for: the command of a monitor is not dumped,
// that of a killed one, or of none, is; and it runs on.
func TestDump(t *testing.T) {
	binary := needCRIU(t)
	b := newBox(t)
	r, w := pipe(t)
	files := map[int]*os.File{0: r}
	orphan := b.start(start{mode: Orphan, argv: []string{"busybox", "cat"}, files: files}).command()
	monitor := b.start(start{mode: Monitor, argv: []string{"busybox", "cat"}, files: files})
	monitored := monitor.command()
	eventually(t, "init is the parent", func() bool { return stat(t, orphan.Pid)(statParent) == b.pid })
	if !b.dump(t, binary, orphan) {
		t.Error("orphan is not dumped")
	}
	if b.dump(t, binary, monitored) {
		t.Error("a process outside of the tree is dumped: the launcher is not needed")
	}
	if err := monitor.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := monitor.end(); got != syscall.WaitStatus(unix.SIGKILL) {
		t.Errorf("monitor ends with %#x", got)
	}
	if !b.dump(t, binary, monitored) {
		t.Error("command of the killed monitor is not dumped")
	}
	for _, f := range []*os.File{r, w} {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []*Process{orphan, monitored} {
		awaitEnd(t, p)
	}
}
