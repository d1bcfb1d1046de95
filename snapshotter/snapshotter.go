// Package snapshotter is a containerd snapshotter for overlay mounts whose
// committed snapshots are the branch points of running containers.
//
// It differs from containerd's own overlay snapshotter in these ways.
//
//   - Flat parents. A snapshot can go on from a node (layer.LabelFrom) while
//     its visible parent stays the image's: the layers between are kept in a
//     private lineage. What diffs a container against its parent, such as
//     "nerdctl commit", therefore sees all that the container ever wrote.
//   - Commit and Remove take the same time whatever was written: Commit only
//     renames a record, Remove also a directory. A removed node's layer stays
//     as long as others stand on it.
//   - The process images of a checkpoint lie beside the layer and count as a
//     part of its usage.
//   - Layers that nothing was written to are left out of mounts, and names are
//     short, so that a mount takes up to 500 layers. Every layer makes the first
//     lookup of a name slower, though: stay below some hundred where you can.
//   - Directories of lower layers can be renamed (redirect_dir).
//
// On disk, below the root:
//
//	layout          version of this layout
//	metadata.db     names, kinds, visible parents, labels; private lineage
//	l/<id>          the layer of a snapshot (upperdir)
//	m/<id>/work     its workdir
//	m/<id>/criu     its process images, written by the shim before Commit
//	trash/          directories to be deleted
//
// A transaction on metadata.db is what makes a change happen. Directories are
// made before it ends and go to the trash after it ended; whatever a crash
// leaves between these is not named by any record, and goes at the next start.
//
// Ids of users are not mapped: snapshots that ask for it are refused. Content
// is not shared between containerd's namespaces, also not by
// "containerd.io/snapshot.ref".
package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/statefork/statefork/layer"
)

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// Config says how to open a snapshotter.
type Config struct {
	// Root is the directory that everything is kept below.
	Root string
	// LockTimeout is how long to wait for another process to leave the root;
	// 0 means a few seconds.
	LockTimeout time.Duration
}

const defaultLockTimeout = 5 * time.Second

// Snapshotter implements containerd's interface of that name.
type Snapshotter struct {
	dirs    dirs
	store   *store
	trash   *trash
	measure measure
	known   known
	// options are given to overlay mounts, roOptions to readonly ones.
	options, roOptions []string

	stop func() // ends the worker
	done chan struct{}

	// mu is held from making directories until their record is committed or
	// they are gone again. Without it the next snapshot could be given the
	// same id in between, and sweep could take them for left over.
	mu sync.Mutex
	// unswept: directories that no record names could not be moved. Protected
	// by mu.
	unswept bool
}

// New opens the snapshotter in cfg.Root, which it makes if need be, and clears
// up after a crash. It fails if another process has the root open.
func New(ctx context.Context, cfg Config) (_ *Snapshotter, retErr error) {
	if err := checkRoot(cfg.Root); err != nil {
		return nil, err
	}
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = defaultLockTimeout
	}
	d := dirs{root: filepath.Clean(cfg.Root)}
	if err := d.init(); err != nil {
		return nil, fmt.Errorf("make root: %w", err)
	}
	if err := d.checkFilesystem(); err != nil {
		return nil, err
	}
	st, err := openStore(ctx, d.metadata(), cfg.LockTimeout)
	if err != nil {
		return nil, err
	}
	s := &Snapshotter{dirs: d, store: st, trash: newTrash(d.trash()), measure: diskUsage, done: make(chan struct{})}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, st.close())
		}
	}()
	if err := d.checkLayout(); err != nil {
		return nil, fmt.Errorf("check layout: %w", err)
	}
	if err := s.setOptions(); err != nil {
		return nil, err
	}
	if err := s.sweep(ctx); err != nil {
		return nil, err
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	go func() {
		defer close(s.done)
		s.trash.work(work)
	}()
	s.trash.poke()
	return s, nil
}

// setOptions chooses overlay's options. index=on would refuse an upperdir
// that another mount still has, as the one of a stopped container may.
func (s *Snapshotter) setOptions() error {
	user, err := overlayutils.NeedsUserXAttr(s.dirs.root)
	if err != nil {
		return fmt.Errorf("find out whether overlay needs userxattr: %w", err)
	}
	if user {
		// the kernel follows no redirects together with this
		s.options = []string{"index=off", "userxattr"}
		s.roOptions = s.options
		return nil
	}
	s.options = []string{"index=off", "redirect_dir=on"}
	s.roOptions = []string{"index=off", "redirect_dir=follow"}
	return nil
}

