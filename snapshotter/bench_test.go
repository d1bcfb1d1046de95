package snapshotter

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// BenchmarkCheckpoint measures what a checkpoint and its removal ask of the
// snapshotter, by the depth of the lineage and the number of files written.
func BenchmarkCheckpoint(b *testing.B) {
	for _, depth := range []int{1, 300} {
		for _, files := range []int{1, 1000} {
			b.Run(fmt.Sprintf("depth=%d/files=%d", depth, files), func(b *testing.B) {
				benchmarkCheckpoint(b, depth, files)
			})
		}
	}
}

func benchmarkCheckpoint(b *testing.B, depth, files int) {
	ctx := context.Background()
	s, err := New(ctx, Config{Root: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	fail := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	m, err := s.Prepare(ctx, "unpack", "")
	fail(err)
	fail(os.WriteFile(filepath.Join(m[0].Source, "f"), nil, 0o600))
	fail(s.Commit(ctx, "image", "unpack"))
	m, err = s.Prepare(ctx, "head", "image")
	fail(err)
	for n := 1; n <= depth; n++ {
		fail(os.WriteFile(filepath.Join(upperOf(m), "f"), nil, 0o600))
		fail(s.Commit(ctx, fmt.Sprint("node-", n), "head", asNode(nodeID(n))))
		m, err = s.Prepare(ctx, "head", "image", from(nodeID(n)))
		fail(err)
	}
	for n := depth + 1; b.Loop(); n++ {
		b.StopTimer()
		for i := range files {
			fail(os.WriteFile(filepath.Join(upperOf(m), fmt.Sprint(i)), nil, 0o600))
		}
		b.StartTimer()
		fail(s.Commit(ctx, "node", "head", asNode(nodeID(n))))
		_, err = s.Prepare(ctx, "head", "image", from(nodeID(n)))
		fail(err)
		// and back, so that the depth stays
		fail(s.Remove(ctx, "head"))
		fail(s.Remove(ctx, "node"))
		m, err = s.Prepare(ctx, "head", "image", from(nodeID(depth)))
		fail(err)
	}
}
