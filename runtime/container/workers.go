package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/log"
	"github.com/opencontainers/runc/libcontainer/system"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/criu"
)

// CRIU processes die with the shim, but a helper that one of them has forked
// may not, and it would keep the container's network namespace. So the bundle
// names each worker while it lives, for Remove: a worker leads a process group,
// in which its helpers are too.

const workerPrefix = "worker-"

// spawn starts a CRIU worker and notes it in the bundle. forget takes the note
// away, once the worker was closed.
func (c *Container) spawn(ctx context.Context, bin *criu.Binary, opts criu.SpawnOptions) (_ *criu.Worker, forget func(), _ error) {
	w, err := bin.Spawn(ctx, opts)
	if err != nil {
		return nil, nil, err
	}
	name := filepath.Join(c.bundle, workerPrefix+strconv.Itoa(w.Pid()))
	stat, err := system.Stat(w.Pid())
	exe, lerr := executable(w.Pid())
	if err = errors.Join(err, lerr); err == nil {
		err = os.WriteFile(name, fmt.Appendf(nil, "%d %s", stat.StartTime, exe), 0o600)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("note criu process: %w", err), w.Close())
	}
	return w, func() { os.Remove(name) }, nil
}

// killWorkers kills what is left of the workers that a bundle names.
func killWorkers(ctx context.Context, bundle string) error {
	notes, err := filepath.Glob(filepath.Join(bundle, workerPrefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, note := range notes {
		pid, perr := strconv.Atoi(strings.TrimPrefix(filepath.Base(note), workerPrefix))
		b, rerr := os.ReadFile(note)
		start, exe, _ := strings.Cut(string(b), " ")
		born, serr := strconv.ParseUint(start, 10, 64)
		if err := errors.Join(perr, rerr, serr); err != nil {
			errs = append(errs, fmt.Errorf("read note of criu process %q: %w", note, err))
			continue
		}
		if !ledBy(pid, born, exe) {
			continue
		}
		log.G(ctx).WithField("pid", pid).Warn("kill what is left of a criu process")
		if err := unix.Kill(-pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("kill process group %d: %w", pid, err))
		}
	}
	return errors.Join(errs...)
}

// executable returns the file that a process runs, also if it has been replaced
// since.
func executable(pid int) (string, error) {
	exe, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
	return strings.TrimSuffix(exe, " (deleted)"), err
}

// ledBy says whether the process group pgid is that of a worker that was born
// then and runs that file: the kernel gives no pid to a new process while a group
// has it, but it may have ended and come again. Whoever is in it must not be
// older.
func ledBy(pgid int, born uint64, file string) bool {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	found := false
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if group, err := unix.Getpgid(pid); err != nil || group != pgid {
			continue
		}
		exe, err := executable(pid)
		stat, serr := system.Stat(pid)
		if err != nil || serr != nil {
			continue // it has ended
		}
		if exe != file || stat.StartTime < born {
			return false
		}
		found = true
	}
	return found
}
