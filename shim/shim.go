// Package shim is containerd's runtime io.statefork.v1: it registers the
// services that the shim's socket serves, and starts, describes and cleans up
// after shims.
package shim

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/ttrpc"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/shim/task"
	"github.com/statefork/statefork/shim/waypoint"
)

// Run is the shim's main function: it starts a shim, is one, or cleans up after
// one, as containerd's command line says.
func Run() {
	if args, ok := serveArguments(os.Args[1:]); ok {
		if err := serve(context.Background(), args); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %s\n", api.RuntimeName, err)
			os.Exit(1)
		}
		return
	}
	shim.RunShim(context.Background(), newManager(api.RuntimeName), func(c *shim.Config) {
		// An action waits for the processes that it starts, and adopts no others.
		c.NoReaper = true
		c.NoSubreaper = true
	})
}

// services are what is on the shim's socket.
type services struct {
	task     *task.Service
	waypoint *waypoint.Service
}

// newServices returns the services of the namespace that ctx names. They end
// with sd.
func newServices(ctx context.Context, pub events.Publisher, sd shutdown.Service, grpcAddress string) (*services, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, err
	}
	s := &services{task: task.NewService(ctx, pub, sd)}
	s.waypoint = waypoint.NewService(ns, grpcAddress, s.task)
	sd.RegisterCallback(func(context.Context) error { return s.waypoint.Close() })
	return s, nil
}

// register puts the services on the shim's socket.
func (s *services) register(server *ttrpc.Server) error {
	return errors.Join(s.task.RegisterTTRPC(server), s.waypoint.RegisterTTRPC(server))
}
