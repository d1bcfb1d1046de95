package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/containerd/errdefs"
)

// DefaultOutputLimit is how many bytes of one step's output are kept.
const DefaultOutputLimit = 16 << 20

// minOutputLimit leaves room for a head and a tail that say something.
const minOutputLimit = 4 << 10

// Spool keeps the output of one step in a file: all of it up to a limit, of
// what is longer the first half of the limit and the last. Offsets count the
// bytes as they came, kept or not.
//
// The file's first half is the head; the second half is written round and
// round.
type Spool struct {
	mu    sync.Mutex
	file  *os.File
	limit int64
	total int64
	// changed is closed, and made anew, whenever bytes are added.
	changed chan struct{}
	ended   bool // nothing more will come
	err     error
}

// newSpool makes a spool in a new file, of which others can see nothing.
func newSpool(path string, limit int64) (*Spool, error) {
	if limit == 0 {
		limit = DefaultOutputLimit
	}
	if limit < minOutputLimit {
		return nil, fmt.Errorf("output limit of %d bytes: at least %d are needed: %w", limit, minOutputLimit, errdefs.ErrInvalidArgument)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make spool: %w", err)
	}
	return &Spool{file: f, limit: limit &^ 1, changed: make(chan struct{})}, nil
}

func (s *Spool) half() int64 { return s.limit / 2 }

// Write adds output. It never fails and takes all: a full disk must not stop
// the program that prints. What could not be kept makes later reads fail.
func (s *Spool) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(p)
	for len(p) > 0 && s.err == nil {
		at, room := s.place(s.total)
		part := p[:min(int64(len(p)), room)]
		if _, err := s.file.WriteAt(part, at); err != nil {
			s.err = fmt.Errorf("keep output: %w", err)
			break
		}
		s.total += int64(len(part))
		p = p[len(part):]
	}
	s.total += int64(len(p))
	if !s.ended {
		close(s.changed)
		s.changed = make(chan struct{})
	}
	return n, nil
}

// place returns where the byte at an offset lies in the file, and how many
// bytes follow it there in one piece.
func (s *Spool) place(offset int64) (at, room int64) {
	if offset < s.half() {
		return offset, s.half() - offset
	}
	round := (offset - s.half()) % s.half()
	return s.half() + round, s.half() - round
}

// Size returns the number of bytes that came, and how many of them, between the
// head and the tail, are not kept.
func (s *Spool) Size() (total, dropped int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total, s.dropped()
}

func (s *Spool) dropped() int64 { return max(0, s.total-s.limit) }

// ReadAt reads kept bytes from an offset on. If those at the offset are not
// kept it goes on behind the gap: from tells where the bytes are from. At the
// present end it returns io.EOF.
func (s *Spool) ReadAt(p []byte, offset int64) (n int, from int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, offset, s.err
	}
	if d := s.dropped(); d > 0 && offset >= s.half() {
		offset = max(offset, s.half()+d)
	}
	for n < len(p) && offset+int64(n) < s.total {
		o := offset + int64(n)
		if d := s.dropped(); d > 0 && o == s.half() && n > 0 {
			break // the gap
		}
		at, room := s.place(o)
		want := min(int64(len(p)-n), room, s.total-o)
		m, err := s.file.ReadAt(p[n:n+int(want)], at)
		n += m
		if err != nil {
			return n, offset, fmt.Errorf("read kept output: %w", err)
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, offset, io.EOF
	}
	return n, offset, nil
}

// grown returns a channel that is closed when there is more than total.
func (s *Spool) grown(total int64) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.total > total {
		c := make(chan struct{})
		close(c)
		return c
	}
	return s.changed
}

// end says that nothing more will come.
func (s *Spool) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		close(s.changed)
	}
}

// Ended says whether nothing more will come.
func (s *Spool) Ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// Wait waits until there is more output than total, or ctx is done.
func (s *Spool) Wait(ctx context.Context, total int64) {
	for !s.Ended() {
		grown := s.grown(total)
		select {
		case <-grown:
			if n, _ := s.Size(); n > total {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// copyTo writes all that is kept, for a spool that is to be continued elsewhere.
func (s *Spool) copyTo(dst io.Writer) error {
	buf := make([]byte, 64<<10)
	var offset int64
	for {
		n, from, err := s.ReadAt(buf, offset)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return err
		}
		offset = from + int64(n)
	}
}

// continueSpool makes a spool that goes on where the one of total bytes was
// whose kept bytes are read from src.
func continueSpool(path string, limit, total int64, src io.Reader) (_ *Spool, retErr error) {
	s, err := newSpool(path, limit)
	if err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, s.remove())
		}
	}()
	head := min(total, s.half())
	var n int64
	n, err = io.Copy(s, io.LimitReader(src, head))
	if err == nil && n == head {
		s.total += max(0, total-s.limit)
		_, err = io.Copy(s, src)
	}
	if err != nil {
		return nil, fmt.Errorf("copy kept output: %w", err)
	}
	if s.total != total {
		return nil, fmt.Errorf("kept output is cut short: it ends at %d of %d bytes: %w", s.total, total, errdefs.ErrDataLoss)
	}
	return s, nil
}

// unlink removes the spool's file, and leaves what is in it to who still has
// the spool: the file is closed when nobody has.
func (s *Spool) unlink() error { return os.Remove(s.file.Name()) }

// remove closes the spool and removes its file.
func (s *Spool) remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.file.Close(), os.Remove(s.file.Name()))
}
