package criu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/stats"
	"github.com/containerd/log"
)

// DumpStats are CRIU's own measurements of a dump.
type DumpStats struct {
	// FreezingTime is until all tasks stood still, FrozenTime from then on.
	FreezingTime, FrozenTime time.Duration
	// MemdumpTime is spent on taking pages, MemwriteTime on writing them.
	MemdumpTime, MemwriteTime time.Duration
	// PagesScanned and PagesWritten count private pages, SharedPagesWritten
	// those of shared memory.
	PagesScanned, PagesWritten, SharedPagesWritten uint64
}

// RestoreStats are CRIU's own measurements of a restore.
type RestoreStats struct {
	// ForkingTime is until all tasks exist, RestoreTime the whole.
	ForkingTime, RestoreTime time.Duration
	// PagesRestored counts private pages.
	PagesRestored uint64
}

// readDumpStats reads the statistics of a dump. They do not decide whether it
// was one, so missing ones are zero.
func readDumpStats(ctx context.Context, dir string) *DumpStats {
	entry, err := readStats(filepath.Join(dir, crit.StatsDump))
	if err != nil {
		log.G(ctx).WithError(err).Warn("dump has no statistics")
		return &DumpStats{}
	}
	d := entry.GetDump()
	return &DumpStats{
		FreezingTime:       microseconds(d.GetFreezingTime()),
		FrozenTime:         microseconds(d.GetFrozenTime()),
		MemdumpTime:        microseconds(d.GetMemdumpTime()),
		MemwriteTime:       microseconds(d.GetMemwriteTime()),
		PagesScanned:       d.GetPagesScanned(),
		PagesWritten:       d.GetPagesWritten(),
		SharedPagesWritten: d.GetShpagesWritten(),
	}
}

// readRestoreStats reads the statistics of a restore, like readDumpStats.
func readRestoreStats(ctx context.Context, dir string) RestoreStats {
	entry, err := readStats(filepath.Join(dir, crit.StatsRestore))
	if err != nil {
		log.G(ctx).WithError(err).Warn("restore has no statistics")
		return RestoreStats{}
	}
	r := entry.GetRestore()
	return RestoreStats{
		ForkingTime:   microseconds(r.GetForkingTime()),
		RestoreTime:   microseconds(r.GetRestoreTime()),
		PagesRestored: r.GetPagesRestored(),
	}
}

func microseconds(n uint32) time.Duration {
	return time.Duration(n) * time.Microsecond
}

// readStats reads a statistics image, which has one entry. (The package stats of
// go-criu cannot be linked beside crit: both register the same messages.)
func readStats(path string) (*stats.StatsEntry, error) {
	img, err := decode(path, &stats.StatsEntry{})
	if err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	if len(img.Entries) == 1 {
		if entry, ok := img.Entries[0].Message.(*stats.StatsEntry); ok {
			return entry, nil
		}
	}
	return nil, fmt.Errorf("read statistics %q: %w", path, errors.New("not one entry"))
}
