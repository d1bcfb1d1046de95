package criu

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestIdle closes workers that were never used.
func TestIdle(t *testing.T) {
	b := needCRIU(t)
	w, err := b.Spawn(t.Context(), SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(w.Pid(), 0); err != nil {
		t.Errorf("worker %d does not run: %v", w.Pid(), err)
	}
	closeWorker(t, w)
	closeWorker(t, w)
	noChildren(t)
	if _, err := w.Dump(t.Context(), DumpOptions{Images: t.TempDir()}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("got %v from a closed worker", err)
	}
}

func TestPrepare(t *testing.T) {
	b := needCRIU(t)
	wrong := errors.New("wrong")
	if _, err := b.Spawn(t.Context(), SpawnOptions{Prepare: func() error { return wrong }}); !errors.Is(err, wrong) {
		t.Errorf("got %v, want the error of Prepare", err)
	}
	// What Prepare enters, CRIU is in, and nothing else of ours.
	w, err := b.Spawn(t.Context(), SpawnOptions{Prepare: func() error { return unix.Unshare(unix.CLONE_NEWUTS) }})
	if err != nil {
		t.Fatal(err)
	}
	defer closeWorker(t, w)
	theirs, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(w.Pid()), "ns/uts"))
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/uts")
	if err != nil || len(tasks) == 0 {
		t.Fatal("no threads", err)
	}
	entered := 0
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil && ns == theirs {
			entered++
		}
	}
	if entered != 1 {
		t.Errorf("%d threads are in the worker's namespace, want its own one", entered)
	}
}

func TestSpawnError(t *testing.T) {
	b := &Binary{Path: filepath.Join(t.TempDir(), "criu")}
	if _, err := b.Spawn(t.Context(), SpawnOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want not exist", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Spawn(ctx, SpawnOptions{}); !errdefs.IsCanceled(err) {
		t.Errorf("got %v, want cancelled", err)
	}
}

