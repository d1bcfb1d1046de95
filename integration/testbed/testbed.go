// Package testbed runs a private containerd and a private statefork snapshotter
// under a temporary directory, and tells what they leave behind on the machine.
//
// Nothing of a testbed meets the containerd of the machine or another testbed:
// it has its own root, state, sockets, containerd namespaces and nerdctl data.
// The tests, the benchmark and the demo all run in one.
package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

const (
	// Runtime is the runtime under test.
	Runtime = "io.statefork.v1"
	// Snapshotter is the snapshotter under test, as the private containerd
	// knows it.
	Snapshotter = "statefork"
	// Stock is containerd's own snapshotter.
	Stock = "overlayfs"

	// startTimeout bounds how long a daemon may take until it serves.
	startTimeout  = 30 * time.Second
	settleTimeout = 15 * time.Second
)

// Testbed is a private containerd with a private snapshotter.
type Testbed struct {
	// Dir holds everything that the testbed has on disk.
	Dir string
	// Name is unique among the testbeds on this machine. It is in the name of
	// every containerd namespace here, and with that in every cgroup's path.
	Name string
	// Containerd and Snapshotterd are the two daemons.
	Containerd, Snapshotterd *Daemon
	// Settle bounds how long the machine may take until it looks again as it
	// did before.
	Settle time.Duration
	// Alone says that nothing else has run on the machine, so that everything
	// new on it was left by the testbed.
	Alone bool

	bin    Binaries
	logf   func(format string, args ...any)
	before Inventory
	client *containerd.Client
	// netns is the network namespace's file, empty for the machine's own.
	netns string
}

// Start takes an inventory of the machine, builds what is stale of our binaries
// and starts both daemons. logf may be nil.
func Start(ctx context.Context, logf func(format string, args ...any)) (*Testbed, error) {
	return start(ctx, logf, false)
}

// StartApart is Start in a network namespace of its own: what containers have of
// bridges, addresses and firewall rules does not reach the machine.
func StartApart(ctx context.Context, logf func(format string, args ...any)) (*Testbed, error) {
	return start(ctx, logf, true)
}

func start(ctx context.Context, logf func(format string, args ...any), apart bool) (_ *Testbed, retErr error) {
	if logf == nil {
		logf = func(string, ...any) {}
	}
	bin, err := FindBinaries(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		return nil, fmt.Errorf("make directory of testbed: %w", err)
	}
	tb := &Testbed{Dir: dir, Name: filepath.Base(dir), Settle: settleTimeout, bin: bin, logf: logf}
	// containerd refuses a longer directory of sockets.
	if sockets := filepath.Join(dir, "s"); len(sockets) > 42 {
		return nil, errors.Join(fmt.Errorf("directory %q is too long for sockets: set TMPDIR", sockets), os.RemoveAll(dir))
	}
	// The marks are not on the machine yet, so nothing in here counts as ours.
	if tb.before, err = TakeInventory(tb.marks()...); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, tb.Stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := tb.configure(); err != nil {
		return nil, err
	}
	if apart {
		if err := tb.addNetwork(ctx); err != nil {
			return nil, err
		}
	}
	return tb, tb.startDaemons(ctx)
}

// marks are the strings that make something on the machine this testbed's.
func (tb *Testbed) marks() []string { return []string{tb.Dir, tb.Name} }

func (tb *Testbed) path(name string) string { return filepath.Join(tb.Dir, name) }

// Address is containerd's socket.
func (tb *Testbed) Address() string { return tb.path("c.sock") }

// State is containerd's state directory.
func (tb *Testbed) State() string { return tb.path("state") }

// LayersRoot is the root of our snapshotter.
func (tb *Testbed) LayersRoot() string { return tb.path("layers") }

// Client returns the connection to containerd, which survives its restarts.
func (tb *Testbed) Client() *containerd.Client { return tb.client }

func (tb *Testbed) startDaemons(ctx context.Context) error {
	tb.Snapshotterd = &Daemon{
		Name: "containerd-statefork-grpc",
		Path: tb.bin.Snapshotterd,
		Wrap: tb.wrapper(),
		Args: []string{"--root", tb.LayersRoot(), "--address", tb.path("l.sock")},
		Env:  tb.environ(),
		Log:  tb.path("snapshotter.log"),
		Ready: func(ctx context.Context) error {
			return dialSocket(ctx, tb.path("l.sock"))
		},
	}
	tb.Containerd = &Daemon{
		Name:  "containerd",
		Path:  tb.bin.Containerd,
		Wrap:  tb.wrapper(),
		Args:  []string{"--config", tb.path("containerd.toml")},
		Env:   tb.environ(),
		Log:   tb.path("containerd.log"),
		Ready: tb.serving,
	}
	if err := tb.Snapshotterd.Start(ctx); err != nil {
		return err
	}
	return tb.Containerd.Start(ctx)
}

