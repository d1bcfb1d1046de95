package terminal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"testing"
)

// TestSpool adds random amounts of output and reads it by random pieces, as it
// grows and again after it was continued in another file.
func TestSpool(t *testing.T) {
	const limit = minOutputLimit
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 2))
		s, err := newSpool(filepath.Join(t.TempDir(), "a"), limit)
		if err != nil {
			t.Fatal(err)
		}
		var all []byte
		for range 30 {
			p := make([]byte, r.IntN(limit/4*int(seed%4+1)))
			for i := range p {
				p[i] = byte(r.Uint32())
			}
			all = append(all, p...)
			if n, err := s.Write(p); n != len(p) || err != nil {
				t.Fatal(n, err)
			}
			if r.IntN(5) == 0 {
				s = moved(t, s, limit)
			}
			checkSpool(t, s, all, limit, r)
		}
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}
}

func moved(t *testing.T, s *Spool, limit int64) *Spool {
	t.Helper()
	var b bytes.Buffer
	if err := s.copyTo(&b); err != nil {
		t.Fatal(err)
	}
	total, _ := s.Size()
	next, err := continueSpool(filepath.Join(t.TempDir(), "b"), limit, total, &b)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.remove(); err != nil {
		t.Error(err)
	}
	return next
}

func checkSpool(t *testing.T, s *Spool, all []byte, limit int, r *rand.Rand) {
	t.Helper()
	total, dropped := s.Size()
	if total != int64(len(all)) || dropped != int64(max(0, len(all)-limit)) {
		t.Fatalf("size is %d, %d dropped, of %d", total, dropped, len(all))
	}
	var offset int64
	for {
		p := make([]byte, 1+r.IntN(limit))
		n, from, err := s.ReadAt(p, offset)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if from != offset && (offset != int64(limit/2) || from != offset+dropped) {
			t.Fatalf("read at %d came from %d, %d are dropped", offset, from, dropped)
		}
		if !bytes.Equal(p[:n], all[from:from+int64(n)]) {
			t.Fatalf("other bytes at %d", from)
		}
		offset = from + int64(n)
	}
	if offset != total {
		t.Fatalf("reading ended at %d of %d", offset, total)
	}
}

func TestSpoolRefusesSmallLimit(t *testing.T) {
	if _, err := newSpool(filepath.Join(t.TempDir(), "a"), minOutputLimit-1); err == nil {
		t.Error("no error")
	}
	if _, err := continueSpool(filepath.Join(t.TempDir(), "a"), 0, 10, bytes.NewReader([]byte("short"))); err == nil {
		t.Error("continued from less than was kept")
	}
}

// TestSpoolGrown waits for more output.
func TestSpoolGrown(t *testing.T) {
	s, err := newSpool(filepath.Join(t.TempDir(), "a"), 0)
	if err != nil {
		t.Fatal(err)
	}
	more := s.grown(0)
	select {
	case <-more:
		t.Fatal("nothing came yet")
	default:
	}
	fmt.Fprint(s, "x")
	<-more
	<-s.grown(0)
}
