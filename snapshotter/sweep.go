package snapshotter

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/log"
)

// sweep moves to the trash what no record names: what a crash left half made
// or half removed.
func (s *Snapshotter) sweep(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	layers, others, err := s.named(ctx)
	if err != nil {
		return fmt.Errorf("list layers: %w", err)
	}
	s.unswept = false
	for dir, keep := range map[string]map[string]bool{s.dirs.layers(): layers, s.dirs.others(): others} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("look for left over directories: %w", err)
		}
		for _, e := range entries {
			if keep[e.Name()] {
				continue
			}
			path := filepath.Join(dir, e.Name())
			if err := s.trash.take(path); err != nil {
				s.unswept = true
				log.G(ctx).WithError(err).WithField("path", path).Warn("move left over directory to trash")
				continue
			}
			log.G(ctx).WithField("path", path).Debug("removed left over directory")
		}
	}
	return nil
}

// named returns the names that may stand in the directory of the layers, and
// in that of what lies beside them.
func (s *Snapshotter) named(ctx context.Context) (layers, others map[string]bool, err error) {
	layers, others = map[string]bool{}, map[string]bool{}
	err = s.store.view(ctx, func(_ context.Context, t *tx) error {
		return t.eachLayer(func(id uint64, r record) {
			layers[s.dirs.name(id)] = true
			others[s.dirs.name(id)] = !r.removed
		})
	})
	return layers, others, err
}
