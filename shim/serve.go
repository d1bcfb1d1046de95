package shim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"runtime/pprof"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/shim/task"
)

const (
	// orphanInterval is how often a shim looks whether it is needed at all.
	orphanInterval = 10 * time.Second
	// memoryInterval is how often it gives unused memory back.
	memoryInterval = 30 * time.Second
	// listenerFD and debugFD are the sockets that the start action hands over;
	// the second only if the log level is debug.
	listenerFD, debugFD = 3, 4
)

// arguments are the command line of a shim that serves.
type arguments struct {
	id, namespace, address string
	debug                  bool
}

// serveArguments parses a command line, and says whether it is that of a shim
// that serves rather than of an action.
func serveArguments(args []string) (a arguments, ok bool) {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&a.id, "id", "", "")
	fs.StringVar(&a.namespace, "namespace", "", "")
	fs.StringVar(&a.address, "address", "", "")
	fs.BoolVar(&a.debug, "debug", false, "")
	// What the start action gives has no other flag and no action.
	err := fs.Parse(args)
	return a, err == nil && fs.NArg() == 0 && a.id != "" && a.namespace != ""
}

// serve is a shim's life, in its bundle: from the socket that it has inherited
// until it is shut down. containerd's own code for this leaves the socket behind
// if the shim ends before it serves, and waits for a reader of its log, both of
// which happen when containerd is killed while it starts a shim.
func serve(ctx context.Context, args arguments) error {
	debug.SetGCPercent(40)
	ctx = namespaces.WithNamespace(ctx, args.namespace)
	ctx, sd := shutdown.WithShutdown(ctx)
	l, err := inherit(listenerFD)
	if err != nil {
		return err
	}
	// Once: as soon as the name is free another shim can take it.
	hangUp := sync.OnceFunc(func() {
		_ = os.Remove(l.Addr().String()) // somebody may have done it
		l.Close()
	})
	defer hangUp()
	sd.RegisterCallback(func(context.Context) error { hangUp(); return nil })
	if args.debug {
		dropDebugSocket()
	}
	if err := setLogger(args.debug); err != nil {
		return err
	}
	ctx = log.WithLogger(ctx, log.G(ctx).WithField("runtime", api.RuntimeName))
	// containerd hands its ttrpc address over by the environment alone.
	publisher, err := newPublisher(os.Getenv("TTRPC_ADDRESS"))
	if err != nil {
		return err
	}
	defer publisher.Close()
	s, err := newServices(ctx, publisher, sd, args.address)
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer(ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser()),
		ttrpc.WithUnaryServerInterceptor(s.task.UnaryServerInterceptor()))
	if err != nil {
		return fmt.Errorf("make server: %w", err)
	}
	if err := s.register(server); err != nil {
		return fmt.Errorf("register services: %w", err)
	}
	go func() {
		if err := server.Serve(ctx, l); err != nil && !errors.Is(err, ttrpc.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			log.G(ctx).WithError(err).Error("serve")
			sd.Shutdown()
		}
	}()
	run(ctx, sd, s.task)
	if err := sd.Err(); !errors.Is(err, shutdown.ErrShutdown) {
		return fmt.Errorf("shut down: %w", err)
	}
	return nil
}

// run looks after the process until sd is done. Each process of a container is
// waited for by its pid, so children are nobody else's affair: a reaper of any
// child would take exits away from those who wait.
func run(ctx context.Context, sd shutdown.Service, tasks *task.Service) {
	signals := make(chan os.Signal, 8)
	// SIGPIPE is taken so that a log without a reader does not end the shim. It
	// must not be ignored: children would inherit that.
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGPIPE, unix.SIGUSR1)
	defer signal.Stop(signals)
	orphan := time.NewTicker(orphanInterval)
	defer orphan.Stop()
	memory := time.NewTicker(memoryInterval)
	defer memory.Stop()
	for {
		select {
		case <-sd.Done():
			return
		case s := <-signals:
			switch s {
			case unix.SIGTERM, unix.SIGINT:
				sd.Shutdown()
			case unix.SIGUSR1:
				_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2) // for a person; to the log
			}
		case <-memory.C:
			debug.FreeOSMemory()
		case <-orphan.C:
			if orphaned(tasks) {
				log.G(ctx).Info("bundle is gone, and nobody can ask for a container: shutting down")
				sd.Shutdown()
			}
		}
	}
}

// orphaned says that containerd does not know the shim. When it is killed
// between starting a shim and writing down where that is, or finds a shim that
// does not answer in time, it removes the bundle at its next start and forgets
// the shim. The working directory is the bundle: it is gone when it has no name.
func orphaned(tasks *task.Service) bool {
	var st unix.Stat_t
	if err := unix.Stat(".", &st); err == nil && st.Nlink > 0 {
		return false
	}
	return tasks.Abandoned()
}

// inherit makes a listener of a file descriptor, which it closes.
func inherit(fd uintptr) (net.Listener, error) {
	f := os.NewFile(fd, "socket")
	if f == nil {
		return nil, fmt.Errorf("file descriptor %d is not a socket", fd)
	}
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("listen on file descriptor %d: %w", fd, err)
	}
	return l, nil
}

// dropDebugSocket takes away the socket for profiles, which nobody serves.
func dropDebugSocket() {
	l, err := inherit(debugFD)
	if err != nil {
		return
	}
	_ = os.Remove(l.Addr().String()) // somebody may have done it
	l.Close()
}

// setLogger sends the log and whatever comes to standard error to the pipe that
// containerd reads. If containerd is gone nobody does, and may later.
func setLogger(debug bool) error {
	// With a reader, opening the other end does not wait.
	reader, err := unix.Open("log", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer unix.Close(reader)
	writer, err := unix.Open("log", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer unix.Close(writer)
	if err := unix.Dup3(writer, unix.Stderr, 0); err != nil {
		return fmt.Errorf("redirect standard error to log: %w", err)
	}
	if err := log.SetFormat(log.TextFormat); err != nil {
		return err
	}
	if debug {
		return log.SetLevel(log.DebugLevel.String())
	}
	return nil
}
