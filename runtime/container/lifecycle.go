package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// drainTimeout bounds how long a deletion waits for the last output of a
// process to be read.
const drainTimeout = 10 * time.Second

// ExecConfig says what to run in a container.
type ExecConfig struct {
	// ID is unique among the container's execs.
	ID string
	// Spec is the process; whether it has a terminal is said by Stdio.
	Spec  *specs.Process
	Stdio Stdio
}

// Start lets init run the user's program, or restores the processes of the
// container's checkpoint, or starts an exec'd process. It returns the pid.
func (c *Container) Start(ctx context.Context, execID string) (int, error) {
	p, err := c.process(execID)
	if err != nil {
		return 0, err
	}
	if execID == "" {
		return c.startInit(ctx, p)
	}
	return c.startExec(ctx, p)
}

func (c *Container) startInit(ctx context.Context, p *process) (int, error) {
	release, err := c.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer release()
	p.order.Lock()
	defer p.order.Unlock()
	if err := c.status(p).check(StatusRunning, "start"); err != nil {
		return 0, err
	}
	if c.checkpoint != "" {
		if err := c.restoreInit(ctx); err != nil {
			return 0, err
		}
	} else if err := c.lc().Exec(); err != nil {
		return 0, fmt.Errorf("start init: %w", errorClass(err))
	}
	pid := c.setStatus(p, StatusRunning)
	c.observer.Started("", pid)
	return pid, nil
}

// restoreInit brings init and all others from the images. If that fails after
// init was there, it is killed and its exit is told.
func (c *Container) restoreInit(ctx context.Context) error {
	if c.Generation() > 0 {
		return fmt.Errorf("restore a container that was restored: %w", errdefs.ErrFailedPrecondition)
	}
	pid, err := c.startFromCheckpoint(ctx)
	if err != nil {
		if pid > 0 {
			err = errors.Join(err, unix.Kill(pid, unix.SIGKILL))
		}
		return fmt.Errorf("restore from %q: %w", c.checkpoint, err)
	}
	c.afterInit(ctx)
	return nil
}

// Exec adds a process to the container. Start starts it.
func (c *Container) Exec(_ context.Context, cfg ExecConfig) error {
	if err := validateProcess(cfg.Spec); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.processes[cfg.ID]; ok {
		return fmt.Errorf("exec %q: %w", cfg.ID, errdefs.ErrAlreadyExists)
	}
	switch c.init.status {
	case StatusCreated, StatusRunning:
	default:
		return fmt.Errorf("exec in a container that is %s: %w", c.init.status, errdefs.ErrFailedPrecondition)
	}
	p := newProcess(cfg.ID, cfg.Stdio)
	p.spec = cfg.Spec
	c.processes[cfg.ID] = p
	return nil
}

// startExec opens the standard streams before it takes the operation lock: that
// waits for the other side, and nobody else should.
func (c *Container) startExec(ctx context.Context, p *process) (pid int, retErr error) {
	if err := c.reserveStart(p); err != nil {
		return 0, err
	}
	defer func() {
		if retErr != nil {
			c.failStart(p)
		}
	}()
	io, err := c.openStdio(ctx, p.want)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	p.io = io
	c.mu.Unlock()
	lp, err := libcontainerProcess(p.spec)
	if err != nil {
		return 0, err
	}
	release, err := c.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer release()
	p.order.Lock()
	defer p.order.Unlock()
	if err := c.countExec(); err != nil {
		return 0, err
	}
	pid, err = c.launch(lp, io)
	if err != nil {
		c.execs.Done()
		return 0, fmt.Errorf("exec %q: %w", p.id, err)
	}
	// The process has its own copies: its readers shall see the end of its
	// output when the last holder is gone.
	io.closeContainerEnds()
	c.mu.Lock()
	p.pid, p.starting = pid, false
	c.mu.Unlock()
	c.setStatus(p, StatusRunning)
	c.observer.Started(p.id, pid)
	c.followExec(p, pid, waitChild(lp))
	return pid, nil
}

// reserveStart makes sure that p is started at most once.
func (c *Container) reserveStart(p *process) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := p.status.check(StatusRunning, "start"); err != nil {
		return err
	}
	if p.starting {
		return fmt.Errorf("start a process that is being started: %w", errdefs.ErrFailedPrecondition)
	}
	p.starting = true
	return nil
}

// failStart ends an exec that never ran.
func (c *Container) failStart(p *process) {
	c.mu.Lock()
	p.starting = false
	p.status = StatusStopped
	p.exit = Exit{ExecID: p.id, Status: unknownStatus, At: time.Now()}
	io := p.io
	c.mu.Unlock()
	if io != nil {
		io.finish()
	}
	close(p.done)
}

// countExec takes a place in c.execs, unless the container cannot have another
// process now.
func (c *Container) countExec() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.initGone || c.gen == nil {
		return fmt.Errorf("exec in a container whose init is not running: %w", errdefs.ErrFailedPrecondition)
	}
	if s := c.init.status; s != StatusCreated && s != StatusRunning {
		return fmt.Errorf("exec in a container that is %s: %w", s, errdefs.ErrFailedPrecondition)
	}
	c.execs.Add(1)
	return nil
}

