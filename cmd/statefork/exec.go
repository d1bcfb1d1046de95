package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

// Exit codes of the verbs that else end with a step's, as their help tells them.
const (
	exitWaits   = 122
	exitRuns    = 123
	exitTimeout = 124
	exitOwn     = 125
)

const exitCodes = `The exit code is the step's, or
  122  the step waits for input
  123  the step still runs
  124  the step was ended at a time limit
  125  statefork itself has failed, as the message on stderr tells
With --json the result tells them apart from the same codes of a step.`

const execDescription = `Runs a command in a session, which is a shell that keeps its directory,
variables, functions and jobs from one command to the next. The session is made
if there is none. What the command prints goes to stdout, messages to stderr.

One COMMAND is text for the shell; several are a program and its arguments,
which the shell gets quoted.

Ctrl-C interrupts the command; once more, statefork stops waiting for it. With
--timeout before "exec" it stops waiting after that time. The step goes on then.

With --background the command runs as a service in a session of its own, whose
name is printed.

` + exitCodes

// exitError is a failure with an exit code of its own; without err it has been
// told, or there is nothing to tell.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// ownFailure keeps an error's message, but not its exit code.
func ownFailure(err error) error {
	if _, ok := errors.AsType[*exitError](err); err == nil || ok {
		return err
	}
	return &exitError{exitOwn, err}
}

// ownCodes makes a command that ends with a step's exit code.
func ownCodes(cmd *cli.Command) *cli.Command {
	cmd.OnUsageError = func(_ context.Context, _ *cli.Command, err error, _ bool) error {
		return ownFailure(&usageError{err.Error()})
	}
	action := cmd.Action
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error { return ownFailure(action(ctx, cmd)) }
	return cmd
}

func execCommand() *cli.Command {
	return ownCodes(&cli.Command{
		Name:        "exec",
		Usage:       "run a command in a session of a container",
		ArgsUsage:   "CONTAINER -- COMMAND...",
		Description: execDescription,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "session", Aliases: []string{"s"}, Value: waypoint.MainSession, Usage: "session to run it in"},
			&cli.DurationFlag{Name: "timeout", Usage: "end the command after this time", HideDefault: true},
			&cli.DurationFlag{Name: "idle-timeout", Usage: "end the command when it prints nothing for this time", HideDefault: true},
			&cli.DurationFlag{Name: "wait", Usage: "return after this time, and leave the command running", HideDefault: true},
			&cli.Uint64Flag{Name: "output-limit", Usage: "how many bytes of output are kept: half the first, half the last (default: 16 MiB)", HideDefault: true},
			&cli.BoolFlag{Name: "background", Aliases: []string{"b"}, Usage: "run it as a service, and return"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 2, -1); err != nil {
				return err
			}
			if err := positive(cmd, "timeout", "idle-timeout", "wait"); err != nil {
				return err
			}
			return stepVerb(ctx, cmd, func(ctx context.Context, s *waypoint.Sessions, f waypoint.FollowOptions) (*waypoint.StepResult, error) {
				f.Wait = cmd.Duration("wait")
				return s.Exec(ctx, waypoint.ExecOptions{
					Session:       cmd.String("session"),
					Command:       shellText(cmd.Args().Tail()),
					Timeout:       cmd.Duration("timeout"),
					IdleTimeout:   cmd.Duration("idle-timeout"),
					OutputLimit:   cmd.Uint64("output-limit"),
					Background:    cmd.Bool("background"),
					FollowOptions: f,
				})
			})
		},
	})
}

// positive refuses durations that would mean something else to the shim.
func positive(cmd *cli.Command, flags ...string) error {
	for _, name := range flags {
		if cmd.IsSet(name) && cmd.Duration(name) <= 0 {
			return usagef("--%s must be more than 0", name)
		}
	}
	return nil
}

