package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/containerd/console"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork/waypoint"
)

// What is timed of commands in a running container.
const (
	// opTrue runs "true".
	opTrue = "true"
	// opPrint prints printedMiB MiB of lines.
	opPrint = "print"
)

const (
	printedMiB = 256
	trueRounds = 200
	// execEvery: ctr is measured that much more rarely, as it takes so long.
	execEvery   = 10
	printRounds = 3
)

// Who runs the commands.
const (
	stepBash = "step in bash"
	stepDash = "step in dash"
	ctrExec  = "ctr task exec"
	// barePTY is cat on a terminal of the host, whose output is only read.
	barePTY = "cat to a bare terminal"
	// barePipe is cat to a pipe, read by another cat.
	barePipe = "cat to a pipe"
)

// commands runs commands in one container in all ways.
type commands struct {
	ns       *testbed.Namespace
	id       string
	sessions *waypoint.Sessions
	number   int
	// file is what is printed, as the host sees it.
	file string
}

// measureCommands adds how long commands take in a running container.
func measureCommands(ctx context.Context, ns *testbed.Namespace, res *results) (retErr error) {
	if err := ns.ImportDebian(ctx); err != nil {
		return err
	}
	out, err := ns.Nerdctl(ctx, "--snapshotter", testbed.Snapshotter, "run", "-d", "--runtime", testbed.Runtime,
		"--net", "none", "--pull", "never", testbed.Debian, "sleep", "infinity")
	if err != nil {
		return err
	}
	c := &commands{ns: ns, id: strings.TrimSpace(out.Stdout)}
	defer func() {
		_, err := ns.Nerdctl(context.WithoutCancel(ctx), "rm", "-f", c.id)
		retErr = errors.Join(retErr, err)
	}()
	lib := waypoint.New(ns.Client(), waypoint.Options{Namespace: ns.NS, State: ns.State()})
	if c.sessions, err = lib.Sessions(ctx, c.id); err != nil {
		return err
	}
	defer c.sessions.Close()
	for session, shell := range map[string]string{stepBash: "bash", stepDash: "dash"} {
		if _, err := c.sessions.Open(ctx, waypoint.OpenOptions{Session: sessionName(session), Shell: shell}); err != nil {
			return err
		}
	}
	return errors.Join(c.measureTrue(ctx, res), c.measurePrint(ctx, res))
}

func sessionName(variant string) string { return strings.ReplaceAll(variant, " ", "-") }

func (c *commands) measureTrue(ctx context.Context, res *results) error {
	for n := range trueRounds {
		for _, v := range []string{stepBash, stepDash, ctrExec} {
			run := func() error { return c.step(ctx, v, "true") }
			if v == ctrExec {
				if n%execEvery != 0 {
					continue
				}
				run = func() error { return c.exec(ctx, "true") }
			}
			s, err := timed(opTrue, run)
			if err != nil {
				return fmt.Errorf("%s: %w", v, err)
			}
			res.add(v, s)
		}
	}
	return nil
}

// step runs a command in a session; what it prints stays with the shim.
func (c *commands) step(ctx context.Context, variant, command string) error {
	r, err := c.sessions.Exec(ctx, waypoint.ExecOptions{Session: sessionName(variant), Command: command, OutputLimit: 1 << 20})
	if err != nil {
		return err
	}
	if !r.ExitKnown || r.ExitCode != 0 {
		return fmt.Errorf("step %q ended with %d", command, r.ExitCode)
	}
	return nil
}

// exec runs a command by ctr, which reads what it prints.
func (c *commands) exec(ctx context.Context, args ...string) error {
	c.number++
	argv := append([]string{"--address", c.ns.Address(), "--namespace", c.ns.NS, "task", "exec", "--exec-id", fmt.Sprint("bench", c.number), c.id}, args...)
	return c.ns.Command(ctx, "ctr", argv...).Run()
}

func (c *commands) measurePrint(ctx context.Context, res *results) (retErr error) {
	// Made outside of what is measured, and read from the page cache.
	make := fmt.Sprintf("base64 -w 79 /dev/urandom | head -c %d >/printed", printedMiB<<20)
	if err := c.step(ctx, stepBash, make); err != nil {
		return err
	}
	if err := c.copyOut(ctx); err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, os.Remove(c.file)) }()
	for range printRounds {
		for v, run := range map[string]func() error{
			stepBash: func() error { return c.step(ctx, stepBash, "cat /printed") },
			stepDash: func() error { return c.step(ctx, stepDash, "cat /printed") },
			ctrExec:  func() error { return c.exec(ctx, "cat", "/printed") },
			barePTY:  func() error { return printToTerminal(c.file) },
			barePipe: func() error {
				return exec.CommandContext(ctx, "sh", "-c", `cat "$1" | cat >/dev/null`, "-", c.file).Run()
			},
		} {
			say("printing %d MiB: %s", printedMiB, v)
			s, err := timed(opPrint, run)
			if err != nil {
				return fmt.Errorf("%s: %w", v, err)
			}
			res.add(v, s)
		}
	}
	return nil
}

// copyOut makes the printed file one of the host's.
func (c *commands) copyOut(ctx context.Context) error {
	pid, err := pidOf(ctx, c.ns, c.id)
	if err != nil {
		return err
	}
	src, err := os.Open(fmt.Sprintf("/proc/%d/root/printed", pid))
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.CreateTemp("", "printed-")
	if err != nil {
		return err
	}
	c.file = dst.Name()
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

// printToTerminal has cat print a file on a new terminal that is set as those of
// sessions are, and reads all of it.
func printToTerminal(file string) error {
	master, name, err := console.NewPty()
	if err != nil {
		return err
	}
	defer master.Close()
	slave, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	t, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err == nil {
		t.Oflag &^= unix.OPOST
		err = unix.IoctlSetTermios(int(slave.Fd()), unix.TCSETS, t)
	}
	if err != nil {
		return errors.Join(err, slave.Close())
	}
	cmd := exec.Command("cat", file)
	cmd.Stdout = slave
	if err := errors.Join(cmd.Start(), slave.Close()); err != nil {
		return err
	}
	n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{master}, make([]byte, 64<<10))
	if err != nil && !errors.Is(err, syscall.EIO) { // EIO is the end
		return err
	}
	if n != printedMiB<<20 {
		return fmt.Errorf("terminal printed %d bytes, want %d MiB", n, printedMiB)
	}
	return cmd.Wait()
}

// commandsMarkdown tells of commands in a running container.
func (r *results) commandsMarkdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nA command in a running container. `true`: median (minimum) in milliseconds, of %d rounds for steps and %d for ctr; printing %d MiB of lines: MiB/s of the median of %d rounds:\n\n",
		trueRounds, trueRounds/execEvery, printedMiB, printRounds)
	b.WriteString("| | `true` | printing |\n|---|--:|--:|\n")
	for _, v := range []string{stepBash, stepDash, ctrExec, barePTY, barePipe} {
		fmt.Fprintf(&b, "| %s |", v)
		if x := r.find(v, opTrue); x != nil {
			fmt.Fprintf(&b, " %.2f (%.2f)", x.Median, x.Min)
		}
		fmt.Fprintf(&b, " | %.0f |\n", printedMiB/(r.find(v, opPrint).Median/1000))
	}
	return b.String()
}