// TestStopped lets a worker not answer: a dump ends at its timeout, a restore
// with its context too.
func TestStopped(t *testing.T) {
	b := needCRIU(t)
	stopped := func(t *testing.T) *Worker {
		w, err := b.Spawn(t.Context(), SpawnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { closeWorker(t, w) })
		if err := unix.Kill(w.Pid(), unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		return w
	}
	t.Run("timeout", func(t *testing.T) {
		_, err := stopped(t).Dump(t.Context(), DumpOptions{Pid: 1 << 22, Images: t.TempDir(), Timeout: 50 * time.Millisecond})
		if e := asError(t, err); !errdefs.IsDeadlineExceeded(e) || e.Log != "" {
			t.Errorf("got %v, want deadline exceeded without a log", e)
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := stopped(t).Restore(ctx, RestoreOptions{Images: t.TempDir()})
		if e := asError(t, err); !errdefs.IsDeadlineExceeded(e) || ctx.Err() == nil {
			t.Errorf("got %v, want deadline exceeded", e)
		}
	})
	t.Run("killed", func(t *testing.T) {
		w := stopped(t)
		if err := unix.Kill(w.Pid(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_, err := w.Dump(t.Context(), DumpOptions{Images: t.TempDir()})
		if e := asError(t, err); !errdefs.IsInternal(e) || !strings.Contains(e.Summary, "killed") {
			t.Errorf("got %v, want an internal error about the signal", e)
		}
	})
	noChildren(t)
}

// TestKilledRestore kills CRIU when the root of the tree exists but does not
// run yet. It is a child of ours then, of which no one knows.
func TestKilledRestore(t *testing.T) {
	b := needCRIU(t)
	for _, end := range []struct {
		name string
		end  func(*Worker)
	}{
		{"kill", func(w *Worker) { _ = w.kill() }},
		{"close", func(w *Worker) { go w.Close() }},
	} {
		t.Run(end.name, func(t *testing.T) {
			p := startTree(t, "plain", 1)
			images := t.TempDir()
			if err := p.dump(b, DumpOptions{Images: images}); err != nil {
				t.Fatal(err)
			}
			p.wait()
			root := interrupt(t, b, images, end.end)
			if root == 0 {
				t.Fatal("criu has not told of a root")
			}
			noChildren(t)
			if err := unix.Kill(root, 0); err != unix.ESRCH {
				t.Errorf("root %d: got %v, want no such process", root, err)
			}
			if _, err := p.restore(b, RestoreOptions{Images: images}); err != nil {
				t.Errorf("the next restore: %v", err)
			}
		})
	}
}

// interrupt begins a restore and ends its worker once there is a root, whose
// pid it returns.
func interrupt(t *testing.T, b *Binary, images string, end func(*Worker)) (root int) {
	t.Helper()
	w, err := b.Spawn(t.Context(), SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer closeWorker(t, w)
	dirs, err := openDirectories(images, "")
	if err != nil {
		t.Fatal(err)
	}
	defer dirs.Close()
	opts := fixedOptions()
	dirs.fill(opts)
	(&RestoreOptions{}).fill(opts)
	_, err = w.do(t.Context(), &call{
		op:   "restore",
		typ:  rpc.CriuReqType_RESTORE,
		opts: opts,
		log:  filepath.Join(images, restoreLog),
		notify: func(n *rpc.CriuNotify, files []*os.File) {
			closeAll(files)
			if n.GetPid() != 0 && root == 0 {
				root = int(n.GetPid())
				end(w)
				<-w.exited(t)
			}
		},
	})
	if e := asError(t, err); !errdefs.IsInternal(e) {
		t.Errorf("got %v, want an internal error", e)
	}
	return root
}

// exited is closed when the process has ended, be it reaped or not.
func (w *Worker) exited(t *testing.T) <-chan struct{} {
	t.Helper()
	fd, err := unix.PidfdOpen(w.Pid(), 0)
	done := make(chan struct{})
	if err != nil {
		close(done) // reaped
		return done
	}
	go func() {
		defer close(done)
		defer unix.Close(fd)
		for {
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != unix.EINTR {
				return
			}
		}
	}()
	return done
}

// TestOthersChildren ends what a worker leaves, and not what its thread had.
func TestOthersChildren(t *testing.T) {
	start := func() *exec.Cmd {
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	theirs := start()
	defer func() { _ = theirs.Process.Kill(); _ = theirs.Wait() }()
	others := childrenOf(os.Getpid(), unix.Gettid())
	if !slices.Contains(others, theirs.Process.Pid) {
		t.Fatalf("children %v lack %d", others, theirs.Process.Pid)
	}
	ours := start()
	endChildren(others)
	if err := unix.Kill(theirs.Process.Pid, 0); err != nil {
		t.Errorf("the other's child: %v", err)
	}
	if err := unix.Kill(ours.Process.Pid, 0); err != unix.ESRCH {
		t.Errorf("our child: got %v, want no such process", err)
	}
}

// TestLeaks looks for what many workers might leave behind.
func TestLeaks(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 0)
	failing := startTree(t, "user", 0)
	cycle := func() {
		if err := cycles(t, b, p, 1); err != nil {
			t.Fatal(err)
		}
		if err := failing.dump(b, DumpOptions{Images: t.TempDir()}); err == nil {
			t.Fatal("nested user namespace was dumped")
		}
		if _, err := b.Spawn(t.Context(), SpawnOptions{Prepare: func() error { return unix.EPERM }}); err == nil {
			t.Fatal("spawned without preparation")
		}
	}
	cycle() // opens what stays open: the runtime's poller
	files, goroutines, tasks := openFiles(t), runtime.NumGoroutine(), threads(t)
	for range 50 {
		cycle()
	}
	// The last worker's goroutine may still be on its way out.
	deadline := time.Now().Add(5 * time.Second)
	for (openFiles(t) > files || runtime.NumGoroutine() > goroutines) && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if got := openFiles(t); got > files {
		t.Errorf("%d files are open, %d were", got, files)
	}
	if got := runtime.NumGoroutine(); got > goroutines {
		t.Errorf("%d goroutines run, %d did", got, goroutines)
	}
	// The runtime keeps some threads, but not one for each worker.
	if got := threads(t); got > tasks+20 {
		t.Errorf("%d threads run, %d did", got, tasks)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	return entries(t, "/proc/self/fd")
}

func threads(t *testing.T) int {
	t.Helper()
	return entries(t, "/proc/self/task")
}

func entries(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
