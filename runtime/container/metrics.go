package container

import (
	"context"
	"fmt"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
)

// loadMetrics opens the cgroup of init for Stats. It stays the same in a swap.
func (c *Container) loadMetrics() error {
	m, err := openMetrics(c.Pid())
	if err != nil {
		return fmt.Errorf("open cgroup of init for metrics: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.metrics = m
	return nil
}

// openTries is how often the cgroup of a process is looked for. The kernel shows
// the table of mounts, in which that is done, with gaps while others mount.
const openTries = 5

// openMetrics opens the cgroup of a process.
func openMetrics(pid int) (m any, err error) {
	for range openTries {
		if m, err = tryMetrics(pid); err == nil {
			break
		}
	}
	return m, err
}

func tryMetrics(pid int) (any, error) {
	if cgroups.Mode() != cgroups.Unified {
		return cgroup1.Load(cgroup1.PidPath(pid))
	}
	path, err := cgroup2.PidGroupPath(pid)
	if err != nil {
		return nil, err
	}
	return cgroup2.Load(path)
}

// openedMetrics returns the opened cgroup. It is opened now if that did not work
// before.
func (c *Container) openedMetrics() (any, error) {
	c.mu.Lock()
	m, started := c.metrics, c.gen != nil
	c.mu.Unlock()
	if m != nil || !started {
		return m, nil
	}
	if err := c.loadMetrics(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.metrics, nil
}

// Stats returns the metrics of the container's cgroup: *stats.Metrics of
// containerd/cgroups' package for cgroup v1 or v2.
func (c *Container) Stats() (any, error) {
	m, err := c.openedMetrics()
	if err != nil {
		return nil, err
	}
	switch cg := m.(type) {
	case cgroup1.Cgroup:
		s, err := cg.Stat(cgroup1.IgnoreNotExist)
		if err != nil {
			return nil, fmt.Errorf("read metrics of cgroup: %w", err)
		}
		return s, nil
	case *cgroup2.Manager:
		s, err := cg.Stat()
		if err != nil {
			return nil, fmt.Errorf("read metrics of cgroup: %w", err)
		}
		return s, nil
	}
	return nil, fmt.Errorf("container has no cgroup yet: %w", errdefs.ErrNotFound)
}

// watchOOM tells the observer of OOM kills, if that is not done already. The
// goroutine ends when the cgroup is removed; on cgroup v2 also when it has no
// process, so that it is begun again after a swap.
func (c *Container) watchOOM(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.oomWatched {
		return
	}
	notices, err := c.lib.NotifyOOM()
	if err != nil {
		log.G(ctx).WithError(err).Warn("container has no watch for OOM kills")
		return
	}
	c.oomWatched = true
	go func() {
		for range notices {
			c.observer.OOM()
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.oomWatched = false
	}()
}
