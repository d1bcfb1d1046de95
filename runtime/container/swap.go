package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/system"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/criu"
	"github.com/statefork/statefork/runtime/terminal"
)

const (
	nsIPC = configs.NEWIPC
	nsUTS = configs.NEWUTS
)

// libConfig is libcontainer's view of the container's configuration.
type libConfig = configs.Config

func (c *Container) libConfig() *libConfig {
	cfg := c.lc().Config()
	return &cfg
}

// foundCRIU remembers the CRIU that was found: a shim serves it for long, but
// one that is installed later shall be found too.
var foundCRIU struct {
	mu  sync.Mutex
	bin *criu.Binary
}

// findCRIU returns the host's CRIU with its cache of the kernel's features.
func findCRIU(ctx context.Context) (*criu.Binary, error) {
	foundCRIU.mu.Lock()
	defer foundCRIU.mu.Unlock()
	if foundCRIU.bin == nil {
		bin, err := criu.Find(ctx)
		if err != nil {
			return nil, err
		}
		foundCRIU.bin = bin
	}
	// Another build of CRIU on this host removes the cache.
	if err := foundCRIU.bin.EnsureKerndat(ctx); err != nil {
		log.G(ctx).WithError(err).Warn("criu probes the kernel at each run")
	}
	return foundCRIU.bin, nil
}

// initAlive returns init's pid and whether the container is paused. It fails if
// init is not running.
func (c *Container) initAlive(context.Context) (pid int, paused bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.init.status {
	case StatusRunning, StatusPaused:
		return c.init.pid, c.init.status == StatusPaused, nil
	case StatusStopped:
		return 0, false, fmt.Errorf("container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	return 0, false, fmt.Errorf("container is %s: start it first: %w", c.init.status, errdefs.ErrFailedPrecondition)
}

// execGrace is how long the exit of an exec'd process that has ended is waited
// for: its waiter only has to run.
const execGrace = time.Second

// dumpable is initAlive, and fails if exec'd processes would be lost: they are
// not in init's tree.
func (c *Container) dumpable(ctx context.Context) (pid int, paused bool, err error) {
	for id, execPID := range c.runningExecs() {
		t, err := readTask(execPID)
		if err == nil && t.state != 'Z' && t.state != 'X' {
			return 0, false, fmt.Errorf("exec'd process %s (exec id %q) is running and would be lost: end it first: %w", t, id, errdefs.ErrFailedPrecondition)
		}
		p, err := c.process(id)
		if err != nil {
			continue // deleted meanwhile
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			return 0, false, ctx.Err()
		case <-time.After(execGrace):
			return 0, false, fmt.Errorf("exec'd process %d (exec id %q) does not end: %w", execPID, id, errdefs.ErrUnavailable)
		}
	}
	return c.initAlive(ctx)
}

// runningExecs returns the pids of the exec'd processes by exec id.
func (c *Container) runningExecs() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]int{}
	for id, p := range c.processes {
		if p.status == StatusRunning {
			out[id] = p.pid
		}
	}
	return out
}

// initStdio returns init's standard streams.
func (c *Container) initStdio() *stdio {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.init.io
}

// bindDestinations lists where the configuration mounts something from outside.
func (c *Container) bindDestinations() []string {
	var out []string
	for _, m := range c.libConfig().Mounts {
		if m.Device == "bind" {
			out = append(out, filepath.Clean(m.Destination))
		}
	}
	return out
}

// outsidePeers lists the connections that do not stay within the container. In
// the host's network namespace they cannot be told from others' without looking
// at every socket, so there the list is empty.
func (c *Container) outsidePeers(pid int, netns *os.File) ([]string, error) {
	if !c.libConfig().Namespaces.Contains(configs.NEWNET) {
		return nil, nil
	}
	return peers(pid, netns)
}

// adoptRestored makes a restored tree the container's: its record on disk, its
// terminals and its exit.
func (c *Container) adoptRestored(ctx context.Context, pid int, masters []*os.File, src *restoreSource) error {
	if err := c.saveRestored(pid); err != nil {
		// Nobody else would know of it.
		if kerr := unix.Kill(pid, unix.SIGKILL); kerr == nil {
			_, werr := waitPid(pid)()
			err = errors.Join(err, werr)
		}
		return err
	}
	c.adoptInit(pid)
	c.notePid(ctx, pid)
	if err := c.attachTerminals(masters, src); err != nil {
		log.G(ctx).WithError(err).Warn("attach restored terminals")
	}
	return nil
}

// notePid writes init's pid into the bundle, where runc's shim has it too: there
// are tools that look for it. Nothing here reads it.
func (c *Container) notePid(ctx context.Context, pid int) {
	name := filepath.Join(c.bundle, "init.pid")
	if err := os.WriteFile(name, []byte(strconv.Itoa(pid)), 0o644); err != nil {
		log.G(ctx).WithError(err).Warn("note pid of init")
	}
}

// attachTerminals gives the masters of restored terminals to whom they belong.
func (c *Container) attachTerminals(masters []*os.File, src *restoreSource) error {
	var errs []error
	io := c.initStdio()
	for i, master := range masters {
		if i == 0 && io.terminal() {
			errs = append(errs, io.replaceConsole(master))
			continue
		}
		closeQuietly(master)
	}
	return errors.Join(append(errs, src.resume(c.findInner()))...)
}

// holdTimeout bounds how long a shell may take to read the command that it was
// given just now: a long one is read in pieces.
const holdTimeout = 5 * time.Second

// holdSessions has the sessions stand still for an operation.
func (c *Container) holdSessions(ctx context.Context) (*terminal.Held, error) {
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	return c.sessions.Hold(ctx)
}

// saveRestored writes libcontainer's state file anew, as only it can make an
// object of a process that it did not start, and loads it.
func (c *Container) saveRestored(pid int) error {
	lc := c.lc()
	state, err := lc.State()
	if err != nil {
		return fmt.Errorf("read state of container: %w", err)
	}
	stat, err := system.Stat(pid)
	if err != nil {
		return fmt.Errorf("read start time of restored init: %w", err)
	}
	state.InitProcessPid = pid
	state.InitProcessStartTime = stat.StartTime
	state.NamespacePaths = map[configs.NamespaceType]string{}
	// CRIU restores into a time namespace: execs have to join it.
	if !state.Config.Namespaces.Contains(configs.NEWTIME) && configs.IsNamespaceSupported(configs.NEWTIME) {
		state.Config.Namespaces = append(state.Config.Namespaces[:len(state.Config.Namespaces):len(state.Config.Namespaces)],
			configs.Namespace{Type: configs.NEWTIME})
	}
	for _, ns := range state.Config.Namespaces {
		state.NamespacePaths[ns.Type] = ns.GetPath(pid)
	}
	if state.Created.IsZero() {
		state.Created = time.Now().UTC()
	}
	if err := writeState(filepath.Join(c.stateDir(), "state.json"), state); err != nil {
		return fmt.Errorf("write state of container: %w", err)
	}
	loaded, err := libcontainer.Load(filepath.Dir(c.stateDir()), c.id)
	if err != nil {
		return fmt.Errorf("load state of container: %w", err)
	}
	c.setLibcontainer(loaded)
	return nil
}

func writeState(name string, state *libcontainer.State) (retErr error) {
	f, err := os.CreateTemp(filepath.Dir(name), "state-")
	if err != nil {
		return err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, os.Remove(f.Name()))
		}
	}()
	if err := json.NewEncoder(f).Encode(state); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
