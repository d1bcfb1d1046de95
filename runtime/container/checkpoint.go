package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/criu"
	"github.com/statefork/statefork/runtime/rootfs"
	"github.com/statefork/statefork/runtime/terminal"
)

// Phases of an operation, as its journal names them. Up to PhaseDump the tree
// has not been touched; from PhaseSeal to PhaseRestore it lives only in its
// images.
const (
	PhaseDump    = "dump"
	PhaseSeal    = "seal"
	PhaseRestore = "restore"
)

// Sealed is what a dump yields for the node's record.
type Sealed struct {
	// At is the moment of the freeze.
	At         time.Time
	ImageBytes uint64
}

// CheckpointOptions direct a checkpoint in place.
type CheckpointOptions struct {
	// Images is the directory to make for the process images.
	Images string
	// Seal ends the writable life of the root's upper layer, with the images
	// in place and the tree dead, and returns the mounts of the root to go on
	// with. If it fails, the container goes on with the old root.
	Seal func(context.Context, Sealed) ([]mount.Mount, error)
	// Phase is told each phase before it begins; an error in PhaseDump ends
	// the operation.
	Phase func(phase string) error
}

// Timings say how long the parts of an operation took.
type Timings struct {
	Frozen, Dump, Seal, Restore time.Duration
}

// External is state that a checkpoint refers to but does not hold.
type External struct {
	Kind string // "mount" or "socket"
	Name string
}

// Checkpoint freezes the container, dumps its tree, has its root sealed and
// goes on from there: the same container with a new init process underneath.
// It fails with nothing changed, unless the container's exit was published.
// The caller holds the operation lock.
func (c *Container) Checkpoint(ctx context.Context, opts CheckpointOptions) (_ Timings, _ []External, retErr error) {
	var t Timings
	d, err := c.prepareDump(ctx)
	if err != nil {
		return t, nil, err
	}
	defer d.Close()
	r, err := c.prepareRestore(ctx, restoreSource{
		images:     opts.Images,
		desc:       d.desc,
		mounts:     d.live,
		namespaces: namespacePlan{enter: d.enter, cgroup: d.cgroup},
		ends:       d.ends,
		resume:     d.held.Resume,
	})
	if err != nil {
		return t, nil, err
	}
	defer r.Close()
	d.helper = r.worker.Pid()
	if err := opts.Phase(PhaseDump); err != nil {
		return t, nil, err
	}
	frozen := time.Now()
	swap, err := c.dump(ctx, d, opts.Images, false)
	if err != nil {
		return t, nil, err
	}
	// From here on the container must be brought back whatever happens to the
	// caller.
	ctx = context.WithoutCancel(ctx)
	t.Dump = time.Since(frozen)
	if cg, err := c.cgroup(); err == nil {
		r.joinFreezer(cg)
	}
	at := time.Now()
	old, err := c.takeRoot()
	if err == nil {
		defer old.end()
		err = c.sealAndSwitch(ctx, d, old, opts)
	}
	if err != nil {
		// The old root is there again: restore what was dumped into it.
		retErr = fmt.Errorf("seal root: %w", err)
	}
	t.Seal = time.Since(at)
	at = time.Now()
	c.phase(ctx, opts.Phase, PhaseRestore)
	resumed, err := c.restoreSwapped(ctx, swap, r)
	if err != nil {
		return t, nil, errors.Join(retErr, err)
	}
	if err := c.stayPaused(d.paused, r); err != nil {
		log.G(ctx).WithError(err).Warn("container runs on that was paused")
	}
	if retErr != nil {
		return t, nil, errors.Join(retErr, os.RemoveAll(opts.Images))
	}
	t.Restore = time.Since(at)
	t.Frozen = resumed.Sub(frozen)
	return t, d.desc.external(false), nil
}

// sealAndSwitch replaces the dead container's root by the sealed one's
// successor. On an error the old root is there again, as far as possible.
func (c *Container) sealAndSwitch(ctx context.Context, d *dumping, old *oldRoot, opts CheckpointOptions) error {
	mounts, err := c.seal(ctx, d, opts)
	if err != nil {
		// Mounting an overlay again while it is still about is undefined.
		<-old.end()
		return errors.Join(err, rootfs.Mount(c.rootMounts, c.rootfs))
	}
	c.rootMounts = mounts
	old.await()
	// If this fails, the node is whole, and its layer must not be written any
	// more: there is no way back to the old root.
	return rootfs.Mount(mounts, c.rootfs)
}

