package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
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

// RestoreOptions direct a restore in place.
type RestoreOptions struct {
	// Images is the directory of the node's process images.
	Images string
	// Switch makes the node's root the container's and returns its mounts. It
	// is called when the present tree is dead.
	Switch func(context.Context) ([]mount.Mount, error)
	// Phase is told each phase before it begins; an error in PhaseDump ends
	// the operation.
	Phase func(phase string) error
}

// Restored says what a restore in place did.
type Restored struct {
	Timings  Timings
	External []External
	// EndedExecs are the exec'd processes of the abandoned state, by id.
	EndedExecs map[string]int
}

// Restore abandons the container's present state and moves it to a node.
// Everything that can fail without harm comes first: an error with
// errdefs.IsAborted has ended the container, any other leaves it as it was. The
// caller holds the operation lock.
func (c *Container) Restore(ctx context.Context, opts RestoreOptions) (_ *Restored, retErr error) {
	desc, err := readImages(opts.Images)
	if err != nil {
		return nil, err
	}
	cfg := c.libConfig()
	if err := checkNamespaces(cfg); err != nil {
		return nil, err
	}
	pid, paused, err := c.initAlive(ctx)
	if err != nil {
		return nil, err
	}
	r, err := c.prepareRollback(ctx, pid, cfg, desc, opts)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	held, err := c.holdSessions(ctx)
	if err != nil {
		return nil, err
	}
	defer held.Free()
	if err := opts.Phase(PhaseDump); err != nil {
		return nil, err
	}
	res := &Restored{EndedExecs: c.runningExecs(), External: desc.external(true)}
	frozen := time.Now()
	swap, err := c.killTree(ctx, pid, paused)
	if err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	if cg, err := c.cgroup(); err == nil {
		r.joinFreezer(cg)
	}
	c.phase(ctx, opts.Phase, PhaseRestore)
	at := time.Now()
	old, err := c.takeRoot()
	if err == nil {
		defer old.end()
		err = c.switchRoot(ctx, old, opts)
	}
	if err != nil {
		swap.lost()
		return nil, fmt.Errorf("container has ended, its nodes are whole: %w: %w", err, errdefs.ErrAborted)
	}
	res.Timings.Seal = time.Since(at)
	at = time.Now()
	resumed, err := c.restoreSwapped(ctx, swap, r)
	if err != nil {
		return nil, err
	}
	if err := c.stayPaused(paused, r); err != nil {
		log.G(ctx).WithError(err).Warn("container runs on that was paused")
	}
	res.Timings.Restore = time.Since(at)
	res.Timings.Frozen = resumed.Sub(frozen)
	return res, nil
}

// switchRoot puts the node's root in the place of the dead container's.
func (c *Container) switchRoot(ctx context.Context, old *oldRoot, opts RestoreOptions) error {
	mounts, err := opts.Switch(ctx)
	if err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	c.rootMounts = mounts
	old.await()
	return rootfs.Mount(mounts, c.rootfs)
}

// prepareRollback readies CRIU for the node while the container runs.
func (c *Container) prepareRollback(ctx context.Context, pid int, cfg *libConfig, desc *Description, opts RestoreOptions) (*restoring, error) {
	current, err := c.currentMounts(ctx, pid)
	if err != nil {
		return nil, err
	}
	defer current.live.Close()
	fresh, err := freshMounts(ctx, opts.Images, desc.Mounts, current.live, current.keys, c.mountSource(cfg))
	if err != nil {
		return nil, err
	}
	enter, err := openNamespaces(pid)
	if err != nil {
		fresh.Close()
		return nil, err
	}
	plan := namespacePlan{enter: enter}
	if plan.cgroup, err = cgroupNamespaceOf(cfg, pid); err != nil {
		fresh.Close()
		plan.Close()
		return nil, err
	}
	revival, err := c.sessions.Revive(opts.Images)
	if err != nil {
		fresh.Close()
		plan.Close()
		return nil, err
	}
	if cfg.Namespaces.IsPrivate(nsUTS) {
		plan.hostname, plan.domainname = desc.Hostname, desc.Domainname
	}
	if cfg.Namespaces.IsPrivate(nsIPC) {
		// Objects made since are not part of the node: begin with none.
		enter["ipc"].Close()
		delete(enter, "ipc")
		if desc.entered("ipc") {
			plan.create = unix.CLONE_NEWIPC
			plan.sysctls = ipcSysctls(cfg)
		}
	}
	r, err := c.prepareRestore(ctx, restoreSource{
		images:     opts.Images,
		desc:       desc,
		mounts:     fresh,
		namespaces: plan,
		revival:    revival,
		ends:       revival.Ends(),
		resume:     revival.Rollback,
		rollback:   true,
		owned:      true,
	})
	if err != nil {
		fresh.Close()
		plan.Close()
		revival.Close()
		return nil, err
	}
	return r, nil
}

