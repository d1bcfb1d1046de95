package criu

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

const (
	dumpLog    = "dump.log"
	restoreLog = "restore.log"
)

// DefaultGhostLimit is the largest deleted file that a dump copies into its
// images. CRIU's own default of 1 MiB fails on ordinary programs.
const DefaultGhostLimit = 512 << 20

// DumpOptions direct a dump.
type DumpOptions struct {
	// Pid is the root of the tree, as CRIU's pid namespace numbers it.
	Pid int
	// Images is the directory that receives the images; it must exist.
	Images string
	// Work is the directory that receives the log and statistics; the images
	// directory if empty.
	Work string
	// Root is where CRIU's mount namespace shows the tree's root.
	Root string
	// FreezeCgroup is a cgroup that holds the tree and nothing else. It should
	// be frozen already: CRIU then finds nothing to do, where it would poll
	// every 100 ms. It stays frozen.
	FreezeCgroup string
	// External names the resources that CRIU is not to look into.
	External []string
	// LeaveRunning lets the tree run on after the dump.
	LeaveRunning bool
	// NetworkLock must be the same in the restore.
	NetworkLock NetworkLock
	// GhostLimit bounds each deleted file in bytes; 0 is DefaultGhostLimit.
	GhostLimit uint32
	// IrmapScanPaths are directories, as the tree sees them, in which watched
	// inodes are looked for whose path the kernel does not tell.
	IrmapScanPaths []string
	// LogLevel is CRIU's; 0 logs errors and warnings.
	LogLevel int32
	// Timeout bounds the dump; 0 is two minutes.
	Timeout time.Duration
}

// Dump writes the tree's images. Unless LeaveRunning is set, the tree is dead
// afterwards and its root a zombie of its parent's. If CRIU refuses, the tree
// runs on (inside its cgroup's freezer) and the error is an *Error.
//
// A dump that has begun goes on when ctx is cancelled: a CRIU killed in the
// middle can leave tasks stopped, or with foreign code in them, which no one
// can undo. That risk is taken only after Timeout, and by Close.
func (w *Worker) Dump(ctx context.Context, o DumpOptions) (*DumpStats, error) {
	dirs, err := openDirectories(o.Images, o.Work)
	if err != nil {
		return nil, err
	}
	defer dirs.Close()
	opts := fixedOptions()
	dirs.fill(opts)
	o.fill(opts)
	_, err = w.do(ctx, &call{
		op:      "dump",
		typ:     rpc.CriuReqType_DUMP,
		opts:    opts,
		log:     filepath.Join(dirs.work.Name(), dumpLog),
		timeout: o.Timeout,
	})
	if err != nil {
		return nil, explainGone(err, o.Pid)
	}
	return readDumpStats(ctx, dirs.work.Name()), nil
}

// fill sets what the caller chose.
func (o *DumpOptions) fill(opts *rpc.CriuOpts) {
	ghost := o.GhostLimit
	if ghost == 0 {
		ghost = DefaultGhostLimit
	}
	opts.Pid = proto.Int32(int32(o.Pid))
	opts.LogFile = proto.String(dumpLog)
	opts.LogLevel = logLevel(o.LogLevel)
	opts.GhostLimit = proto.Uint32(ghost)
	opts.LeaveRunning = proto.Bool(o.LeaveRunning)
	opts.NetworkLock = o.NetworkLock.rpc()
	opts.External = o.External
	opts.IrmapScanPaths = o.IrmapScanPaths
	if o.Root != "" {
		opts.Root = proto.String(o.Root)
	}
	if o.FreezeCgroup != "" {
		opts.FreezeCgroup = proto.String(o.FreezeCgroup)
	}
}

// explainGone makes err say that the root is gone, if that is why CRIU failed.
func explainGone(err error, pid int) error {
	var e *Error
	if errors.As(err, &e) && errdefs.IsInternal(e) && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
		e.Summary = fmt.Sprintf("process %d is gone: %s", pid, e.Summary)
		e.Err = errdefs.ErrNotFound
	}
	return err
}
