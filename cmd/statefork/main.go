// Command statefork makes, shows and brings back branch points of running
// containers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

const description = `CONTAINER is a container's id, the first characters of it, or nerdctl's name.
NODE is a node's id, three or more of its first digits, or its name.

Results go to stdout, messages to stderr. The exit code is
  0  done
  1  failed
  2  wrong usage
  3  container or node not found
  4  refused: the container, the node or a name does not allow it
  5  unavailable: containerd or the container's shim does not answer
  6  out of time, or interrupted
The commands "exec" and "session wait" have others: see their help.`

// Exit codes, as the help tells them.
const (
	exitOK = iota
	exitFailed
	exitUsage
	exitNotFound
	exitRefused
	exitUnavailable
	exitEnded
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cmd := newCommand(stdout, stderr)
	err := cmd.Run(ctx, args)
	if err == nil {
		return exitOK
	}
	if !reported(err) {
		fmt.Fprintln(stderr, "statefork: "+message(err, cmd.String("address")))
	}
	return exitCode(err)
}

func newCommand(stdout, stderr io.Writer) *cli.Command {
	cmd := &cli.Command{
		Name:            "statefork",
		Usage:           "branches for running containers",
		Description:     description,
		HideVersion:     true,
		HideHelpCommand: true,
		Writer:          stdout,
		ErrWriter:       stderr,
		ExitErrHandler:  func(context.Context, *cli.Command, error) {},
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "address", Aliases: []string{"a"}, Value: "/run/containerd/containerd.sock",
				Sources: cli.EnvVars("CONTAINERD_ADDRESS"), Usage: "containerd's socket"},
			&cli.StringFlag{Name: "namespace", Aliases: []string{"n"}, Value: namespaces.Default,
				Sources: cli.EnvVars("CONTAINERD_NAMESPACE"), Usage: "containerd namespace"},
			&cli.StringFlag{Name: "state", Value: api.DefaultState, Usage: "containerd's state directory"},
			&cli.DurationFlag{Name: "timeout", Usage: "give up after this time (default: never)", HideDefault: true},
			&cli.BoolFlag{Name: "json", Usage: "print JSON"},
		},
		Commands: []*cli.Command{
			checkpointCommand(), restoreCommand(), forkCommand(), treeCommand(),
			lsCommand(), inspectCommand(), recoverCommand(), rmCommand(), doctorCommand(),
			execCommand(), sessionCommand(),
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usagef("no command %q", name)
			}
			return cli.ShowRootCommandHelp(cmd)
		},
	}
	inherit(cmd)
	return cmd
}

// inherit gives every command what package cli does not pass on to it: wrong
// flags are reported in one line, and labels and variables may have commas.
func inherit(cmd *cli.Command) {
	cmd.DisableSliceFlagSeparator = true
	if cmd.OnUsageError == nil {
		cmd.OnUsageError = func(_ context.Context, _ *cli.Command, err error, _ bool) error { return &usageError{err.Error()} }
	}
	for _, sub := range cmd.Commands {
		inherit(sub)
	}
}

// usageError is a mistake on the command line.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// errReported is a failure that the output has told already.
var errReported = errors.New("failed")

func reported(err error) bool {
	own, ok := errors.AsType[*exitError](err)
	return errors.Is(err, errReported) || ok && own.err == nil
}

// nargs checks the number of arguments; most < 0 is any.
func nargs(cmd *cli.Command, least, most int) error {
	if n := cmd.NArg(); n < least || (most >= 0 && n > most) {
		return usagef("usage: statefork %s", strings.TrimSpace(strings.TrimPrefix(cmd.FullName(), "statefork ")+" "+cmd.ArgsUsage))
	}
	return nil
}

// withClient calls f with a client as the flags want it, under --timeout.
func withClient(ctx context.Context, cmd *cli.Command, f func(context.Context, *waypoint.Client) error) error {
	ctx, cancel := deadline(ctx, cmd)
	defer cancel()
	client, err := waypoint.Connect(ctx, cmd.String("address"))
	if err != nil {
		return err
	}
	defer client.Close()
	return f(ctx, waypoint.New(client, waypoint.Options{Namespace: namespace(cmd), State: cmd.String("state")}))
}

// deadline is by the root's flag: the verb exec has a --timeout of its own.
func deadline(ctx context.Context, cmd *cli.Command) (context.Context, context.CancelFunc) {
	if d := cmd.Root().Duration("timeout"); d > 0 {
		return context.WithTimeout(ctx, d)
	}
	return context.WithCancel(ctx)
}

// namespace is the flag's value. The verb fork has a flag -n of its own, and so
// must have --namespace again.
func namespace(cmd *cli.Command) string {
	if ns := cmd.String("namespace"); ns != "" {
		return ns
	}
	return cmd.Root().String("namespace")
}

// exitCode tells an error to a script: by its class, unless the verb has codes
// of its own.
func exitCode(err error) int {
	if own, ok := errors.AsType[*exitError](err); ok {
		return own.code
	}
	return classCode(err)
}

// classCode tells the class of an error to a script.
func classCode(err error) int {
	var usage *usageError
	switch {
	case errors.As(err, &usage), errdefs.IsInvalidArgument(err):
		return exitUsage
	case errdefs.IsNotFound(err):
		return exitNotFound
	case errdefs.IsFailedPrecondition(err), errdefs.IsAlreadyExists(err), errdefs.IsNotImplemented(err), errdefs.IsAborted(err):
		return exitRefused
	case errdefs.IsUnavailable(err):
		return exitUnavailable
	case errors.Is(err, context.Canceled), errdefs.IsDeadlineExceeded(err), errdefs.IsCanceled(err):
		return exitEnded
	}
	return exitFailed
}

// message is an error in one line, with what to do about it.
func message(err error, address string) string {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	if hint := statefork.Hint(err); hint != "" {
		return text + ": " + hint
	}
	switch classCode(err) {
	case exitUsage:
		return text + ": see \"statefork --help\""
	case exitUnavailable:
		return text + ": see whether containerd runs at " + address + ", or \"statefork doctor\""
	case exitEnded:
		return text + ": the container runs on; give more --timeout"
	}
	if errdefs.IsPermissionDenied(err) || errors.Is(err, os.ErrPermission) {
		return text + ": run as root"
	}
	return text
}
