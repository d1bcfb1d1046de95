package container

import (
	"context"
	"errors"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/log"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// unknownStatus is the exit status of a process whose true one is lost.
const unknownStatus = 255

// process is one process that the container's user asked for.
type process struct {
	// id is the exec id, empty for init.
	id   string
	spec *specs.Process
	// want are the standard streams that were asked for.
	want Stdio
	// done is closed once the process is stopped and its exit is known.
	done chan struct{}

	// order is held from before the process can run until its start has been
	// told, and while its exit is told: a process may be gone before the call
	// that started it returns.
	order sync.Mutex

	// The rest is guarded by Container.mu.

	// io is nil for an exec before its start.
	io       *stdio
	pid      int
	status   Status
	exit     Exit
	starting bool
}

func newProcess(id string, want Stdio) *process {
	return &process{id: id, want: want, status: StatusCreated, done: make(chan struct{})}
}

// generation is one incarnation of init.
type generation struct {
	number uint64
	pid    int
	// wait blocks until the process has ended, and reaps it.
	wait func() (unix.WaitStatus, error)
	// reaped is closed when it has been reaped.
	reaped chan struct{}

	// exit is valid once reaped is closed; told says that it is or will be
	// told as the container's exit. Guarded by Container.mu.
	exit Exit
	told bool
}

// follow makes g the present generation and waits for its end.
func (c *Container) follow(g *generation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gen = g
	c.init.pid = g.pid
	c.waiters.Go(func() { c.waitInit(g) })
}

func (c *Container) waitInit(g *generation) {
	e := waitExit("", g.pid, g.wait)
	c.mu.Lock()
	g.exit = e
	g.told = c.swap == nil || c.swap.gen != g
	tell := g.told
	close(g.reaped)
	c.mu.Unlock()
	if tell {
		c.endInit(e)
	}
}

// endInit ends the container: what is left of it is killed, and init's exit is
// told after all others.
func (c *Container) endInit(e Exit) {
	c.mu.Lock()
	c.initGone = true
	c.mu.Unlock()
	ctx := log.WithLogger(context.Background(), log.L.WithField("task", c.id))
	if !c.privatePIDs() {
		// The kernel does this where init is pid 1 of its own namespace.
		if err := c.lc().Signal(unix.SIGKILL); err != nil && !errors.Is(err, libcontainer.ErrNotRunning) {
			log.G(ctx).WithError(err).Warn("kill what init has left")
		}
	}
	c.execs.Wait()
	c.tell(c.init, e)
}

// tell records and tells the exit of p.
func (c *Container) tell(p *process, e Exit) {
	p.order.Lock()
	defer p.order.Unlock()
	c.mu.Lock()
	p.status = StatusStopped
	p.exit = e
	io := p.io
	c.mu.Unlock()
	if io != nil {
		io.finish()
	}
	// Who waits finds the exit told.
	c.observer.Exited(e)
	close(p.done)
}

// followExec waits for an exec'd process whose place in c.execs is taken.
func (c *Container) followExec(p *process, pid int, wait func() (unix.WaitStatus, error)) {
	c.waiters.Go(func() {
		defer c.execs.Done()
		c.tell(p, waitExit(p.id, pid, wait))
	})
}

func waitExit(execID string, pid int, wait func() (unix.WaitStatus, error)) Exit {
	status := unknownStatus
	ws, err := wait()
	if err != nil {
		log.L.WithError(err).WithField("pid", pid).Warn("exit status of process is lost")
	} else {
		status = exitStatus(ws)
	}
	return Exit{ExecID: execID, Pid: pid, Status: status, At: time.Now()}
}

// exitStatus is the exit code, or for a killed process 128 plus the signal.
func exitStatus(ws unix.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// waitChild waits for a process that libcontainer has started.
func waitChild(lp *libcontainer.Process) func() (unix.WaitStatus, error) {
	return func() (unix.WaitStatus, error) {
		state, err := lp.Wait()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return 0, err
		}
		return unix.WaitStatus(state.Sys().(syscall.WaitStatus)), nil
	}
}

// waitPid waits for a child that nobody else knows: CRIU makes a restored init
// our child.
func waitPid(pid int) func() (unix.WaitStatus, error) {
	return func() (unix.WaitStatus, error) {
		var ws unix.WaitStatus
		for {
			_, err := unix.Wait4(pid, &ws, 0, nil)
			if !errors.Is(err, unix.EINTR) {
				return ws, err
			}
		}
	}
}

// privatePIDs says whether init is pid 1 of a namespace of its own.
func (c *Container) privatePIDs() bool {
	cfg := c.lc().Config()
	return cfg.Namespaces.IsPrivate(configs.NEWPID)
}

// swap is the time in which init's death is part of an operation: the present
// generation is killed and another one follows. It begins before the kill and
// ends with exactly one of adoptInit, cancel and lost; only the last two can
// end the container.
type swap struct {
	c   *Container
	gen *generation
	// reaped is closed when the generation that was present at the beginning
	// is dead and reaped.
	reaped <-chan struct{}
}

// beginSwap begins a swap. The caller holds the operation lock, and init has
// been created.
func (c *Container) beginSwap() *swap {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &swap{c: c, gen: c.gen, reaped: c.gen.reaped}
	c.swap = s
	c.init.io.holdInput(true)
	return s
}

// cancel ends a swap in which nothing was killed. If init has ended by itself
// in the meantime, its true exit is told now.
func (s *swap) cancel() { s.end() }

// lost ends a swap whose generation is dead and which brought no other: its
// exit is the container's.
func (s *swap) lost() { s.end() }

func (s *swap) end() {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.swap != s {
		return
	}
	c.swap = nil
	c.init.io.holdInput(false)
	select {
	case <-s.gen.reaped:
	default:
		return // it lives
	}
	if s.gen.told {
		return // it had ended before the swap began
	}
	s.gen.told = true
	c.waiters.Go(func() { c.endInit(s.gen.exit) })
}

// adoptInit makes pid, a child of ours, the next generation of init and ends
// the swap, if there is one. Its exit is the container's exit. A terminal's
// input goes on when replaceConsole is called.
func (c *Container) adoptInit(pid int) {
	next := &generation{number: 1, pid: pid, reaped: make(chan struct{}), wait: waitPid(pid)}
	c.mu.Lock()
	if c.gen != nil {
		next.number = c.gen.number + 1
	}
	c.swap = nil
	c.mu.Unlock()
	c.follow(next)
}