// Stat returns what is known of a snapshot.
func (s *Snapshotter) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = s.store.view(ctx, func(ctx context.Context, t *tx) error {
		_, info, err = t.info(ctx, key)
		return err
	})
	if err != nil {
		return snapshots.Info{}, fmt.Errorf("stat snapshot %q: %w", key, err)
	}
	s.known.add(info)
	return info, nil
}

// Update changes labels, but not those that say where a snapshot stands.
func (s *Snapshotter) Update(ctx context.Context, info snapshots.Info, fieldpaths ...string) (updated snapshots.Info, err error) {
	err = s.store.update(ctx, func(ctx context.Context, t *tx) error {
		if err := t.takeBack(ctx, info.Name); err != nil {
			return err
		}
		_, before, _, err := storage.GetInfo(ctx, info.Name)
		if err != nil {
			return err
		}
		if updated, err = storage.UpdateInfo(ctx, info, fieldpaths...); err != nil {
			return err
		}
		return sameLineage(before, updated)
	})
	if err != nil {
		return snapshots.Info{}, fmt.Errorf("update snapshot %q: %w", info.Name, err)
	}
	s.known.add(updated)
	return updated, nil
}

// Walk calls fn for every snapshot that matches the filters. It does so after
// its transaction: a transaction that fn starts could otherwise wait for a
// writer that waits for this one.
func (s *Snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	var infos []snapshots.Info
	err := s.store.view(ctx, func(ctx context.Context, _ *tx) error {
		err := storage.WalkInfo(ctx, func(_ context.Context, info snapshots.Info) error {
			infos = append(infos, info)
			return nil
		}, filters...)
		if errdefs.IsNotFound(err) {
			return nil // nothing was ever stored
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("list snapshots: %w", err)
	}
	for _, info := range infos {
		if err := fn(ctx, info); err != nil {
			return err
		}
	}
	return nil
}

// Prepare makes an active snapshot and returns its mounts. The label
// layer.LabelFrom makes it go on from a node.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	m, err := s.create(ctx, snapshots.KindActive, key, parent, opts)
	if err != nil {
		return nil, fmt.Errorf("prepare snapshot %q: %w", key, err)
	}
	return m, nil
}

// View makes a readonly snapshot, of a node if layer.LabelFrom is given.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	m, err := s.create(ctx, snapshots.KindView, key, parent, opts)
	if err != nil {
		return nil, fmt.Errorf("view snapshot %q: %w", key, err)
	}
	return m, nil
}

