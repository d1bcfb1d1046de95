// Package criu dumps process trees to image directories and restores them,
// with the CRIU executable in its "swrk" mode.
//
// A Binary is a CRIU that is new enough. It spawns workers; a Worker is one
// CRIU process that waits for its one request, a dump or a restore. Spawning
// ahead takes CRIU's start out of the time that a tree stands still, and lets
// the caller place the process first: in namespaces and mounts (see
// SpawnOptions) and, by its pid, in cgroups.
//
// The package knows nothing of containers: which mounts, namespaces and pipes
// are external to a tree is the caller's to say, in CRIU's own words. What it
// fixes is how CRIU treats everything else, see fixedOptions. It never reaps a
// process that a caller could wait for.
package criu

import (
	"fmt"
	"os"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// NetworkLock is how the tree's TCP connections are kept from changing while
// nobody is there to answer for them.
type NetworkLock int

const (
	// NetworkLockSkip does nothing: right where no peer is outside the tree.
	NetworkLockSkip NetworkLock = iota
	// NetworkLockNftables drops the connections' packets by nftables.
	NetworkLockNftables
	// NetworkLockIptables drops the connections' packets by iptables.
	NetworkLockIptables
)

const (
	// defaultLogLevel lets CRIU log errors and warnings.
	defaultLogLevel = 2
	// defaultTimeout is how long a dump or restore may take.
	defaultTimeout = 2 * time.Minute
)

// rpc returns CRIU's name of the lock.
func (l NetworkLock) rpc() *rpc.CriuNetworkLockMethod {
	switch l {
	case NetworkLockNftables:
		return rpc.CriuNetworkLockMethod_NFTABLES.Enum()
	case NetworkLockIptables:
		return rpc.CriuNetworkLockMethod_IPTABLES.Enum()
	default:
		return rpc.CriuNetworkLockMethod_SKIP.Enum()
	}
}

// fixedOptions returns the options that never differ. They must be the same on
// both sides: what one dump allows, each restore of it has to understand.
// Cgroups stay the caller's, who places the worker in them.
//
// Left unset on purpose: shell_job (sessions and terminals belong to the tree),
// track_mem and parent_img (soft-dirty tracking is missing in many kernels),
// auto_dedup (it changes the images of ancestors), empty_ns and veths.
func fixedOptions() *rpc.CriuOpts {
	return &rpc.CriuOpts{
		FileLocks:         proto.Bool(true),
		ExtUnixSk:         proto.Bool(true),
		TcpEstablished:    proto.Bool(true),
		LinkRemap:         proto.Bool(true),
		OrphanPtsMaster:   proto.Bool(true),
		ManageCgroups:     proto.Bool(true),
		ManageCgroupsMode: rpc.CriuCgMode_IGNORE.Enum(),
	}
}

// directories are the open image and work directories of a request. CRIU
// reaches them through /proc/<our pid>/fd while the request lasts, so they may
// lie on mounts that its own namespace lacks.
type directories struct {
	images, work *os.File
}

func openDirectories(images, work string) (*directories, error) {
	if work == "" {
		work = images
	}
	var d directories
	var err error
	if d.images, err = openDirectory(images); err != nil {
		return nil, fmt.Errorf("open images directory: %w", err)
	}
	if d.work, err = openDirectory(work); err != nil {
		d.images.Close()
		return nil, fmt.Errorf("open work directory: %w", err)
	}
	return &d, nil
}

func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// Close closes both directories.
func (d *directories) Close() {
	d.images.Close()
	d.work.Close()
}

// fill names the directories in opts.
func (d *directories) fill(opts *rpc.CriuOpts) {
	opts.ImagesDirFd = proto.Int32(int32(d.images.Fd()))
	opts.WorkDirFd = proto.Int32(int32(d.work.Fd()))
}

// logLevel returns level, or the default for zero.
func logLevel(level int32) *int32 {
	if level == 0 {
		level = defaultLogLevel
	}
	return proto.Int32(level)
}