func (c *Container) seal(ctx context.Context, d *dumping, opts CheckpointOptions) ([]mount.Mount, error) {
	size, err := imagesSize(opts.Images)
	if err != nil {
		return nil, err
	}
	c.phase(ctx, opts.Phase, PhaseSeal)
	return opts.Seal(ctx, Sealed{At: d.at, ImageBytes: size})
}

// phase tells a phase that cannot be called off any more.
func (c *Container) phase(ctx context.Context, tell func(string) error, phase string) {
	if err := tell(phase); err != nil {
		log.G(ctx).WithError(err).WithField("phase", phase).Warn("operation goes on without its journal")
	}
}

// DumpTo writes the container's processes and tmpfs contents into the
// directory images and lets the container run on, or ends it if exit is set.
// It takes the operation lock.
func (c *Container) DumpTo(ctx context.Context, images string, exit bool) error {
	release, err := c.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	d, err := c.prepareDump(ctx)
	if err != nil {
		return err
	}
	defer d.Close()
	s, err := c.dump(ctx, d, images, !exit)
	if s != nil {
		s.lost()
	}
	return err
}

// dumping is a dump that is ready to run.
type dumping struct {
	pid    int
	desc   *Description
	live   *staging
	enter  namespaceFiles
	cgroup *os.File // its namespace, nil for the host's
	held   *terminal.Held
	ends   []terminal.End
	worker *criu.Worker
	forget func()
	// helper is a process of ours in the container's cgroups.
	helper int
	paused bool
	at     time.Time
}

func (d *dumping) Close() {
	if d.worker != nil {
		d.worker.Close()
		d.forget()
	}
	if d.live != nil {
		d.live.Close()
	}
	if d.held != nil {
		d.held.Free()
	}
	namespacePlan{enter: d.enter, cgroup: d.cgroup}.Close()
}

// prepareDump does all of a dump that can be done while the container runs.
func (c *Container) prepareDump(ctx context.Context) (_ *dumping, retErr error) {
	cfg := c.libConfig()
	if err := checkNamespaces(cfg); err != nil {
		return nil, err
	}
	pid, paused, err := c.dumpable(ctx)
	if err != nil {
		return nil, err
	}
	bin, err := findCRIU(ctx)
	if err != nil {
		return nil, err
	}
	d := &dumping{pid: pid, paused: paused}
	defer func() {
		if retErr != nil {
			d.Close()
		}
	}()
	if d.held, err = c.holdSessions(ctx); err != nil {
		return nil, err
	}
	if d.ends, err = d.held.Ends(); err != nil {
		return nil, err
	}
	if d.desc, err = c.describe(pid, bin); err != nil {
		return nil, err
	}
	if d.live, err = cloneMounts(ctx, pid, d.desc.Mounts); err != nil {
		return nil, err
	}
	if err := describeTmpfs(d.desc.Mounts, d.live); err != nil {
		return nil, err
	}
	if d.enter, err = c.namespacesToEnter(cfg, pid); err != nil {
		return nil, err
	}
	if d.cgroup, err = cgroupNamespaceOf(cfg, pid); err != nil {
		return nil, err
	}
	d.desc.Entered = d.enter.names()
	enter := namespacePlan{enter: d.enter}
	if d.worker, d.forget, err = c.spawn(ctx, bin, criu.SpawnOptions{Prepare: enter.apply}); err != nil {
		return nil, err
	}
	return d, nil
}

// namespacesToEnter opens the namespaces of pid that CRIU is to run in.
func (c *Container) namespacesToEnter(cfg *libConfig, pid int) (namespaceFiles, error) {
	n, err := openNamespaces(pid)
	if err != nil {
		return nil, err
	}
	if !cfg.Namespaces.IsPrivate(nsIPC) {
		return n, nil // shared with others: not this container's to keep
	}
	used, err := sysvInUse(n["ipc"])
	if err != nil {
		n.Close()
		return nil, err
	}
	if used {
		n["ipc"].Close()
		delete(n, "ipc")
	}
	return n, nil
}