func (s *Snapshotter) create(ctx context.Context, kind snapshots.Kind, key, parent string, opts []snapshots.Opt) (mounts []mount.Mount, retErr error) {
	base, err := apply(opts)
	if err != nil {
		return nil, err
	}
	for _, l := range []string{snapshots.LabelSnapshotUIDMapping, snapshots.LabelSnapshotGIDMapping} {
		if base.Labels[l] != "" {
			return nil, fmt.Errorf("label %q: user ids cannot be mapped: %w", l, errdefs.ErrNotImplemented)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var made uint64
	defer func() {
		if retErr != nil && made != 0 {
			s.discardLocked(ctx, dropped{id: made})
		}
	}()
	err = s.store.update(ctx, func(ctx context.Context, t *tx) error {
		snap, err := storage.CreateSnapshot(ctx, kind, key, parent, opts...)
		if err != nil {
			return err
		}
		id, err := parseID(snap.ID)
		if err != nil {
			return err
		}
		if len(snap.ParentIDs) > 0 {
			if err := t.confirmSnapshot(snap.ParentIDs[0]); err != nil {
				return err
			}
		}
		r, err := t.descend(ctx, id, base.Labels[layer.LabelFrom], parent)
		if err != nil {
			return err
		}
		below, err := t.lowers(r, snap.ParentIDs)
		if err != nil {
			return err
		}
		if mounts, err = s.stack(kind, id, below).mounts(); err != nil {
			return err
		}
		made = id
		return s.dirs.make(id, kind, below)
	})
	return mounts, err
}

// Mounts returns the mounts of an active snapshot or a view.
func (s *Snapshotter) Mounts(ctx context.Context, key string) (mounts []mount.Mount, err error) {
	err = s.store.view(ctx, func(ctx context.Context, t *tx) error {
		mounts, err = s.mountsOf(ctx, t, key)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("get mounts of snapshot %q: %w", key, err)
	}
	return mounts, nil
}

func (s *Snapshotter) mountsOf(ctx context.Context, t *tx, key string) ([]mount.Mount, error) {
	snap, err := t.snapshot(ctx, key)
	if err != nil {
		return nil, err
	}
	id, below, err := t.below(snap)
	if err != nil {
		return nil, err
	}
	return s.stack(snap.Kind, id, below).mounts()
}

func (s *Snapshotter) stack(kind snapshots.Kind, id uint64, below []lower) stack {
	st := stack{
		kind:      kind,
		upper:     s.dirs.upper(id),
		work:      s.dirs.work(id),
		options:   s.options,
		roOptions: s.roOptions,
	}
	for _, l := range below {
		st.lowers = append(st.lowers, lowerdir{path: s.dirs.upper(l.id), empty: l.empty})
	}
	return st
}

// Commit seals an active snapshot under a name; its directories stay as they
// are. The label layer.LabelNode makes it a node.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	if err := s.commit(ctx, name, key, opts); err != nil {
		return fmt.Errorf("commit snapshot %q: %w", key, err)
	}
	return nil
}

func (s *Snapshotter) commit(ctx context.Context, name, key string, opts []snapshots.Opt) error {
	base, err := apply(opts)
	if err != nil {
		return err
	}
	node := base.Labels[layer.LabelNode]
	return s.store.update(ctx, func(ctx context.Context, t *tx) error {
		if err := t.takeBack(ctx, key); err != nil {
			return err
		}
		snap, err := storage.GetSnapshot(ctx, key)
		if err != nil {
			return err
		}
		_, before, _, err := storage.GetInfo(ctx, key)
		if err != nil {
			return err
		}
		id, below, err := t.below(snap)
		if err != nil {
			return err
		}
		if base.Parent != "" && len(snap.ParentIDs) == 0 && len(below) > 0 {
			return fmt.Errorf("snapshot goes on from a node, its parent %q cannot be changed: %w", base.Parent, errdefs.ErrInvalidArgument)
		}
		empty, err := isEmpty(s.dirs.upper(id))
		if err != nil {
			return err
		}
		if node != "" {
			if err := t.checkNodeID(node); err != nil {
				return err
			}
			// Better now than when something is to go on from it.
			child := append([]lower{{id: id, empty: empty}}, below...)
			if _, err := s.stack(snapshots.KindActive, id, child).mounts(); err != nil {
				return err
			}
		}
		if _, err := storage.CommitActive(ctx, key, name, snapshots.Usage{}, opts...); err != nil {
			return err
		}
		if err := t.seal(id, name, node, empty); err != nil {
			return err
		}
		if node != "" {
			if err := t.rememberCommit(id, node, before); err != nil {
				return err
			}
		}
		// This one would be taken back for certain.
		return ctx.Err()
	})
}

// Remove removes a snapshot without visible children. Its process images go;
// its layer goes when nothing stands on it. A node that containerd has not shown
// to know of yet becomes the active snapshot again that it was.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	var drop []dropped
	err := s.store.update(ctx, func(ctx context.Context, t *tx) error {
		if err := t.takeBack(ctx, key); err != nil {
			return err
		}
		if !s.known.has(key) {
			if back, err := t.takeBackNode(ctx, key); back || err != nil {
				return err
			}
		}
		sid, _, err := storage.Remove(ctx, key)
		if err != nil {
			return err
		}
		id, err := parseID(sid)
		if err != nil {
			return err
		}
		drop, err = t.release(id)
		return err
	})
	if err != nil {
		return fmt.Errorf("remove snapshot %q: %w", key, err)
	}
	s.known.drop(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range drop {
		s.discardLocked(ctx, d)
	}
	return nil
}

// discardLocked moves directories that no record needs to the trash. It cannot
// fail the call that led to it, since the record is gone.
//
// Preconditions: s.mu is held.
func (s *Snapshotter) discardLocked(ctx context.Context, d dropped) {
	paths := []string{s.dirs.other(d.id)}
	if !d.keepData {
		paths = append(paths, s.dirs.upper(d.id))
	}
	for _, p := range paths {
		if err := s.trash.take(p); err != nil {
			s.unswept = true
			log.G(ctx).WithError(err).WithField("path", p).Warn("move removed snapshot to trash")
		}
	}
}

// Cleanup deletes what was removed. containerd calls it after a garbage
// collection.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	s.mu.Lock()
	unswept := s.unswept
	s.mu.Unlock()
	if unswept {
		if err := s.sweep(ctx); err != nil {
			return err
		}
	}
	return s.trash.empty(ctx)
}

// Close ends the worker and closes the metadata. What is in the trash is left
// for the next start.
func (s *Snapshotter) Close() error {
	s.stop()
	<-s.done
	return s.store.close()
}

func apply(opts []snapshots.Opt) (snapshots.Info, error) {
	var base snapshots.Info
	for _, opt := range opts {
		if err := opt(&base); err != nil {
			return snapshots.Info{}, err
		}
	}
	return base, nil
}