// serving connects to containerd if that is still to be done, and asks it for
// its version.
func (tb *Testbed) serving(ctx context.Context) error {
	if err := dialSocket(ctx, tb.Address()); err != nil {
		return err
	}
	if tb.client == nil {
		client, err := containerd.New(tb.Address())
		if err != nil {
			return fmt.Errorf("connect to containerd: %w", err)
		}
		tb.client = client
	}
	if _, err := tb.client.Version(ctx); err != nil {
		return fmt.Errorf("ask containerd for its version: %w", err)
	}
	return nil
}

// configure writes the configuration of containerd and of nerdctl.
func (tb *Testbed) configure() error {
	if err := os.WriteFile(tb.path("containerd.toml"), []byte(fmt.Sprintf(containerdConfig, tb.Dir)), 0o600); err != nil {
		return fmt.Errorf("configure containerd: %w", err)
	}
	if err := os.WriteFile(tb.path("nerdctl.toml"), []byte(fmt.Sprintf(nerdctlConfig, tb.Dir, cniPlugins)), 0o600); err != nil {
		return fmt.Errorf("configure nerdctl: %w", err)
	}
	return nil
}

// cniPlugins is where Debian installs them.
const cniPlugins = "/usr/lib/cni"

// Everything that would touch the machine outside of the directory is disabled.
const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = [
  "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime",
  "io.containerd.grpc.v1.cri",
  "io.containerd.image-verifier.v1.bindir",
  "io.containerd.internal.v1.opt",
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.native",
  "io.containerd.snapshotter.v1.zfs",
]

[debug]
  level = "info"

[grpc]
  address = "%[1]s/c.sock"

[ttrpc]
  address = "%[1]s/c.sock.ttrpc"

[plugins."io.containerd.shim.v1.manager"]
  socket_dir = "%[1]s/s"

[proxy_plugins.statefork]
  type = "snapshot"
  address = "%[1]s/l.sock"
  [proxy_plugins.statefork.exports]
    root = "%[1]s/layers"
`

const nerdctlConfig = `address = "%[1]s/c.sock"
data_root = "%[1]s/nerdctl"
cni_path = "%[2]s"
cni_netconfpath = "%[1]s/cni"
cgroup_manager = "cgroupfs"
`

// environ is the environment of the daemons and of every command: our binaries
// come first in the path, so that containerd finds the shim and the shim criu.
func (tb *Testbed) environ() []string {
	env := []string{
		"PATH=" + tb.bin.Dir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + tb.path("home"),
		"LANG=C.UTF-8",
		"CONTAINERD_ADDRESS=" + tb.Address(),
		"NERDCTL_TOML=" + tb.path("nerdctl.toml"),
	}
	for _, keep := range []string{"TMPDIR", "TERM", "CI"} {
		if v, ok := os.LookupEnv(keep); ok {
			env = append(env, keep+"="+v)
		}
	}
	return env
}

// Environ is for programs that are started by others than the testbed.
func (tb *Testbed) Environ() []string {
	return append(tb.environ(), "STATEFORK_STATE="+tb.State(), "STATEFORK_TESTBED="+tb.Dir)
}

// Stop ends everything in the testbed, removes its directory and fails with a
// Leftovers if the machine does not look then as it did before. What was left
// is removed after it was noted.
func (tb *Testbed) Stop(ctx context.Context) error {
	var errs []error
	if tb.client != nil {
		errs = append(errs, tb.removeContainers(ctx), tb.client.Close())
	}
	for _, d := range []*Daemon{tb.Containerd, tb.Snapshotterd} {
		if d != nil {
			errs = append(errs, d.Stop(ctx))
		}
	}
	if tb.netns != "" {
		errs = append(errs, tb.removeNetwork(ctx))
	}
	left, err := tb.settle(ctx)
	errs = append(errs, err)
	if len(left) > 0 {
		errs = append(errs, &Leftovers{Of: "testbed " + tb.Name, Items: left})
		errs = append(errs, tb.sweep(left))
	}
	if err := os.RemoveAll(tb.Dir); err != nil {
		errs = append(errs, fmt.Errorf("remove directory of testbed: %w", err))
	}
	return errors.Join(errs...)
}

// removeContainers ends and removes what is still there in any namespace, so
// that daemons stop with nothing to do; each container is reported.
func (tb *Testbed) removeContainers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if !tb.Containerd.Running() || !tb.Snapshotterd.Running() {
		return nil
	}
	all, err := tb.client.NamespaceService().List(ctx)
	if err != nil {
		return fmt.Errorf("list namespaces: %w", err)
	}
	var errs []error
	for _, ns := range all {
		if err := tb.Namespace(ns).Empty(namespaces.WithNamespace(ctx, ns)); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