// describe collects what the images will not hold.
func (c *Container) describe(pid int, bin *criu.Binary) (*Description, error) {
	infos, err := readMounts(pid)
	if err != nil {
		return nil, err
	}
	ext, err := classify(infos, c.bindDestinations())
	if err != nil {
		return nil, err
	}
	d := &Description{
		Version:   ImageVersion,
		Container: c.id,
		Mounts:    ext,
		CRIU:      bin.Version,
		Stdio:     map[int]string{},
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return nil, os.NewSyscallError("uname", err)
	}
	d.Kernel = unix.ByteSliceToString(uts.Release[:])
	stdio := c.initStdio()
	d.Terminal = stdio.terminal()
	for fd, f := range stdio.containerEnds() {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return nil, fmt.Errorf("stat stdio: %w", err)
		}
		d.Stdio[fd] = fmt.Sprintf("pipe:[%d]", st.Ino)
	}
	return d, nil
}

// dump freezes the container, refuses what would be lost, and dumps the tree.
// Unless leaveRunning is set the tree is dead afterwards, reaped and thawed,
// and the returned swap waits for its successor.
func (c *Container) dump(ctx context.Context, d *dumping, images string, leaveRunning bool) (_ *swap, retErr error) {
	// A directory that exists is one that a standard client made for us.
	if err := os.MkdirAll(images, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of process images: %w", err)
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, os.RemoveAll(images))
		}
	}()
	cg, err := c.cgroup()
	if err != nil {
		return nil, err
	}
	if err := freeze(ctx, cg); err != nil {
		return nil, errors.Join(err, c.thaw(cg, d.paused))
	}
	d.at = time.Now()
	s, err := c.dumpFrozen(ctx, d, cg, images, leaveRunning)
	if err != nil || leaveRunning {
		return nil, errors.Join(err, c.thaw(cg, d.paused))
	}
	// A frozen cgroup would hang the restored processes.
	if err := c.thaw(cg, false); err != nil {
		log.G(ctx).WithError(err).Warn("thaw of dumped container")
	}
	<-s.reaped
	return s, nil
}

// dumpFrozen makes whole images of the frozen tree. What can be written before
// the dump is: from CRIU's end on, the tree lives only in them.
func (c *Container) dumpFrozen(ctx context.Context, d *dumping, cg cgroups.Manager, images string, leaveRunning bool) (*swap, error) {
	if err := c.checkFrozen(d, cg); err != nil {
		return nil, err
	}
	if err := saveTmpfs(ctx, images, d.desc.Mounts, d.live); err != nil {
		return nil, err
	}
	if err := d.held.Save(images); err != nil {
		return nil, err
	}
	commit, err := d.desc.write(images)
	if err != nil {
		return nil, err
	}
	work := filepath.Join(c.bundle, "dump")
	if err := emptyDir(work); err != nil {
		return nil, err
	}
	var s *swap
	if !leaveRunning {
		s = c.beginSwap()
	}
	if _, err := d.worker.Dump(ctx, c.dumpOptions(d, cg, images, work, leaveRunning)); err != nil {
		if s != nil {
			s.cancel()
		}
		pids, perr := cg.GetAllPids()
		return nil, errors.Join(culprits(err, pids), perr)
	}
	if err := c.finishImages(ctx, d, images); err != nil {
		// The tree is dead and what is missing is small: go on with it.
		log.G(ctx).WithError(err).Warn("finish process images")
	}
	return s, commit()
}

// finishImages mends what CRIU has left.
func (c *Container) finishImages(ctx context.Context, d *dumping, images string) error {
	errs := []error{criu.RearmTimerfds(images), criu.DetachZombies(images)}
	// CRIU has linked deleted files back into their directories: some of them
	// may be in a tmpfs.
	if _, err := os.Stat(filepath.Join(images, "remap-fpath.img")); err == nil {
		errs = append(errs, saveTmpfs(ctx, images, d.desc.Mounts, d.live))
	}
	return errors.Join(errs...)
}

// emptyDir makes an empty directory, of which the content of the last use goes.
func emptyDir(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("empty work directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make work directory: %w", err)
	}
	return nil
}

func (c *Container) dumpOptions(d *dumping, cg cgroups.Manager, images, work string, leaveRunning bool) criu.DumpOptions {
	lock := criu.NetworkLockSkip
	if len(d.desc.Peers) > 0 {
		lock = criu.NetworkLockNftables
	}
	return criu.DumpOptions{
		Pid:          d.pid,
		Images:       images,
		Work:         work,
		Root:         c.rootfs,
		FreezeCgroup: freezerPath(cg),
		External:     append(criuExternalDump(d.desc.Mounts), terminal.Terminals(d.ends)...),
		LeaveRunning: leaveRunning,
		NetworkLock:  lock,
	}
}

