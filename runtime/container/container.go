// Package container runs OCI containers with libcontainer inside the calling
// process: their processes, cgroup, terminals and standard streams. It can also
// write a container's processes into images and bring them back, in place or as
// a new container.
//
// # Calls and their order
//
//	Create -> Start("") -> Kill | Pause | Resume | Update | Exec -> Start(id)
//	       -> Delete(id) for each exec -> Delete("") after init has stopped
//
// Create leaves init waiting before the user's program; Start lets it go.
//
// # Locks
//
// The operation lock (Acquire) orders everything that changes the container,
// of which a checkpoint or restore in place takes hundreds of milliseconds.
// State, Pids, Wait, Stats and the accessors never wait for it: they answer from
// memory under mu, which nobody holds while blocking. containerd deletes a shim
// whose Pids is empty when it starts, so in the midst of a swap Pids answers
// with the init that was there last.
//
// # Exits
//
// One goroutine per process waits for that pid alone; a program that uses this
// package must not reap children by wait4(-1). An exit is told to the observer
// once, after the process' start was, and init's after all execs'. In a swap
// the death of the present generation of init is not an exit: see swap.
package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/rootfs"
	"github.com/statefork/statefork/runtime/terminal"
)

// Config says what to create.
type Config struct {
	// ID is unique in Root.
	ID string
	// Namespace is containerd's, for logging binaries.
	Namespace string
	// Bundle is the directory with config.json.
	Bundle string
	// Root is the directory below which the state is kept. If it is empty,
	// that is in the bundle.
	Root string
	// Mounts make the root file system. Without any, the root is the
	// directory that config.json names.
	Mounts []mount.Mount
	// Stdio are init's standard streams.
	Stdio Stdio
	// IoUID and IoGID own the pipes that are made for the standard streams.
	IoUID, IoGID int
	// SystemdCgroup lets systemd make the cgroup.
	SystemdCgroup bool
	// NoPivotRoot and NoNewKeyring are what runc's options of these names are.
	NoPivotRoot, NoNewKeyring bool
	// Checkpoint is a directory of process images. With it, Create starts no
	// process and Start restores those in the images.
	Checkpoint string
	// Observer is told what happens. It may be nil.
	Observer Observer
}

// Observer is told of a container's life in the order in which it happens. Its
// methods must not call the container's.
type Observer interface {
	// Created is told when init exists; pid is 0 if it will be restored.
	Created(pid int)
	// Started is told after the process, init if execID is empty, has started.
	Started(execID string, pid int)
	// Exited is told once for each process that was created or started.
	Exited(Exit)
	// OOM is told when the kernel killed a process for lack of memory.
	OOM()
}

// Exit is the end of a process.
type Exit struct {
	// ExecID is empty for init.
	ExecID string
	Pid    int
	// Status is the exit code, or 128 plus the signal.
	Status int
	At     time.Time
}

// Container is one OCI container.
type Container struct {
	id         string
	namespace  string
	bundle     string
	root       string
	rootfs     string
	checkpoint string
	spec       *specs.Spec
	observer   Observer
	ioUID      int
	ioGID      int
	sessions   *terminal.Set

	// operation holds a token while an operation is under way.
	operation chan struct{}
	// execs counts the exec'd processes whose exit is not told yet. Add only
	// under mu and while initGone is not set.
	execs sync.WaitGroup
	// waiters counts the goroutines that wait for processes. Delete waits for
	// them.
	waiters sync.WaitGroup

	// rootMounts are what is mounted at rootfs. Guarded by operation.
	rootMounts []mount.Mount
	// mounted says that rootfs is ours to unmount. Guarded by operation.
	mounted bool

	mu sync.Mutex
	// The rest is guarded by mu.

	lib       *libcontainer.Container
	init      *process
	processes map[string]*process // exec'd ones by id
	// gen is the present generation of init, nil before a restored one exists.
	gen *generation
	// swap is set while init's death is part of an operation.
	swap *swap
	// initGone is set once init's exit is certain: no exec can start.
	initGone bool
	// metrics is a cgroup1.Cgroup or a *cgroup2.Manager, nil before init exists.
	metrics any
	// oomWatched says that a goroutine waits for the kernel's OOM notices.
	oomWatched bool
}

// Create makes a container from a bundle. On an error nothing is left behind.
func Create(ctx context.Context, cfg Config) (_ *Container, retErr error) {
	spec, err := loadSpec(cfg.Bundle)
	if err != nil {
		return nil, err
	}
	c := &Container{
		id:         cfg.ID,
		namespace:  cfg.Namespace,
		bundle:     cfg.Bundle,
		root:       stateRoot(cfg.Root, cfg.Bundle),
		checkpoint: cfg.Checkpoint,
		spec:       spec,
		observer:   cfg.Observer,
		ioUID:      cfg.IoUID,
		ioGID:      cfg.IoGID,
		operation:  make(chan struct{}, 1),
		rootMounts: cfg.Mounts,
		processes:  map[string]*process{},
	}
	c.sessions = terminal.NewSet(filepath.Join(cfg.Bundle, "sessions"), c)
	if c.observer == nil {
		c.observer = deaf{}
	}
	conf, err := libcontainerConfig(cfg, spec)
	if err != nil {
		return nil, err
	}
	c.rootfs = conf.Rootfs
	if err := c.mountRoot(); err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, c.unmountRoot())
		}
	}()
	c.lib, err = libcontainer.Create(c.root, cfg.ID, conf)
	if err != nil {
		return nil, fmt.Errorf("create container %q: %w", cfg.ID, errorClass(err))
	}
	if err := c.createInit(ctx, cfg); err != nil {
		return nil, errors.Join(err, c.lib.Destroy())
	}
	return c, nil
}

