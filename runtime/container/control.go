package container

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// State is what is known of a process without asking anybody.
type State struct {
	Pid    int
	Status Status
	Stdio  Stdio
	// Exit is set once Status is StatusStopped.
	Exit Exit
}

// ProcessInfo is one process in the container's cgroup.
type ProcessInfo struct {
	Pid int
	// ExecID is set if the process was exec'd.
	ExecID string
}

// process finds a process by exec id; the empty one is init's.
func (c *Container) process(execID string) (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if execID == "" {
		return c.init, nil
	}
	p, ok := c.processes[execID]
	if !ok {
		return nil, fmt.Errorf("exec %q of container %q: %w", execID, c.id, errdefs.ErrNotFound)
	}
	return p, nil
}

func (c *Container) execProcesses() []*process {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*process, 0, len(c.processes))
	for _, p := range c.processes {
		all = append(all, p)
	}
	return all
}

func (c *Container) status(p *process) Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.status
}

// setStatus moves p on, unless it has ended in the meantime, and returns its
// pid.
func (c *Container) setStatus(p *process, next Status) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.status != StatusStopped {
		p.status = next
	}
	return p.pid
}

// State returns the state of init or of an exec. All processes of a paused
// container are paused.
func (c *Container) State(execID string) (State, error) {
	p, err := c.process(execID)
	if err != nil {
		return State{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := State{Pid: p.pid, Status: p.status, Stdio: p.want, Exit: p.exit}
	if s.Status != StatusStopped && (c.init.status == StatusPaused || c.init.status == StatusPausing) {
		s.Status = c.init.status
	}
	return s, nil
}

// Pids lists the processes in the container's cgroup. While it has init's word
// that the container lives, the list is not empty: in a swap it is the init
// that was there last.
func (c *Container) Pids() ([]ProcessInfo, error) {
	pids, err := c.lc().Processes()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(pids) == 0 && c.init.pid != 0 && c.init.status != StatusStopped {
		pids = []int{c.init.pid}
	}
	execs := map[int]string{}
	for id, p := range c.processes {
		if p.pid != 0 && p.status != StatusStopped {
			execs[p.pid] = id
		}
	}
	infos := make([]ProcessInfo, 0, len(pids))
	for _, pid := range pids {
		infos = append(infos, ProcessInfo{Pid: pid, ExecID: execs[pid]})
	}
	return infos, nil
}

// Pause freezes all processes of the container.
func (c *Container) Pause(ctx context.Context) error {
	release, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := c.status(c.init).check(StatusPausing, "pause"); err != nil {
		return err
	}
	c.setStatus(c.init, StatusPausing)
	if err := c.lc().Pause(); err != nil {
		c.setStatus(c.init, StatusRunning)
		return fmt.Errorf("pause container: %w", errorClass(err))
	}
	c.setStatus(c.init, StatusPaused)
	return nil
}

// Resume lets the processes of a paused container go on.
func (c *Container) Resume(ctx context.Context) error {
	release, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if s := c.status(c.init); s != StatusPaused {
		return fmt.Errorf("resume a container that is %s: %w", s, errdefs.ErrFailedPrecondition)
	}
	if err := c.lc().Resume(); err != nil {
		return fmt.Errorf("resume container: %w", errorClass(err))
	}
	c.setStatus(c.init, StatusRunning)
	return nil
}

// ResizePty sets the size of a process' terminal, if it has one.
func (c *Container) ResizePty(execID string, width, height uint16) error {
	io, err := c.openedStdio(execID)
	if err != nil || io == nil {
		return err
	}
	return io.resize(width, height)
}

// CloseIO lets go of a process' stdin: it ends once the client has closed its
// side, too.
func (c *Container) CloseIO(execID string) error {
	io, err := c.openedStdio(execID)
	if err != nil || io == nil {
		return err
	}
	return io.closeStdin()
}

func (c *Container) openedStdio(execID string) (*stdio, error) {
	p, err := c.process(execID)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return p.io, nil
}

// Update changes the limits of the container's cgroup. What r leaves out stays.
func (c *Container) Update(ctx context.Context, r *specs.LinuxResources) error {
	release, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if s := c.status(c.init); s == StatusStopped {
		return fmt.Errorf("update a container that is %s: %w", s, errdefs.ErrFailedPrecondition)
	}
	lc := c.lc()
	cfg := lc.Config()
	cgroup, resources := *cfg.Cgroups, *cfg.Cgroups.Resources
	cgroup.Resources = &resources
	cfg.Cgroups = &cgroup
	mergeResources(&resources, r)
	// The rules for devices do not change, and setting them again would undo
	// what others (GPU drivers) added. libcontainer keeps the object and
	// refuses to start an exec with the flag set.
	resources.SkipDevices = true
	defer func() { resources.SkipDevices = false }()
	if err := lc.Set(cfg); err != nil {
		return fmt.Errorf("update container: %w", errorClass(err))
	}
	return nil
}
