package criu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
)

// InheritFD puts an open file of the worker in the place of one of the images.
type InheritFD struct {
	// Key names the file in the images: "pipe:[1234]".
	Key string
	// FD is its number inside CRIU, see SpawnOptions.Files.
	FD int
}

// RestoreOptions direct a restore.
type RestoreOptions struct {
	// Images is the directory of the images. It is only read.
	Images string
	// Work is the directory that receives the log and statistics; the images
	// directory if empty. Restores that run side by side need one each.
	Work string
	// Root is where CRIU's mount namespace shows the tree's new root, which
	// must be a mount point if the tree has a mount namespace.
	Root string
	// External says what stands for the resources that were external.
	External []string
	// InheritFDs are the files that stand for others.
	InheritFDs []InheritFD
	// NetworkLock must be the dump's.
	NetworkLock NetworkLock
	// TCPClose restores established connections as closed.
	TCPClose bool
	// LogLevel is CRIU's; 0 logs errors and warnings.
	LogLevel int32
	// Timeout bounds the restore; 0 is two minutes.
	Timeout time.Duration
}

// Restored is a tree that runs again.
type Restored struct {
	// Pid is the root of the tree. It is a child of this process, which has to
	// wait for it.
	Pid int
	// Masters are the master ends of the terminals whose masters were open only
	// outside the tree. Their indices are those at the dump. They are the
	// caller's to close.
	Masters []*os.File
	// Stats tell what the restore did.
	Stats RestoreStats
}

// Restore brings the tree of the images to life. If it fails, nothing of the
// tree is left, and the error is an *Error; images are never changed. A restore
// ends when ctx is cancelled, as a failed one.
//
// The tree's root becomes a child of the thread that forked CRIU, and of this
// process when that thread ends. A root that asked for a signal at its parent's
// death (PR_SET_PDEATHSIG) gets it then.
func (w *Worker) Restore(ctx context.Context, o RestoreOptions) (*Restored, error) {
	dirs, err := openDirectories(o.Images, o.Work)
	if err != nil {
		return nil, err
	}
	defer dirs.Close()
	opts := fixedOptions()
	dirs.fill(opts)
	o.fill(opts)
	var masters []*os.File
	c := &call{
		op:          "restore",
		typ:         rpc.CriuReqType_RESTORE,
		opts:        opts,
		log:         filepath.Join(dirs.work.Name(), restoreLog),
		timeout:     o.Timeout,
		cancellable: true,
		notify: func(n *rpc.CriuNotify, files []*os.File) {
			if n.GetScript() == "orphan-pts-master" {
				masters = append(masters, files...)
				return
			}
			closeAll(files)
		},
	}
	resp, err := w.do(ctx, c)
	if err != nil {
		closeAll(masters)
		return nil, err
	}
	pid := int(resp.GetRestore().GetPid())
	if pid <= 0 {
		closeAll(masters)
		return nil, fmt.Errorf("criu restore: root has no pid: %w", errdefs.ErrInternal)
	}
	return &Restored{Pid: pid, Masters: masters, Stats: readRestoreStats(ctx, dirs.work.Name())}, nil
}

// fill sets what the caller chose.
func (o *RestoreOptions) fill(opts *rpc.CriuOpts) {
	opts.RstSibling = proto.Bool(true)
	opts.NotifyScripts = proto.Bool(true)
	opts.LogFile = proto.String(restoreLog)
	opts.LogLevel = logLevel(o.LogLevel)
	opts.NetworkLock = o.NetworkLock.rpc()
	opts.External = o.External
	if o.Root != "" {
		opts.Root = proto.String(o.Root)
	}
	if o.TCPClose {
		opts.TcpClose = proto.Bool(true)
	}
	for _, f := range o.InheritFDs {
		opts.InheritFd = append(opts.InheritFd, &rpc.InheritFd{
			Key: proto.String(f.Key),
			Fd:  proto.Int32(int32(f.FD)),
		})
	}
}
