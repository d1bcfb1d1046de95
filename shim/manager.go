package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/statefork/statefork/runtime/container"
	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/shim/task"
)

// shimManager is what containerd runs the binary for, besides serving. Starting
// a shim is the same as for runc's: the embedded manager makes the socket,
// shares one shim in a pod, and runs this binary again.
type shimManager struct {
	shim.Shim
}

func newManager(name string) shim.Shim {
	return &shimManager{Shim: manager.NewShimManager(name)}
}

// Stop implements the delete action: containerd calls it when a shim has died,
// or could not create its container. It removes what the shim would have.
func (m *shimManager) Stop(ctx context.Context, id string) (shim.StopStatus, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return shim.StopStatus{}, err
	}
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return shim.StopStatus{}, err
	}
	// The working directory is the bundle of the shim's first container.
	bundle := filepath.Join(filepath.Dir(cwd), id)
	opts, err := runc.ReadOptions(bundle)
	if err != nil {
		log.G(ctx).WithError(err).Warn("read runtime options")
	}
	if err := removeDeadSocket(bundle); err != nil {
		log.G(ctx).WithError(err).Warn("remove socket of dead shim")
	}
	pid, err := container.Remove(ctx, container.RemoveConfig{
		ID:            id,
		Root:          task.StateRoot(opts, ns),
		Bundle:        bundle,
		SystemdCgroup: opts.GetSystemdCgroup(),
	})
	if err != nil {
		return shim.StopStatus{}, fmt.Errorf("remove container %q: %w", id, err)
	}
	exit, err := runc.ReadExitStatus(bundle)
	if err == nil {
		return shim.StopStatus{Pid: exit.Pid, ExitStatus: exit.Status, ExitedAt: exit.Timestamp}, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		log.G(ctx).WithError(err).Warn("read exit status")
	}
	return shim.StopStatus{Pid: pid, ExitStatus: 128 + int(unix.SIGKILL), ExitedAt: time.Now()}, nil
}

// removeDeadSocket removes the socket of a shim that has been killed. Its name is
// where containerd has kept it; a shim that containerd never heard of removes
// its own. In a pod several containers have one shim, which may well be alive.
func removeDeadSocket(bundle string) error {
	path, err := api.SocketOf(bundle)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	conn, err := net.Dial("unix", path)
	if err == nil {
		return conn.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return nil // gone already, or too busy to answer
	}
	return os.Remove(path)
}

// Info describes the runtime. The options that it is asked about are given
// back.
func (m *shimManager) Info(_ context.Context, optionsR io.Reader) (*types.RuntimeInfo, error) {
	info := &types.RuntimeInfo{Name: m.Name(), Version: version()}
	b, err := io.ReadAll(optionsR)
	if err != nil {
		return nil, fmt.Errorf("read runtime options: %w", err)
	}
	if len(b) > 0 {
		info.Options = &anypb.Any{}
		if err := proto.Unmarshal(b, info.Options); err != nil {
			return nil, fmt.Errorf("decode runtime options: %w", err)
		}
	}
	if info.Features, err = typeurl.MarshalAnyToProto(container.Features()); err != nil {
		return nil, fmt.Errorf("encode features: %w", err)
	}
	return info, nil
}

// version is that of the module, as the Go tool stamps it.
func version() *types.RuntimeVersion {
	v := &types.RuntimeVersion{}
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Version = build.Main.Version
	for _, s := range build.Settings {
		if s.Key == "vcs.revision" {
			v.Revision = s.Value
		}
	}
	return v
}
