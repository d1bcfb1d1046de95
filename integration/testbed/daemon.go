package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	stopTimeout = 20 * time.Second
	pollEvery   = 20 * time.Millisecond
	tailLines   = 30
)

// Daemon is a program that serves until it is stopped. Its output goes to the
// file Log, over all its starts.
type Daemon struct {
	Name string
	Path string
	Args []string
	Env  []string
	Log  string
	// Wrap is a program with arguments that becomes the daemon, if there is one.
	Wrap []string
	// Ready fails until the daemon serves.
	Ready func(context.Context) error

	cmd  *exec.Cmd
	done chan struct{} // closed when the process has been reaped
}

// Start starts the daemon and returns when it serves.
func (d *Daemon) Start(ctx context.Context) error {
	log, err := os.OpenFile(d.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", d.Name, err)
	}
	defer log.Close()
	argv := slices.Concat(d.Wrap, []string{d.Path}, d.Args)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = d.Env
	cmd.Stdout, cmd.Stderr = log, log
	// An interrupt at the terminal is for whoever runs the testbed, who then
	// stops the daemons in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", d.Name, err)
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in the log
		close(done)
	}()
	d.cmd, d.done = cmd, done
	err = Poll(ctx, startTimeout, func(ctx context.Context) error {
		if !d.Running() {
			return Permanent(errors.New("it has ended"))
		}
		return d.Ready(ctx)
	})
	if err != nil {
		return fmt.Errorf("start %s: %w\n%s", d.Name, err, d.Tail())
	}
	return nil
}

// Running says whether the process is there.
func (d *Daemon) Running() bool {
	if d == nil || d.cmd == nil {
		return false
	}
	select {
	case <-d.done:
		return false
	default:
		return true
	}
}

// PID is that of the latest start.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Stop ends the daemon by SIGTERM and fails if it must be killed.
func (d *Daemon) Stop(ctx context.Context) error {
	if !d.Running() {
		return nil
	}
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", d.Name, err)
	}
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
	case <-timer.C:
	}
	return errors.Join(fmt.Errorf("stop %s: it does not heed SIGTERM\n%s", d.Name, d.Tail()), d.Kill())
}

// Kill ends the daemon by SIGKILL and waits until it is gone.
func (d *Daemon) Kill() error {
	if !d.Running() {
		return nil
	}
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", d.Name, err)
	}
	<-d.done
	return nil
}

// Restart kills the daemon and starts it again.
func (d *Daemon) Restart(ctx context.Context) error {
	if err := d.Kill(); err != nil {
		return err
	}
	return d.Start(ctx)
}

// Tail is the end of the daemon's log: its warnings and errors, and what
// contains one of the given texts.
func (d *Daemon) Tail(about ...string) string {
	b, err := os.ReadFile(d.Log)
	if err != nil {
		return err.Error()
	}
	lines := slices.Collect(strings.Lines(string(b)))
	lines = slices.DeleteFunc(lines, func(l string) bool {
		return strings.Contains(l, "level=info") && !marking(about).in(l) ||
			marking{"loading plugin", "fsverity", "Configuration migrated", "message on inactive stream"}.in(l)
	})
	if n := len(lines); n > tailLines {
		lines = lines[n-tailLines:]
	}
	return fmt.Sprintf("--- end of the log of %s\n%s", d.Name, strings.Join(lines, ""))
}

func dialSocket(ctx context.Context, path string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// permanent is an error that another try cannot help.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent makes Poll give up.
func Permanent(err error) error { return permanent{err} }

// Poll calls f until it succeeds, and fails with its last error after the given
// time. It is for conditions of other processes, which tell nobody when they
// come true.
func Poll(ctx context.Context, within time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := f(ctx)
		var p permanent
		if err == nil || errors.As(err, &p) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("given up after %s: %w", within, err)
		case <-tick.C:
		}
	}
}
