package container

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// startFromCheckpoint starts a container that was created with process images
// instead of a command: a fork, or the continuation of a stopped container. It
// gets its own cgroup, network and names, and the images' processes. What a
// failure leaves is removed by Delete, as for any container that was created.
func (c *Container) startFromCheckpoint(ctx context.Context) (int, error) {
	desc, err := readImages(c.checkpoint)
	if err != nil {
		return 0, err
	}
	cfg := c.libConfig()
	if err := checkNamespaces(cfg); err != nil {
		return 0, err
	}
	if err := makeMountpoints(c.rootfs, desc, cfg); err != nil {
		return 0, err
	}
	cg, err := c.makeCgroup(cfg)
	if err != nil {
		return 0, err
	}
	r, err := c.prepareFork(ctx, cfg, cg, desc)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	// CRIU's own process stands in for init: it holds the network namespace
	// that hooks set up.
	if err := c.runHooks(cfg, r.worker.Pid(), configs.Prestart, configs.CreateRuntime); err != nil {
		return 0, err
	}
	pid, masters, err := c.runRestore(ctx, cg, r)
	if err != nil {
		keepLog(ctx, r, err)
		return 0, err
	}
	if err := c.adoptRestored(ctx, pid, masters, &r.restoreSource); err != nil {
		return 0, err
	}
	return pid, c.runHooks(cfg, pid, configs.Poststart)
}

func (c *Container) prepareFork(ctx context.Context, cfg *libConfig, cg cgroups.Manager, desc *Description) (_ *restoring, retErr error) {
	fresh, err := freshMounts(ctx, c.checkpoint, desc.Mounts, nil, nil, c.mountSource(cfg))
	if err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			fresh.Close()
		}
	}()
	plan, err := planNamespaces(cfg, desc)
	if err != nil {
		return nil, err
	}
	if plan.cgroup, err = newCgroupNamespace(cfg, cg); err != nil {
		plan.Close()
		return nil, err
	}
	revival, err := c.sessions.Revive(c.checkpoint)
	if err != nil {
		plan.Close()
		return nil, err
	}
	r, err := c.prepareRestore(ctx, restoreSource{
		images:     c.checkpoint,
		desc:       desc,
		mounts:     fresh,
		namespaces: plan,
		revival:    revival,
		ends:       revival.Ends(),
		resume:     revival.Resume,
		rollback:   true,
		owned:      true,
	})
	if err != nil {
		plan.Close()
		revival.Close()
		return nil, err
	}
	return r, nil
}

// makeCgroup makes the container's cgroup with its limits and no process.
func (c *Container) makeCgroup(cfg *libConfig) (cgroups.Manager, error) {
	cg, err := c.cgroup()
	if err != nil {
		return nil, err
	}
	const nobody = -1
	if err := cg.Apply(nobody); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	if err := cg.Set(cfg.Cgroups.Resources); err != nil {
		return nil, errors.Join(fmt.Errorf("set resources of cgroup: %w", err), cg.Destroy())
	}
	return cg, nil
}

// runHooks runs the named hooks of the host's side, as at a first start.
func (c *Container) runHooks(cfg *libConfig, pid int, names ...configs.HookName) error {
	status := specs.StateCreating
	for _, name := range names {
		if name == configs.Poststart {
			status = specs.StateRunning
		}
		err := cfg.Hooks.Run(name, &specs.State{
			Version:     specs.Version,
			ID:          c.id,
			Status:      status,
			Pid:         pid,
			Bundle:      c.bundle,
			Annotations: c.spec.Annotations,
		})
		if err != nil {
			return fmt.Errorf("run %s hooks: %w", name, err)
		}
	}
	return nil
}
