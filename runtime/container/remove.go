package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/log"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/rootfs"
)

// removeTimeout bounds how long Remove waits for killed processes to be gone.
const removeTimeout = 10 * time.Second

// RemoveConfig names a container that nobody has an object of.
type RemoveConfig struct {
	ID string
	// Root and Bundle are what they were for Create.
	Root, Bundle  string
	SystemdCgroup bool
}

// Remove removes what is left of a container whose shim has died: it kills its
// processes, runs its poststop hooks, removes its cgroup and state, and unmounts
// whatever is mounted in its bundle. It returns the pid of the init that the
// state names, or 0. It does all it can, also with a container that was not
// made to its end, and can be repeated.
func Remove(ctx context.Context, cfg RemoveConfig) (pid int, err error) {
	root := stateRoot(cfg.Root, cfg.Bundle)
	if err := killWorkers(ctx, cfg.Bundle); err != nil {
		log.G(ctx).WithError(err).Warn("kill criu processes")
	}
	lc, err := libcontainer.Load(root, cfg.ID)
	switch {
	case err == nil:
		pid, err = removeLoaded(ctx, lc, filepath.Join(root, cfg.ID))
	case errors.Is(err, libcontainer.ErrNotExist):
		err = removeHalfMade(ctx, cfg, filepath.Join(root, cfg.ID))
	default:
		err = fmt.Errorf("load state of container %q: %w", cfg.ID, err)
	}
	return pid, errors.Join(err, unmountBundle(cfg.Bundle))
}

// unmountBundle takes down everything below the bundle: besides the root that
// can be the next root of an operation that was under way. Deleting the bundle
// with one of them mounted would delete its files.
func unmountBundle(bundle string) error {
	if err := rootfs.Unmount(filepath.Join(bundle, "rootfs")); err != nil {
		return err
	}
	return mount.UnmountRecursive(bundle, 0)
}

func removeLoaded(ctx context.Context, lc *libcontainer.Container, stateDir string) (int, error) {
	state, err := lc.State()
	if err != nil {
		return 0, fmt.Errorf("read state of container: %w", err)
	}
	cg, err := manager.NewWithPaths(state.Config.Cgroups, state.CgroupPaths)
	if err != nil {
		return state.InitProcessPid, fmt.Errorf("open cgroup: %w", err)
	}
	if err := killCgroup(ctx, cg); err != nil {
		return state.InitProcessPid, err
	}
	// It finds out that init is gone by looking.
	if _, err := lc.Status(); err != nil {
		log.G(ctx).WithError(err).Warn("read status of container")
	}
	return state.InitProcessPid, destroyLoaded(ctx, lc, stateDir)
}

// removeHalfMade removes a container without state: it was not created to its
// end, or was to be restored and never was. Its cgroup is where the
// configuration says.
func removeHalfMade(ctx context.Context, cfg RemoveConfig, stateDir string) error {
	if _, err := os.Stat(stateDir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	spec, err := loadSpec(cfg.Bundle)
	if err != nil {
		return err
	}
	conf, err := libcontainerConfig(Config{ID: cfg.ID, Bundle: cfg.Bundle, SystemdCgroup: cfg.SystemdCgroup}, spec)
	if err != nil {
		return err
	}
	cg, err := manager.New(conf.Cgroups)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	if cg.Exists() {
		if err := killCgroup(ctx, cg); err != nil {
			return err
		}
	}
	if err := cg.Destroy(); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return os.RemoveAll(stateDir)
}

// killCgroup kills all processes in a cgroup and waits until they are dead. A
// process can fork while they are being listed, so that is repeated until there
// is none.
func killCgroup(ctx context.Context, cg cgroups.Manager) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		pids, err := cg.GetAllPids()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("list processes: %w", err)
		}
		if len(pids) == 0 {
			return nil
		}
		deaths := make([]unix.PollFd, 0, len(pids))
		for _, pid := range pids {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue // it has gone by itself
			}
			defer unix.Close(fd)
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill pid %d: %w", pid, err)
			}
			deaths = append(deaths, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
		// A frozen process dies when it is thawed.
		if err := cg.Freeze(cgroups.Thawed); err != nil {
			log.G(ctx).WithError(err).Warn("thaw container")
		}
		if err := awaitDeaths(ctx, deaths); err != nil {
			return err
		}
	}
}

// awaitDeaths waits for each pidfd to become readable, which it does when its
// process has ended.
func awaitDeaths(ctx context.Context, deaths []unix.PollFd) error {
	deadline, _ := ctx.Deadline()
	for len(deaths) > 0 {
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("%d killed processes do not end: %w", len(deaths), context.DeadlineExceeded)
		}
		_, err := unix.Poll(deaths, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("poll", err)
		}
		alive := deaths[:0]
		for _, d := range deaths {
			if d.Revents == 0 {
				alive = append(alive, d)
			}
		}
		deaths = alive
	}
	return ctx.Err()
}