// freezerPath returns the cgroup that freezes the container.
func freezerPath(cg cgroups.Manager) string {
	if cgroups.IsCgroup2UnifiedMode() {
		return cg.Path("")
	}
	return cg.Path("freezer")
}

const (
	// freezePatience is how long a container may take to stand still: a task
	// that the kernel cannot stop just now holds up all others.
	freezePatience = 2 * time.Second
	freezeAgain    = 20 * time.Millisecond
)

// freeze makes the container stand still.
func freeze(ctx context.Context, cg cgroups.Manager) error {
	ctx, cancel := context.WithTimeout(ctx, freezePatience)
	defer cancel()
	tick := time.NewTicker(freezeAgain)
	defer tick.Stop()
	for {
		err := cg.Freeze(cgroups.Frozen)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("freeze container: %w: %w", err, errdefs.ErrUnavailable)
		case <-tick.C:
		}
	}
}

// thaw lets the container run, unless it was paused by its user.
func (c *Container) thaw(cg cgroups.Manager, paused bool) error {
	if paused {
		return nil
	}
	if err := cg.Freeze(cgroups.Thawed); err != nil {
		return fmt.Errorf("thaw container: %w", err)
	}
	return nil
}

// stayPaused pauses a restored container whose user has paused it: CRIU lets
// restored processes run. CRIU itself is in the cgroup that freezes the container
// and has to leave before: frozen it would never end, not even when killed.
func (c *Container) stayPaused(paused bool, r *restoring) error {
	if !paused {
		return nil
	}
	err := r.worker.Close()
	if err == nil {
		err = c.lc().Pause()
	}
	if err != nil {
		c.setStatus(c.init, StatusRunning)
		return fmt.Errorf("pause restored container: %w", err)
	}
	return nil
}

// checkFrozen is the part of the preflight that needs a still tree.
func (c *Container) checkFrozen(d *dumping, cg cgroups.Manager) error {
	pids, err := cg.GetAllPids()
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == d.helper })
	if err := checkTasks(d.pid, pids); err != nil {
		return err
	}
	infos, err := readMounts(d.pid)
	if err != nil {
		return err
	}
	now, err := classify(infos, c.bindDestinations())
	if err != nil {
		return err
	}
	if !sameMounts(d.desc.Mounts, now) {
		return fmt.Errorf("container changed its mounts just now, try again: %w", errdefs.ErrUnavailable)
	}
	if ipc, ok := d.enter["ipc"]; ok && c.libConfig().Namespaces.IsPrivate(nsIPC) {
		used, err := sysvInUse(ipc)
		if err != nil {
			return err
		}
		if used {
			return fmt.Errorf("container made System V objects just now, try again: %w", errdefs.ErrUnavailable)
		}
	}
	d.desc.Peers, err = c.outsidePeers(d.pid, d.enter["net"])
	if err != nil {
		return err
	}
	return readNames(d)
}

func sameMounts(a, b []ExternalMount) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Mountpoint != b[i].Mountpoint || a[i].Dev != b[i].Dev || a[i].Root != b[i].Root {
			return false
		}
	}
	return true
}

// readNames records the names in the container's UTS namespace.
func readNames(d *dumping) error {
	return onThread(func() error {
		if err := unix.Setns(int(d.enter["uts"].Fd()), unix.CLONE_NEWUTS); err != nil {
			return fmt.Errorf("enter uts namespace: %w", os.NewSyscallError("setns", err))
		}
		var uts unix.Utsname
		if err := unix.Uname(&uts); err != nil {
			return os.NewSyscallError("uname", err)
		}
		d.desc.Hostname = unix.ByteSliceToString(uts.Nodename[:])
		if name := unix.ByteSliceToString(uts.Domainname[:]); name != "(none)" {
			d.desc.Domainname = name
		}
		return nil
	})
}

// external lists what a node refers to; connections count only where the
// processes were not simply going on.
func (d *Description) external(peers bool) []External {
	var out []External
	for _, m := range d.externalNames() {
		out = append(out, External{Kind: "mount", Name: m})
	}
	if peers {
		for _, p := range d.Peers {
			out = append(out, External{Kind: "socket", Name: p})
		}
	}
	return out
}
