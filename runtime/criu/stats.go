package criu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/stats"
	"github.com/containerd/log"
	"google.golang.org/protobuf/proto"
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
	entry, err := readStats(filepath.Join(dir, stats.StatsDump))
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
	entry, err := readStats(filepath.Join(dir, stats.StatsRestore))
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

// readStats reads a statistics image: two magic numbers, a size, one message.
func readStats(path string) (*stats.StatsEntry, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	if len(data) < stats.PayloadOffset ||
		binary.LittleEndian.Uint32(data[stats.PrimaryMagicOffset:]) != stats.ImgServiceMagic ||
		binary.LittleEndian.Uint32(data[stats.SecondaryMagicOffset:]) != stats.StatsMagic {
		return nil, fmt.Errorf("read statistics %q: %w", path, errors.New("not a statistics image"))
	}
	size := binary.LittleEndian.Uint32(data[stats.SizeOffset:])
	payload := data[stats.PayloadOffset:]
	if uint64(size) > uint64(len(payload)) {
		return nil, fmt.Errorf("read statistics %q: %w", path, errors.New("cut off"))
	}
	var entry stats.StatsEntry
	if err := proto.Unmarshal(payload[:size], &entry); err != nil {
		return nil, fmt.Errorf("read statistics %q: %w", path, err)
	}
	return &entry, nil
}