// createInit makes the standard streams and, unless it will be restored, init.
func (c *Container) createInit(ctx context.Context, cfg Config) (retErr error) {
	p := newProcess("", cfg.Stdio)
	p.spec = c.spec.Process
	c.init = p
	var err error
	if p.io, err = c.openStdio(ctx, cfg.Stdio); err != nil {
		return err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, p.io.close())
		}
	}()
	if c.checkpoint != "" {
		c.observer.Created(0)
		return nil
	}
	lp, err := libcontainerProcess(p.spec)
	if err != nil {
		return err
	}
	lp.Init = true
	p.order.Lock()
	defer p.order.Unlock()
	pid, err := c.launch(lp, p.io)
	if err != nil {
		return fmt.Errorf("create init: %w", err)
	}
	c.follow(&generation{number: 1, pid: pid, reaped: make(chan struct{}), wait: waitChild(lp)})
	c.notePid(ctx, pid)
	c.afterInit(ctx)
	c.observer.Created(pid)
	return nil
}

// afterInit sets up what needs a cgroup with a process in it.
func (c *Container) afterInit(ctx context.Context) {
	if err := c.loadMetrics(); err != nil {
		log.G(ctx).WithError(err).Warn("container has no metrics")
	}
	c.watchOOM(ctx)
}

// launch starts lp with the given standard streams. Its exit is not followed
// yet.
func (c *Container) launch(lp *libcontainer.Process, io *stdio) (_ int, retErr error) {
	var console *consoleSocket
	if io.terminal() {
		var err error
		if console, err = newConsoleSocket(); err != nil {
			return 0, err
		}
		defer console.Close()
		lp.ConsoleSocket = console.child
	} else {
		lp.Stdin, lp.Stdout, lp.Stderr = io.ends[0], io.ends[1], io.ends[2]
	}
	if err := c.lc().Start(lp); err != nil {
		return 0, err
	}
	defer func() {
		if retErr != nil {
			if err := lp.Signal(unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
				retErr = errors.Join(retErr, err)
			}
			_, _ = waitChild(lp)()
		}
	}()
	if console != nil {
		master, err := console.receive()
		if err != nil {
			return 0, fmt.Errorf("receive terminal: %w", err)
		}
		if err := io.attachConsole(master); err != nil {
			return 0, errors.Join(err, master.Close())
		}
	}
	return lp.Pid()
}

// mountRoot mounts the root file system, if it is for us to mount.
func (c *Container) mountRoot() error {
	if len(c.rootMounts) == 0 {
		return nil
	}
	if err := os.Mkdir(c.rootfs, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make mountpoint of root: %w", err)
	}
	if err := rootfs.Mount(c.rootMounts, c.rootfs); err != nil {
		return err
	}
	c.mounted = true
	return nil
}

func (c *Container) unmountRoot() error {
	if !c.mounted {
		return nil
	}
	if err := rootfs.Unmount(c.rootfs); err != nil {
		return err
	}
	c.mounted = false
	return nil
}

// stateRoot is where libcontainer keeps the states of containers. By default
// each is in its bundle: so containers of two daemons never meet, and nothing
// can outlive its bundle.
func stateRoot(root, bundle string) string {
	if root != "" {
		return root
	}
	return filepath.Join(bundle, "state")
}

// Acquire waits for the operation lock. release may be called more than once.
func (c *Container) Acquire(ctx context.Context) (release func(), err error) {
	select {
	case c.operation <- struct{}{}:
		return sync.OnceFunc(func() { <-c.operation }), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the operation under way: %w", ctx.Err())
	}
}

// ID returns the container's id.
func (c *Container) ID() string { return c.id }

// Bundle returns the container's bundle directory.
func (c *Container) Bundle() string { return c.bundle }

// Pid returns the pid of init, or 0 before there is one.
func (c *Container) Pid() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.init.pid
}

// Generation counts the inits that the container has had: 1 after Create, one
// more after each restore in place.
func (c *Container) Generation() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gen == nil {
		return 0
	}
	return c.gen.number
}

// lc returns libcontainer's object. A restore in place replaces it.
func (c *Container) lc() *libcontainer.Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lib
}

// setLibcontainer replaces libcontainer's object, which knows only one init.
func (c *Container) setLibcontainer(lc *libcontainer.Container) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lib = lc
}

// stateDir is the directory of libcontainer's state.json.
func (c *Container) stateDir() string { return filepath.Join(c.root, c.id) }

// cgroup returns the manager of the container's cgroup.
func (c *Container) cgroup() (cgroups.Manager, error) {
	state, err := c.lc().State()
	if err != nil {
		return nil, fmt.Errorf("read state of container: %w", err)
	}
	cg, err := manager.NewWithPaths(state.Config.Cgroups, state.CgroupPaths)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return cg, nil
}

// errorClass gives libcontainer's errors their class.
func errorClass(err error) error {
	for from, class := range map[error]error{
		libcontainer.ErrExist:      errdefs.ErrAlreadyExists,
		libcontainer.ErrInvalidID:  errdefs.ErrInvalidArgument,
		libcontainer.ErrNotExist:   errdefs.ErrNotFound,
		libcontainer.ErrNotRunning: errdefs.ErrNotFound,
		libcontainer.ErrNotPaused:  errdefs.ErrFailedPrecondition,
		libcontainer.ErrPaused:     errdefs.ErrFailedPrecondition,
		libcontainer.ErrRunning:    errdefs.ErrFailedPrecondition,
	} {
		if errors.Is(err, from) {
			return fmt.Errorf("%w: %w", err, class)
		}
	}
	return err
}

// deaf is the observer of a container that nobody watches.
type deaf struct{}

func (deaf) Created(int)         {}
func (deaf) Started(string, int) {}
func (deaf) Exited(Exit)         {}
func (deaf) OOM()                {}
