package criu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// socketFD is the number of the service socket inside CRIU; extra files
	// follow.
	socketFD = 3
	// FirstFile is the number that SpawnOptions.Files[0] has inside CRIU.
	FirstFile = socketFD + 1
	// exitTimeout is how long a worker may take to exit once it has nothing
	// left to do.
	exitTimeout = 10 * time.Second
)

// SpawnOptions say how a worker starts.
type SpawnOptions struct {
	// Prepare, if set, runs on the locked OS thread from which CRIU is forked.
	// It may unshare, enter namespaces and mount: the thread serves nothing
	// else and ends with the worker. It must wait for any process it starts.
	Prepare func() error
	// Files are further open files; Files[i] is FirstFile+i inside CRIU. They
	// stay the caller's and may be closed after Spawn.
	Files []*os.File
}

// Worker is a CRIU process that serves one request. It must be closed.
type Worker struct {
	conn *net.UnixConn
	cmd  *exec.Cmd
	// output holds what CRIU and its children print: it is a file in memory, so
	// that neither a goroutine nor the worker's end depends on who else holds
	// it open.
	output *os.File

	// mu guards state.
	mu    sync.Mutex
	state workerState

	// keep says that a process which CRIU has left as our child is the
	// caller's. It is set before released is closed.
	keep bool
	// released is closed once no request uses the worker any more.
	released chan struct{}
	// done is closed once the process is reaped and nothing is left of it;
	// waitErr is set before.
	done    chan struct{}
	waitErr error
}

type workerState int

const (
	workerIdle workerState = iota // waits for its request
	workerBusy                    // a request is under way
	workerOver                    // released
)

// Spawn starts a worker. The context is not used after Spawn has returned.
func (b *Binary) Spawn(ctx context.Context, opts SpawnOptions) (*Worker, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("spawn criu: %w", err)
	}
	conn, peer, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("spawn criu: %w", err)
	}
	defer peer.Close()
	output, err := memoryFile("criu-output")
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("spawn criu: %w", err)
	}
	// The worker outlives ctx: it is ended by Close.
	cmd := b.command(context.WithoutCancel(ctx), "swrk", fmt.Sprint(socketFD))
	cmd.Stdout, cmd.Stderr = output, output
	cmd.ExtraFiles = append([]*os.File{peer}, opts.Files...)
	// The signal is sent when the thread that forked CRIU ends, see run. What
	// CRIU forks does not get it, but is in the same process group. Some of it
	// never ends by itself: to try what ptrace can do, CRIU forks a process that
	// sleeps until it is killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	w := &Worker{
		conn:     conn,
		cmd:      cmd,
		output:   output,
		released: make(chan struct{}),
		done:     make(chan struct{}),
	}
	started := make(chan error, 1)
	onOwnThread(func() { w.run(opts.Prepare, started) })
	if err := <-started; err != nil {
		conn.Close()
		output.Close()
		return nil, fmt.Errorf("spawn criu: %w", err)
	}
	return w, nil
}

// run is the life of the worker's thread. It stays until the process has ended
// (CRIU dies with its thread) and the request's outcome is known. Unless that is
// a success, what CRIU has forked is ended too.
func (w *Worker) run(prepare func() error, started chan<- error) {
	defer close(w.done)
	// The thread may have served other goroutines before.
	others := childrenOf(os.Getpid(), unix.Gettid())
	if prepare != nil {
		if err := prepare(); err != nil {
			started <- err
			return
		}
	}
	if err := w.cmd.Start(); err != nil {
		started <- err
		return
	}
	started <- nil
	awaitEnd(w.Pid())
	// What a killed CRIU has forked holds the connection open. Its messages can
	// still be read, and then comes the end.
	_ = w.conn.CloseRead()
	<-w.released
	if !w.keep {
		// As long as the leader is not reaped, the number is that of its group.
		_ = unix.Kill(-w.Pid(), unix.SIGKILL)
	}
	w.waitErr = w.cmd.Wait()
	if !w.keep {
		endChildren(others)
	}
}

// Pid returns the id of the CRIU process.
func (w *Worker) Pid() int {
	return w.cmd.Process.Pid
}

// Close ends the worker if it still runs, reaps it and frees what it holds. A
// request that is under way fails; see Dump about the state of its tree. Close
// may be called any number of times.
func (w *Worker) Close() error {
	w.mu.Lock()
	idle := w.state == workerIdle
	if idle {
		w.state = workerOver
	}
	busy := w.state == workerBusy
	w.mu.Unlock()
	if idle {
		close(w.released)
	}
	var err error
	if idle || busy {
		err = w.kill()
	} else {
		err = w.awaitExit()
	}
	<-w.done
	w.conn.Close()
	w.output.Close()
	return err
}

// kill kills the process if it still runs.
func (w *Worker) kill() error {
	if err := w.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill criu: %w", err)
	}
	return nil
}

// begin takes the worker for its one request.
func (w *Worker) begin() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state != workerIdle {
		return fmt.Errorf("worker has served its request: %w", errdefs.ErrFailedPrecondition)
	}
	w.state = workerBusy
	return nil
}

// end gives the worker up after its request. The process leaves by itself; keep
// says that a process it has left as our child is the caller's.
func (w *Worker) end(keep bool) {
	w.mu.Lock()
	w.state = workerOver
	w.mu.Unlock()
	w.keep = keep
	close(w.released)
	// A read of nothing is the worker's order to leave, should it read again.
	_ = w.conn.CloseWrite()
}

// awaitExit waits for the worker to leave, and kills one that does not.
func (w *Worker) awaitExit() error {
	t := time.NewTimer(exitTimeout)
	defer t.Stop()
	select {
	case <-w.done:
		return nil
	case <-t.C:
		return w.kill()
	}
}

// exit describes how the process ended, once done is closed.
func (w *Worker) exit() string {
	select {
	case <-w.done:
	default:
		return "still running"
	}
	if w.waitErr != nil {
		return w.waitErr.Error()
	}
	return "exit status 0"
}

// printed returns the end of what CRIU has printed.
func (w *Worker) printed() string {
	const limit = 4 << 10
	st, err := w.output.Stat()
	if err != nil {
		return ""
	}
	out, err := io.ReadAll(io.NewSectionReader(w.output, max(0, st.Size()-limit), limit))
	if err != nil {
		return ""
	}
	return string(out)
}

// onOwnThread runs f in a goroutine on a thread that ends with it. The main
// thread never ends, and /proc/self shows its namespaces: it is passed over.
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f() // the thread ends with its goroutine, which never unlocks it
			return
		}
		defer runtime.UnlockOSThread()
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(locked)
			f()
		}()
		<-locked // on another thread, since this one is taken
	}()
}

// socketPair returns our end of a new service connection and CRIU's.
func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "criu service")
	defer ours.Close()
	peer := os.NewFile(uintptr(fds[1]), "criu service")
	conn, err := net.FileConn(ours)
	if err != nil {
		peer.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), peer, nil
}

// memoryFile returns a new file that lives in memory only.
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
