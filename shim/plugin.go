// Package shim is containerd's runtime io.statefork.v1: it registers the
// services that the shim's socket serves, and starts, describes and cleans up
// after shims.
package shim

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/shim/task"
	"github.com/statefork/statefork/shim/waypoint"
)

func init() {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn:   newServices,
	})
}

// Run is the shim's main function: it starts a shim, is one, or cleans up after
// one, as containerd's command line says.
func Run() {
	shim.RunShim(context.Background(), newManager(api.RuntimeName), func(c *shim.Config) {
		// Each process of a container is waited for by its pid. A reaper that
		// takes any child would take exits away from that, and from whatever
		// else runs a command.
		c.NoReaper = true
		// Without a reaper, processes that a container in the host's pid
		// namespace has left behind are better off with the host's init.
		c.NoSubreaper = true
	})
}

// services are what one plugin puts on the shim's socket.
type services struct {
	task     *task.Service
	waypoint *waypoint.Service
}

var (
	_ shim.TTRPCService             = (*services)(nil)
	_ shim.TTRPCServerUnaryOptioner = (*services)(nil)
)

func newServices(ic *plugin.InitContext) (any, error) {
	publisher, err := ic.GetByID(plugins.EventPlugin, "publisher")
	if err != nil {
		return nil, err
	}
	instance, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
	if err != nil {
		return nil, err
	}
	sd, ok := instance.(shutdown.Service)
	if !ok {
		return nil, fmt.Errorf("shutdown plugin is a %T", instance)
	}
	pub, ok := publisher.(events.Publisher)
	if !ok {
		return nil, fmt.Errorf("publisher plugin is a %T", publisher)
	}
	ns, err := namespaces.NamespaceRequired(ic.Context)
	if err != nil {
		return nil, err
	}
	s := &services{task: task.NewService(ic.Context, pub, sd)}
	s.waypoint = waypoint.NewService(ns, ic.Properties[plugins.PropertyGRPCAddress], s.task)
	sd.RegisterCallback(func(context.Context) error { return s.waypoint.Close() })
	return s, nil
}

// RegisterTTRPC implements shim.TTRPCService.
func (s *services) RegisterTTRPC(server *ttrpc.Server) error {
	return errors.Join(s.task.RegisterTTRPC(server), s.waypoint.RegisterTTRPC(server))
}

// UnaryServerInterceptor implements shim.TTRPCServerUnaryOptioner.
func (s *services) UnaryServerInterceptor() ttrpc.UnaryServerInterceptor {
	return s.task.UnaryServerInterceptor()
}