// ipcSysctls picks the settings that belong to an IPC namespace.
func ipcSysctls(cfg *libConfig) map[string]string {
	out := map[string]string{}
	for k, v := range cfg.Sysctl {
		if strings.HasPrefix(k, "kernel.") || strings.HasPrefix(k, "fs.mqueue.") {
			out[k] = v
		}
	}
	return out
}

// currentMounts is what the live container has mounted from outside.
type currentMounts struct {
	live *staging
	keys map[string]string // by mountpoint
}

func (c *Container) currentMounts(ctx context.Context, pid int) (*currentMounts, error) {
	infos, err := readMounts(pid)
	if err != nil {
		return nil, err
	}
	all, err := classify(infos, c.bindDestinations())
	if err != nil {
		return nil, err
	}
	var ext []ExternalMount
	keys := map[string]string{}
	for _, m := range all {
		if m.Kind != mountTmpfs {
			ext = append(ext, m)
			keys[m.Mountpoint] = m.Key
		}
	}
	live, err := cloneMounts(ctx, pid, ext)
	if err != nil {
		return nil, err
	}
	return &currentMounts{live: live, keys: keys}, nil
}

// killTree ends the container's present tree without an exit being published.
// Frozen first, so that no dying process can act on another's death.
func (c *Container) killTree(ctx context.Context, pid int, paused bool) (*swap, error) {
	cg, err := c.cgroup()
	if err != nil {
		return nil, err
	}
	if err := freeze(ctx, cg); err != nil {
		return nil, errors.Join(err, c.thaw(cg, paused))
	}
	s := c.beginSwap()
	// init is pid 1 of its namespace: the kernel ends all others with it.
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		s.cancel()
		return nil, errors.Join(fmt.Errorf("kill init: %w", err), c.thaw(cg, paused))
	}
	if err := c.thaw(cg, false); err != nil {
		log.G(ctx).WithError(err).Warn("thaw of killed container")
	}
	<-s.reaped
	return s, nil
}

// restoreSource is all that a restore needs to know before it can be prepared.
type restoreSource struct {
	images     string
	desc       *Description
	mounts     *staging
	namespaces namespacePlan
	// ends replace what leads to the sessions' shells, and resume goes on with
	// them.
	ends    []terminal.End
	resume  resumeSessions
	revival *terminal.Revival
	// rollback says that time went on since the dump: peers have gone.
	rollback bool
	// owned hands mounts, namespaces and the revival over to the restoring.
	owned bool
}

// restoring is a CRIU process that is ready to restore.
type restoring struct {
	restoreSource
	work   string
	stdio  []*os.File
	fds    []criu.InheritFD
	worker *criu.Worker
	forget func()
	// joined yields once the worker is in the cgroup that freezes the
	// container; nil before that was begun.
	joined chan error
	// resumed is when the restored processes ran.
	resumed time.Time
}

// joinFreezer begins to put the worker into the cgroup that freezes the
// container, which must not be frozen. The kernel lets such a write wait for
// some 10 ms: meanwhile there are other things to do.
func (r *restoring) joinFreezer(cg cgroups.Manager) {
	joined := make(chan error, 1)
	r.joined = joined
	dir, pid := freezerPath(cg), r.worker.Pid()
	go func() { joined <- cgroups.WriteCgroupProc(dir, pid) }()
}

func (r *restoring) Close() {
	if r.worker != nil {
		r.worker.Close()
		r.forget()
	}
	if r.owned {
		r.mounts.Close()
		r.namespaces.Close()
		if r.revival != nil {
			r.revival.Close()
		}
	}
	if r.work != "" {
		os.RemoveAll(r.work)
	}
}

