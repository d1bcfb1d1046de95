package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/log"
)

// trash takes directories by a rename and deletes them later, so that removal
// takes the same time whatever was in them.
type trash struct {
	dir  string
	last atomic.Int64 // the last name given
	wake chan struct{}

	mu sync.Mutex // held while the trash is emptied
}

func newTrash(dir string) *trash {
	t := &trash{dir: dir, wake: make(chan struct{}, 1)}
	// Later than any name that an earlier run left behind.
	t.last.Store(time.Now().UnixNano())
	return t
}

// take moves a directory into the trash. One that is not there is fine.
func (t *trash) take(path string) error {
	for {
		name := strconv.FormatInt(t.last.Add(1), 36)
		err := os.Rename(path, filepath.Join(t.dir, name))
		if errors.Is(err, fs.ErrExist) {
			continue // the clock went back between two runs
		}
		if err == nil {
			t.poke()
		} else if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return err
	}
}

// poke tells the worker that there is something to do.
func (t *trash) poke() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// work empties the trash whenever something came in, until ctx ends.
func (t *trash) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		}
		if err := t.empty(ctx); err != nil && ctx.Err() == nil {
			log.G(ctx).WithError(err).WithField("path", t.dir).Warn("empty trash")
		}
	}
}

// empty deletes what is in the trash. What cannot be deleted is reported and
// stays for the next time.
func (t *trash) empty(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := os.OpenRoot(t.dir)
	if err != nil {
		return fmt.Errorf("open trash: %w", err)
	}
	defer r.Close()
	if err := removeEntries(ctx, r); err != nil {
		return fmt.Errorf("empty trash %q: %w", t.dir, err)
	}
	return nil
}

// removeEntries deletes everything in a directory. Unlike os.RemoveAll it ends
// with its context, and it never leaves the directory by a symbolic link: a
// container whose snapshot was removed under it may still write there.
func removeEntries(ctx context.Context, r *os.Root) error {
	d, err := r.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	var failed error
	for {
		names, err := d.Readdirnames(512)
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := removeEntry(ctx, r, name); err != nil && failed == nil {
				failed = err
			}
		}
		if errors.Is(err, io.EOF) {
			return failed
		}
		if err != nil {
			return err
		}
	}
}

func removeEntry(ctx context.Context, r *os.Root, name string) error {
	err := r.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// a directory with entries also counts as one that exists
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	sub, err := r.OpenRoot(name)
	if err != nil {
		return err
	}
	err = removeEntries(ctx, sub)
	sub.Close()
	if err != nil {
		return err
	}
	return r.Remove(name)
}
