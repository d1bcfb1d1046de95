// Command sandbox runs a command beside a private containerd and a private
// statefork snapshotter, and fails if anything of that is left on the machine
// afterwards:
//
//	go run ./integration/sandbox [-image busybox|debian] COMMAND [ARGUMENT...]
//
// The command finds nerdctl, ctr and statefork in its path; the environment
// tells them where containerd is. STATEFORK_STATE is containerd's state
// directory.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/statefork/statefork/integration/testbed"
)

func main() {
	image := flag.String("image", "busybox", "image to have ready, as localhost/`NAME`: busybox or debian")
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *image, flag.Args())
	stop()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "sandbox:", err)
	var command *exec.ExitError
	if !errors.As(err, &command) || errors.Is(err, context.Canceled) {
		short(err)
	}
	if command != nil && command.ExitCode() > 0 {
		os.Exit(command.ExitCode())
	}
	os.Exit(1)
}

// short replaces what the command has written for the closing line, which tells
// of success, by what was wrong around it.
func short(err error) {
	what, _, _ := strings.Cut(err.Error(), "\n")
	if errors.Is(err, context.Canceled) {
		what = "interrupted"
	}
	if name := os.Getenv("FIGURES"); name != "" {
		if err := os.WriteFile(name, []byte(what+"\n"), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, "sandbox:", err)
		}
	}
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "sandbox: "+format+"\n", args...) }

func run(ctx context.Context, image string, command []string) (retErr error) {
	tb, err := testbed.Start(ctx, say)
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	// The machine is to be clean also after an interrupt.
	clean := context.WithoutCancel(ctx)
	defer func() {
		if err := tb.Stop(clean); err != nil {
			retErr = errors.Join(retErr, err)
			return
		}
		retErr = errors.Join(retErr, context.Cause(ctx))
		say("no mount, process, cgroup, namespace, firewall rule or file is left")
	}()
	ns := tb.Namespace(tb.Name + "-sandbox")
	switch image {
	case "busybox":
		err = ns.ImportBusybox(ctx)
	case "debian":
		err = patiently("the image of Debian", func() error { return ns.ImportDebian(ctx) })
	default:
		err = fmt.Errorf("no image %q", image)
	}
	if err != nil {
		return err
	}
	if err := runIn(ctx, ns, command); err != nil {
		return errors.Join(err, ns.Discard(clean))
	}
	return errors.Join(ns.Check(clean), ns.Empty(clean))
}

// patiently says from time to time that f, which may take minutes, is not done.
func patiently(what string, f func() error) error {
	const every = 20 * time.Second
	start, done := time.Now(), make(chan error, 1)
	go func() { done <- f() }()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			say("%s: %s so far", what, time.Since(start).Round(time.Second))
		}
	}
}

// runIn runs the command with this process's terminal.
func runIn(ctx context.Context, ns *testbed.Namespace, command []string) error {
	cmd := ns.Command(ctx, command[0], command[1:]...)
	cmd.Env = append(ns.Environ(),
		"CONTAINERD_NAMESPACE="+ns.NS,
		"CONTAINERD_SNAPSHOTTER="+testbed.Snapshotter,
		"FIGURES="+os.Getenv("FIGURES"))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	return nil
}
