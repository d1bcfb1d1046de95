// Command containerd-statefork-grpc serves the layered snapshotter to
// containerd as a proxy plugin.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/containerd/log"

	"github.com/statefork/statefork/snapshotter"
)

const (
	defaultRoot    = "/var/lib/containerd-statefork"
	defaultAddress = "/run/containerd-statefork/containerd-statefork.sock"
)

const usage = `Usage: containerd-statefork-grpc [--root DIR] [--address SOCKET]

Serves the statefork snapshotter to containerd, as root, until SIGTERM.

  --root DIR         layers and process images (%s);
                     best on a filesystem with reflinks (xfs, btrfs)
  --address SOCKET   unix socket to serve on
                     (%s)
  --version          print the version

containerd finds it by this in /etc/containerd/config.toml:

  [proxy_plugins.statefork]
    type = "snapshot"
    address = "%[2]s"
    [proxy_plugins.statefork.exports]
      root = "%[1]s"

Then start a container on it: nerdctl --snapshotter statefork run ...
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: it returns the exit code, 2 for wrong usage.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("containerd-statefork-grpc", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {}
	root := flags.String("root", defaultRoot, "")
	address := flags.String("address", defaultAddress, "")
	showVersion := flags.Bool("version", false, "")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(stdout, usage, defaultRoot, defaultAddress)
		return 0
	case err != nil || flags.NArg() > 0:
		if err == nil {
			fmt.Fprintf(stderr, "unexpected argument %q\n", flags.Arg(0))
		}
		fmt.Fprintln(stderr, "see containerd-statefork-grpc --help")
		return 2
	case *showVersion:
		fmt.Fprintln(stdout, "containerd-statefork-grpc", version())
		return 0
	}
	if err := serveRoot(ctx, *root, *address); err != nil {
		log.G(ctx).WithError(err).Error("stop on an error")
		return 1
	}
	return 0
}

func serveRoot(ctx context.Context, root, address string) (retErr error) {
	s, err := snapshotter.New(ctx, snapshotter.Config{Root: root})
	if err != nil {
		return fmt.Errorf("open snapshotter: %w", err)
	}
	defer func() { retErr = errors.Join(retErr, s.Close()) }()
	return serve(ctx, s, address)
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
