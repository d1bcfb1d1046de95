package criu

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKilledDump kills CRIU while a helper that it has forked is there, which
// would sleep for ever. It must not stay.
func TestKilledDump(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 1)
	for _, end := range []struct {
		name string
		end  func(*Worker)
	}{
		{"kill", func(w *Worker) { _ = unix.Kill(w.Pid(), unix.SIGKILL) }},
		{"close", func(w *Worker) { go w.Close() }},
	} {
		t.Run(end.name, func(t *testing.T) {
			// A helper lives so shortly that it may not be seen each time.
			const tries = 200
			for range tries {
				if killWithHelper(t, b, p, end.end) {
					return
				}
			}
			t.Errorf("no helper of criu was seen in %d dumps", tries)
		})
	}
}

// killWithHelper begins a dump of p and ends its worker once that has a child,
// and says whether it had one.
func killWithHelper(t *testing.T, b *Binary, p *tree, end func(*Worker)) bool {
	t.Helper()
	w, err := b.Spawn(t.Context(), SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer closeWorker(t, w)
	images := t.TempDir()
	dumped := make(chan error, 1)
	go func() {
		_, err := w.Dump(t.Context(), DumpOptions{Pid: p.pid, Images: images, LeaveRunning: true})
		dumped <- err
	}()
	helper := firstChild(w.Pid(), dumped)
	if helper == nil {
		return false
	}
	defer helper.Close()
	end(w)
	if err := <-dumped; err == nil {
		return false // it had been too late
	}
	closeWorker(t, w)
	awaitPidfd(t, helper)
	return true
}

// firstChild returns a pidfd of a child of pid that is alive, or nil if the dump
// ends before one is seen.
func firstChild(pid int, dumped chan error) *os.File {
	for {
		select {
		case err := <-dumped:
			dumped <- err
			return nil
		default:
		}
		for _, child := range childrenOf(pid, pid) {
			if fd, err := unix.PidfdOpen(child, 0); err == nil {
				return os.NewFile(uintptr(fd), "helper")
			}
		}
	}
}

// awaitPidfd fails the test unless the process has ended, or does so soon: it is
// not our child, and only killed when its worker is closed.
func awaitPidfd(t *testing.T, f *os.File) {
	t.Helper()
	const patience = 5000 // milliseconds
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}, patience)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			t.Fatal(err)
		case n == 0:
			t.Errorf("the helper stays")
			_ = unix.PidfdSendSignal(int(f.Fd()), unix.SIGKILL, nil, 0)
			return
		default:
			return
		}
	}
}