// stepVerb follows a step, and ends as it does.
func stepVerb(ctx context.Context, cmd *cli.Command,
	follow func(context.Context, *waypoint.Sessions, waypoint.FollowOptions) (*waypoint.StepResult, error),
) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	// The first interrupt is for the step, and so must not end ctx as well.
	ctx = context.WithoutCancel(ctx)
	return withSessions(ctx, cmd, func(ctx context.Context, s *waypoint.Sessions) error {
		o := printer(cmd)
		i := &interrupter{session: s, signals: signals, o: o}
		ctx, stop := i.watch(ctx)
		defer stop()
		f := waypoint.FollowOptions{ReturnOnInput: true, Known: i.known}
		switch {
		case o.json:
		case cmd.Bool("background"):
			f.Output = o.msg
		default:
			f.Output = o.out
		}
		res, err := follow(ctx, s, f)
		return o.step(cmd.Args().First(), res, err, cmd.Bool("background"))
	})
}

// interrupter passes on the first interrupt, and ends the waiting at the second.
type interrupter struct {
	session interface {
		Interrupt(ctx context.Context, session string) error
	}
	signals <-chan os.Signal
	o       *output

	begun chan waypoint.StepRef
}

// known is told which step is to be interrupted.
func (i *interrupter) known(r waypoint.StepRef) { i.begun <- r }

// watch returns a context that ends at the second interrupt, or when the process
// is to end. stop waits until nobody watches any more.
func (i *interrupter) watch(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	i.begun = make(chan waypoint.StepRef, 1)
	var done sync.WaitGroup
	done.Go(func() {
		defer cancel()
		i.pass(ctx)
	})
	return ctx, func() {
		cancel()
		done.Wait()
	}
}

// pass returns when the waiting is over.
func (i *interrupter) pass(ctx context.Context) {
	if !i.interrupted(ctx) {
		return
	}
	// What is not known yet is interrupted when it is, unless somebody gives up.
	select {
	case r := <-i.begun:
		if err := i.session.Interrupt(ctx, r.Session); err != nil && ctx.Err() == nil {
			i.o.remark("%s", message(err, ""))
		}
	case <-i.signals:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-i.signals:
	case <-ctx.Done():
	}
}

// interrupted waits for an interrupt; anything else ends the waiting.
func (i *interrupter) interrupted(ctx context.Context) bool {
	select {
	case sig := <-i.signals:
		return sig == os.Interrupt
	case <-ctx.Done():
		return false
	}
}

// step prints what became of a step, and returns the error for its exit code.
func (o *output) step(container string, r *waypoint.StepResult, err error, background bool) error {
	if err != nil && (r == nil || classCode(err) != exitEnded) {
		return err
	}
	switch {
	case o.json:
		if err := o.asJSON(r); err != nil {
			return err
		}
	case background && r.StillRunning:
		if _, err := fmt.Fprintln(o.out, r.Session); err != nil {
			return err
		}
	default:
		o.stepRemarks(container, r)
	}
	if background && r.StillRunning && err == nil {
		return nil
	}
	return stepCode(r)
}

// stepCode is the exit code of a step.
func stepCode(r *waypoint.StepResult) error {
	code := r.ExitCode
	switch {
	case r.WaitingForInput:
		code = exitWaits
	case r.StillRunning:
		code = exitRuns
	case r.TimedOut:
		code = exitTimeout
	case !r.ExitKnown:
		return &exitError{exitOwn, fmt.Errorf("step %d of session %q has ended, but how is lost", r.Step, r.Session)}
	case code == 0:
		return nil
	}
	return &exitError{code: code}
}

// stepRemarks tells what the output does not, and what can be done.
func (o *output) stepRemarks(container string, r *waypoint.StepResult) {
	what := fmt.Sprintf("step %d of session %q", r.Step, r.Session)
	wait := fmt.Sprintf("\"statefork session wait %s --offset %d\"", reference(container, r.StepRef), r.NextOffset)
	if r.SkippedBytes > 0 {
		o.remark("%d bytes of output had gone before they could be read", r.SkippedBytes)
	}
	if r.NewShell {
		o.remark("%s had a new shell, because the one before has ended", what)
	}
	switch {
	case r.WaitingForInput:
		o.remark("%s waits for input: give it by \"statefork session send %s %s\", and go on by %s", what, quote(container, false), r.Session, wait)
	case r.StillRunning:
		o.remark("%s still runs: wait for it by %s, or interrupt it by \"statefork session interrupt %s %s\"", what, wait, quote(container, false), r.Session)
	case r.TimedOut:
		o.remark("%s was ended at its time limit", what)
	}
	if r.ShellExited {
		o.remark("the shell of session %q has ended in step %d", r.Session, r.Step)
	}
}