// prepareRestore starts the CRIU process that is to restore: in the right
// namespaces, with the mounts attached that it is to bind, and with the pipes
// of init.
func (c *Container) prepareRestore(ctx context.Context, src restoreSource) (_ *restoring, retErr error) {
	r := &restoring{restoreSource: src}
	owned := r.owned
	r.owned = false // on an error they stay the caller's
	defer func() {
		if retErr != nil {
			r.Close()
		}
		r.owned = owned
	}()
	bin, err := findCRIU(ctx)
	if err != nil {
		return nil, err
	}
	if r.work, err = os.MkdirTemp(c.bundle, "restore-"); err != nil {
		return nil, fmt.Errorf("make work directory: %w", err)
	}
	r.inheritStdio(c.initStdio())
	r.worker, r.forget, err = c.spawn(ctx, bin, criu.SpawnOptions{
		Files: r.stdio,
		Prepare: func() error {
			if err := r.mounts.attach(c.rootfs, bin.Path); err != nil {
				return err
			}
			return r.namespaces.apply()
		},
	})
	if err != nil {
		return nil, err
	}
	cg, err := c.cgroup()
	if err != nil {
		return nil, err
	}
	if err := joinCgroups(cg, r.worker.Pid()); err != nil {
		return nil, err
	}
	return r, nil
}

// inheritStdio offers the container's ends of init's pipes in the place of
// those that the dumped init had.
func (r *restoring) inheritStdio(s *stdio) {
	ends := s.containerEnds()
	fds := make([]int, 0, len(ends))
	for fd := range ends {
		fds = append(fds, fd)
	}
	sort.Ints(fds)
	for _, fd := range fds {
		key, ok := r.desc.Stdio[fd]
		if !ok {
			continue
		}
		r.inherit(key, ends[fd])
	}
	for _, e := range r.ends {
		r.inherit(e.Key, e.File)
	}
}

func (r *restoring) inherit(key string, f *os.File) {
	r.fds = append(r.fds, criu.InheritFD{Key: key, FD: criu.FirstFile + len(r.stdio)})
	r.stdio = append(r.stdio, f)
}

// restoreSwapped brings the container back after its tree has died. It tries
// twice; if that fails, the container's exit is published.
func (c *Container) restoreSwapped(ctx context.Context, s *swap, r *restoring) (resumed time.Time, _ error) {
	err := c.restoreOnce(ctx, r)
	if err == nil {
		return r.resumed, nil
	}
	log.G(ctx).WithError(err).Warn("restore once more")
	if second, serr := c.prepareAgain(ctx, r); serr != nil {
		err = errors.Join(err, serr)
	} else {
		defer second.Close()
		if serr := c.restoreOnce(ctx, second); serr == nil {
			return second.resumed, nil
		}
	}
	keepLog(ctx, r, err)
	s.lost()
	return time.Time{}, fmt.Errorf("container has ended, its nodes are whole: %w: %w", err, errdefs.ErrAborted)
}

// prepareAgain readies a second try from what the first one left: the mounts
// are used up, so all file systems are made anew from the images.
func (c *Container) prepareAgain(ctx context.Context, r *restoring) (*restoring, error) {
	fresh, err := freshMounts(ctx, r.images, r.desc.Mounts, nil, nil, c.mountSource(c.libConfig()))
	if err != nil {
		return nil, err
	}
	src := r.restoreSource
	src.mounts, src.owned = fresh, false
	second, err := c.prepareRestore(ctx, src)
	if err != nil {
		fresh.Close()
		return nil, err
	}
	return second, nil
}

// keepLog saves a failed restore's log beside the images, as the bundle will
// soon be gone: one, the newest. It makes err name it.
func keepLog(ctx context.Context, r *restoring, err error) {
	var failed *criu.Error
	if !errors.As(err, &failed) || failed.Log == "" {
		return
	}
	kept := filepath.Join(r.images, "restore.log")
	b, rerr := os.ReadFile(failed.Log)
	if rerr == nil {
		rerr = os.WriteFile(kept, b, 0o600)
	}
	if rerr != nil {
		log.G(ctx).WithError(rerr).Warn("keep restore log")
		return
	}
	failed.Log = kept
}