// Kill sends a signal to a process, or to all of the container's if all is set.
// It fails with ErrNotFound if there is no such process any more.
func (c *Container) Kill(ctx context.Context, execID string, signal unix.Signal, all bool) error {
	p, err := c.process(execID)
	if err != nil {
		return err
	}
	release, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	c.mu.Lock()
	status, pid := p.status, p.pid
	c.mu.Unlock()
	switch {
	case status == StatusStopped:
		return fmt.Errorf("signal a process that has finished: %w", errdefs.ErrNotFound)
	case pid == 0:
		return fmt.Errorf("signal a process that was not created: %w", errdefs.ErrFailedPrecondition)
	case execID != "":
		return signalPid(pid, signal)
	case all:
		return c.signalAll(signal)
	}
	if err := c.lc().Signal(signal); err != nil {
		if errors.Is(err, os.ErrProcessDone) || errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal init: %w: %w", err, errdefs.ErrNotFound)
		}
		return fmt.Errorf("signal init: %w", errorClass(err))
	}
	return nil
}

// signalAll signals each process in the cgroup. SIGKILL to init ends them all
// if it is pid 1 of its namespace, and libcontainer handles the other case.
func (c *Container) signalAll(signal unix.Signal) error {
	if signal == unix.SIGKILL {
		if err := c.lc().Signal(signal); err != nil {
			return fmt.Errorf("kill all processes: %w", errorClass(err))
		}
		return nil
	}
	pids, err := c.lc().Processes()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := signalPid(pid, signal); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func signalPid(pid int, signal unix.Signal) error {
	err := unix.Kill(pid, signal)
	if errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal pid %d: %w: %w", pid, err, errdefs.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("signal pid %d: %w", pid, err)
	}
	return nil
}

// Wait returns the exit of a process once it has ended.
func (c *Container) Wait(ctx context.Context, execID string) (Exit, error) {
	p, err := c.process(execID)
	if err != nil {
		return Exit{}, err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.exit, nil
}

// Delete forgets a process that has ended or never started; for init that is
// the whole container, with its cgroup, its root mount and its state.
func (c *Container) Delete(ctx context.Context, execID string) (Exit, error) {
	p, err := c.process(execID)
	if err != nil {
		return Exit{}, err
	}
	if execID == "" {
		return c.deleteInit(ctx, p)
	}
	c.mu.Lock()
	if p.status != StatusStopped && (p.status != StatusCreated || p.starting) {
		defer c.mu.Unlock()
		return Exit{}, fmt.Errorf("delete a process that is %s: %w", p.status, errdefs.ErrFailedPrecondition)
	}
	c.mu.Unlock()
	if err := c.closeIO(ctx, p); err != nil {
		log.G(ctx).WithError(err).WithField("exec", execID).Warn("close standard streams")
	}
	// The exit's event comes before that of whatever the caller does next.
	p.order.Lock()
	defer p.order.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.processes, execID)
	return p.exit, nil
}

// closeIO waits for the last output of p, which has ended or never was, to be
// read, and closes its streams.
func (c *Container) closeIO(ctx context.Context, p *process) error {
	c.mu.Lock()
	io := p.io
	c.mu.Unlock()
	if io == nil {
		return nil
	}
	io.finish()
	return errors.Join(io.drain(ctx, drainTimeout), io.close())
}

func (c *Container) deleteInit(ctx context.Context, p *process) (Exit, error) {
	release, err := c.Acquire(ctx)
	if err != nil {
		return Exit{}, err
	}
	defer release()
	if err := c.stopCreated(ctx, p); err != nil {
		return Exit{}, err
	}
	if err := c.closeIO(ctx, p); err != nil {
		log.G(ctx).WithError(err).WithField("task", c.id).Warn("close standard streams")
	}
	if err := c.sessions.CloseAll(); err != nil {
		log.G(ctx).WithError(err).WithField("task", c.id).Warn("close sessions")
	}
	for _, e := range c.execProcesses() {
		if err := c.closeIO(ctx, e); err != nil {
			log.G(ctx).WithError(err).WithField("exec", e.id).Warn("close standard streams")
		}
	}
	if err := c.destroy(ctx); err != nil {
		return Exit{}, err
	}
	if err := c.unmountRoot(); err != nil {
		return Exit{}, err
	}
	c.waiters.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.exit, nil
}

// stopCreated makes sure that init is not there: only one that has not run the
// user's program yet is killed for that.
func (c *Container) stopCreated(ctx context.Context, p *process) error {
	c.mu.Lock()
	status, pid := p.status, p.pid
	c.mu.Unlock()
	switch {
	case status == StatusStopped:
		return nil
	case status != StatusCreated:
		return fmt.Errorf("delete a container that is %s: %w", status, errdefs.ErrFailedPrecondition)
	case pid == 0:
		return nil
	}
	if err := signalPid(pid, unix.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// destroy removes the cgroup and libcontainer's state, and runs the poststop
// hooks.
func (c *Container) destroy(ctx context.Context) error {
	lc := c.lc()
	// It finds out that init is gone by looking.
	status, err := lc.Status()
	if err == nil && status == libcontainer.Paused {
		cg, err := c.cgroup()
		if err != nil {
			return err
		}
		if err := cg.Freeze(cgroups.Thawed); err != nil {
			return fmt.Errorf("thaw container: %w", err)
		}
		if _, err := lc.Status(); err != nil {
			return fmt.Errorf("read status of container: %w", err)
		}
	}
	return destroyLoaded(ctx, lc, c.stateDir())
}

// destroyLoaded has libcontainer remove what there is of a container and run its
// poststop hooks. Those come last, when the state is gone: if one of them fails,
// the container has ended nevertheless.
func destroyLoaded(ctx context.Context, lc *libcontainer.Container, stateDir string) error {
	err := lc.Destroy()
	if err == nil {
		return nil
	}
	if _, serr := os.Stat(stateDir); errors.Is(serr, os.ErrNotExist) {
		log.G(ctx).WithError(err).WithField("task", lc.ID()).Warn("poststop hook failed")
		return nil
	}
	return fmt.Errorf("destroy container %q: %w", lc.ID(), errorClass(err))
}
