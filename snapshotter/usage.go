package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// measure sums up directories. It is the only walk over the files of layers.
type measure func(ctx context.Context, roots ...string) (snapshots.Usage, error)

// diskUsage counts every inode once. A running container deletes files while
// it is measured: what is gone does not count.
func diskUsage(ctx context.Context, roots ...string) (snapshots.Usage, error) {
	type inode struct{ dev, ino uint64 }
	var (
		size int64
		seen = map[inode]struct{}{}
	)
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil {
				err = ctx.Err()
			}
			var fi fs.FileInfo
			if err == nil {
				fi, err = d.Info()
			}
			if err != nil {
				if path != root && errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				return err
			}
			st, ok := fi.Sys().(*syscall.Stat_t)
			if !ok {
				return fmt.Errorf("stat %q gave no inode: %w", path, errdefs.ErrInternal)
			}
			i := inode{st.Dev, st.Ino}
			if _, ok := seen[i]; !ok {
				seen[i] = struct{}{}
				size += st.Blocks * 512
			}
			return nil
		})
		if err != nil {
			return snapshots.Usage{}, err
		}
	}
	return snapshots.Usage{Inodes: int64(len(seen)), Size: size}, nil
}

// Usage returns what the snapshot's layer and its process images take. For a
// committed snapshot it is measured when first asked for, then kept. A view
// has nothing of its own.
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	var (
		id   uint64
		kind snapshots.Kind
		rec  record
	)
	err := s.store.view(ctx, func(ctx context.Context, t *tx) error {
		var info snapshots.Info
		var err error
		if id, info, err = t.info(ctx, key); err != nil {
			return err
		}
		kind = info.Kind
		rec, err = t.layer(id)
		return err
	})
	if err != nil {
		return snapshots.Usage{}, fmt.Errorf("get usage of snapshot %q: %w", key, err)
	}
	if kind == snapshots.KindView {
		return snapshots.Usage{}, nil
	}
	if rec.measured {
		return rec.usage, nil
	}
	usage, err := s.measureLayer(ctx, id)
	if err != nil {
		// It may have been removed meanwhile, which explains it better.
		if _, serr := s.Stat(ctx, key); serr != nil {
			err = serr
		}
		return snapshots.Usage{}, fmt.Errorf("get usage of snapshot %q: %w", key, err)
	}
	if kind == snapshots.KindCommitted {
		err = s.keepUsage(ctx, id, usage)
	}
	return usage, err
}

func (s *Snapshotter) measureLayer(ctx context.Context, id uint64) (snapshots.Usage, error) {
	roots := []string{s.dirs.upper(id)}
	images := s.dirs.images(id)
	if _, err := os.Lstat(images); err == nil {
		roots = append(roots, images)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return snapshots.Usage{}, err
	}
	return s.measure(ctx, roots...)
}

func (s *Snapshotter) keepUsage(ctx context.Context, id uint64, usage snapshots.Usage) error {
	return s.store.update(ctx, func(_ context.Context, t *tx) error {
		if t.layers.Get(layerKey(id)) == nil {
			return nil // removed meanwhile
		}
		r, err := t.layer(id)
		if err != nil {
			return err
		}
		r.usage, r.measured = usage, true
		return t.putLayer(id, r)
	})
}