func (c *Container) restoreOnce(ctx context.Context, r *restoring) error {
	cg, err := c.cgroup()
	if err != nil {
		return err
	}
	pid, masters, err := c.runRestore(ctx, cg, r)
	if err != nil {
		return err
	}
	return c.adoptRestored(ctx, pid, masters, &r.restoreSource)
}

// runRestore has the prepared CRIU process restore the tree.
func (c *Container) runRestore(ctx context.Context, cg cgroups.Manager, r *restoring) (int, []*os.File, error) {
	if r.joined == nil {
		r.joinFreezer(cg)
	}
	if err := <-r.joined; err != nil {
		return 0, nil, fmt.Errorf("join cgroup: %w", err)
	}
	if err := attachRoot(r.worker.Pid(), c.rootfs); err != nil {
		return 0, nil, err
	}
	lock := criu.NetworkLockSkip
	closePeers := r.rollback && len(r.desc.Peers) > 0
	if len(r.desc.Peers) > 0 && !closePeers {
		lock = criu.NetworkLockNftables
	}
	res, err := r.worker.Restore(ctx, criu.RestoreOptions{
		Images:      r.images,
		Work:        r.work,
		Root:        workerRoot,
		External:    r.mounts.criuExternalRestore(),
		InheritFDs:  r.fds,
		NetworkLock: lock,
		TCPClose:    closePeers,
	})
	if err != nil {
		return 0, nil, err
	}
	r.resumed = time.Now()
	return res.Pid, res.Masters, nil
}

// joinCgroups puts pid into each cgroup of the container but the one that
// freezes it: what it forks is born there. The first of several writes waits
// for the kernel about as long as a small restore takes, so it comes early.
func joinCgroups(cg cgroups.Manager, pid int) error {
	freezer := freezerPath(cg)
	for _, dir := range cg.GetPaths() {
		if dir == freezer {
			continue
		}
		if err := cgroups.WriteCgroupProc(dir, pid); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// attachRoot shows the mount at root to the restoring CRIU process pid, in its
// private mount namespace.
func attachRoot(pid int, root string) error {
	tree, _, err := openTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE)
	if err != nil {
		return fmt.Errorf("clone root: %w", err)
	}
	defer tree.Close()
	mnt, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return fmt.Errorf("open mount namespace of criu: %w", err)
	}
	defer mnt.Close()
	return onThread(func() error {
		if err := enterMountNamespace(mnt); err != nil {
			return err
		}
		err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, workerRoot, unix.MOVE_MOUNT_F_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("attach root: %w", os.NewSyscallError("move_mount", err))
		}
		return nil
	})
}

// mountSource finds on the host what a new container's mounts are bound from.
func (c *Container) mountSource(cfg *libConfig) sourceFunc {
	return func(m ExternalMount) (string, error) {
		if m.Kind == mountCgroup {
			return c.cgroupSource(m)
		}
		for i := len(cfg.Mounts) - 1; i >= 0; i-- {
			b := cfg.Mounts[i]
			if b.Device != "bind" {
				continue
			}
			if m.Mountpoint == b.Destination {
				return b.Source, nil
			}
			if rel, ok := strings.CutPrefix(m.Mountpoint, b.Destination+"/"); ok {
				return filepath.Join(b.Source, rel), nil
			}
		}
		if m.FSType == "devtmpfs" {
			return filepath.Join("/dev", m.Root), nil
		}
		return "", fmt.Errorf("mount %q of the node has no source in this container's configuration: %w", m.Mountpoint, errdefs.ErrFailedPrecondition)
	}
}

// cgroupSource finds the container's own cgroup in the hierarchy of m.
func (c *Container) cgroupSource(m ExternalMount) (string, error) {
	cg, err := c.cgroup()
	if err != nil {
		return "", err
	}
	if m.FSType == "cgroup2" {
		if p := cg.Path(""); p != "" {
			return p, nil
		}
	}
	for _, o := range strings.Split(m.Options, ",") {
		if p := cg.Path(o); p != "" {
			return p, nil
		}
	}
	return "", fmt.Errorf("cgroup mount %q (%s) has no counterpart on this host: %w", m.Mountpoint, m.Options, errdefs.ErrFailedPrecondition)
}
