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
	"time"

	"github.com/containerd/console"
	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork/waypoint"
)

// followWait is how long one look at a session's screen waits.
const followWait = 30 * time.Second

func sessionSendCommand() *cli.Command {
	return &cli.Command{
		Name:      "send",
		Usage:     "type on a session's terminal: the text, or what comes from stdin",
		ArgsUsage: "CONTAINER [SESSION [TEXT...]]",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "enter", Usage: "press the Enter key in the end"},
			&cli.BoolFlag{Name: "escapes", Aliases: []string{"e"}, Usage: `replace \n, \r, \t, \e, \b, \\, \xHH and \cX (Ctrl-X) in the text`},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, -1); err != nil {
				return err
			}
			input, err := typed(cmd, os.Stdin, isTerminal(os.Stdin))
			if err != nil {
				return err
			}
			return withSessions(ctx, cmd, func(ctx context.Context, s *waypoint.Sessions) error {
				return s.Send(ctx, sessionArg(cmd), input)
			})
		},
	}
}

func isTerminal(f *os.File) bool {
	_, err := console.ConsoleFromFile(f)
	return err == nil
}

// typed is what the arguments want to be typed. Without a text it comes from
// stdin, unless that is a terminal and --enter wants the key alone.
func typed(cmd *cli.Command, stdin io.Reader, terminal bool) (input []byte, err error) {
	switch n := cmd.NArg(); {
	case n > 2:
		input = []byte(strings.Join(cmd.Args().Slice()[2:], " "))
		if cmd.Bool("escapes") {
			input, err = unescape(string(input))
		}
	case cmd.Bool("escapes"):
		err = usagef("--escapes is for text in arguments")
	case !terminal || !cmd.Bool("enter"):
		input, err = io.ReadAll(stdin)
	}
	if cmd.Bool("enter") {
		// What the key sends. Terminals make a newline of it, unless the program
		// wants to tell the two apart.
		input = append(input, '\r')
	}
	return input, err
}

func sessionLogCommand() *cli.Command {
	return sessionVerb(&cli.Command{
		Name:  "log",
		Usage: "print all that came from a session's terminal, or what one step printed",
		Flags: []cli.Flag{
			&cli.Uint64Flag{Name: "step", Usage: "number of the step", HideDefault: true},
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on with what comes, until the step or the session ends"},
		},
	}, func(cmd *cli.Command) (onSessions, error) {
		return func(ctx context.Context, s *waypoint.Sessions) error {
			err := printer(cmd).log(ctx, s, sessionArg(cmd), cmd)
			if cmd.Bool("follow") && errors.Is(err, context.Canceled) {
				return nil // that is how one stops to follow
			}
			return err
		}, nil
	})
}

func (o *output) log(ctx context.Context, s *waypoint.Sessions, session string, cmd *cli.Command) error {
	step, follow := cmd.Uint64("step"), cmd.Bool("follow")
	switch {
	case !cmd.IsSet("step"):
		return o.screen(ctx, s, session, follow)
	case !follow:
		return o.stepLog(ctx, s, session, step)
	}
	res, err := s.Wait(ctx, waypoint.WaitOptions{
		Session: session, Step: step, FollowOptions: waypoint.FollowOptions{Output: o.out},
	})
	if res != nil && res.SkippedBytes > 0 {
		o.remark("%d bytes are not kept", res.SkippedBytes)
	}
	return err
}

// stepLog prints what is kept of a step's output at this time.
func (o *output) stepLog(ctx context.Context, s *waypoint.Sessions, session string, step uint64) error {
	for offset := uint64(0); ; {
		p, err := s.Output(ctx, session, step, nil, offset)
		if err != nil {
			return err
		}
		if err := o.piece(p, offset); err != nil || p.End || len(p.Data) == 0 {
			return err
		}
		offset = p.Next
	}
}

// screen prints what is kept of what came from a session's terminal.
func (o *output) screen(ctx context.Context, s *waypoint.Sessions, session string, follow bool) error {
	end, err := s.Screen(ctx, session, api.EndOffset, 0)
	if err != nil {
		return err
	}
	for offset := uint64(0); follow || offset < end.Next; {
		wait := time.Duration(0)
		if offset >= end.Next {
			wait = followWait
		}
		p, err := s.Screen(ctx, session, offset, wait)
		if errdefs.IsNotFound(err) && offset > 0 {
			return nil // closed meanwhile
		}
		if err != nil {
			return err
		}
		if err := o.piece(p, offset); err != nil || p.End || !follow && len(p.Data) == 0 {
			return err
		}
		offset = p.Next
	}
	return nil
}

// piece prints a piece that was asked for from an offset on.
func (o *output) piece(p *waypoint.Piece, offset uint64) error {
	if len(p.Data) > 0 && p.Offset > offset {
		o.remark("%d bytes are not kept", p.Offset-offset)
	}
	_, err := o.out.Write(p.Data)
	return err
}

func sessionAttachCommand() *cli.Command {
	return sessionVerb(&cli.Command{
		Name:  "attach",
		Usage: "connect this terminal to a session's",
		Description: `Shows what the session's programs print, and types what is typed, until the
session is closed or the detach keys are typed. The session is made if there is
none. Its shell takes commands from "statefork exec" only: what is typed while
none runs is for the next one that reads.`,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "detach-keys", Value: waypoint.DefaultDetachKeys, Usage: "keys to leave by; empty for none"},
		},
	}, func(cmd *cli.Command) (onSessions, error) {
		keys, err := waypoint.ParseKeys(cmd.String("detach-keys"))
		if err != nil {
			return nil, err
		}
		terminal, err := console.ConsoleFromFile(os.Stdin)
		if err != nil {
			return nil, usagef("stdin is no terminal: use \"session send\" and \"session log\"")
		}
		return func(ctx context.Context, s *waypoint.Sessions) error {
			return attach(ctx, printer(cmd), s, waypoint.AttachOptions{
				Session: sessionArg(cmd), In: terminal, DetachKeys: keys,
			}, terminal)
		}, nil
	})
}

// attach has the terminal in raw mode while it is connected.
func attach(ctx context.Context, o *output, s *waypoint.Sessions, a waypoint.AttachOptions, terminal console.Console) (retErr error) {
	first, err := sizeOf(terminal)
	if err != nil {
		return err
	}
	session, err := s.Open(ctx, waypoint.OpenOptions{Session: a.Session, Size: first})
	if err != nil {
		return err
	}
	if !session.Running {
		o.remark("no step runs in session %q", session.Name)
	}
	if err := terminal.SetRaw(); err != nil {
		return fmt.Errorf("set terminal to raw: %w", err)
	}
	defer func() {
		if err := terminal.Reset(); err != nil && retErr == nil {
			retErr = fmt.Errorf("reset terminal: %w", err)
		}
		if errors.Is(retErr, waypoint.ErrClosed) {
			o.remark("session %q was closed", session.Name)
			retErr = nil
		}
	}()
	// Package console leaves the terminal's own handling of newlines on.
	if err := console.ClearONLCR(terminal.Fd()); err != nil {
		return fmt.Errorf("set terminal to raw: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.Sizes, a.Out = sizes(ctx, terminal, first), o.out
	return s.Attach(ctx, a)
}

// sizes are the terminal's sizes, of which the first is known.
func sizes(ctx context.Context, terminal console.Console, first waypoint.Size) <-chan waypoint.Size {
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, syscall.SIGWINCH)
	out := make(chan waypoint.Size, 1)
	out <- first
	go func() {
		defer signal.Stop(changes)
		for {
			select {
			case <-changes:
			case <-ctx.Done():
				return
			}
			size, err := sizeOf(terminal)
			if err != nil {
				continue // it has gone, and Attach notices
			}
			select {
			case out <- size:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

func sizeOf(terminal console.Console) (waypoint.Size, error) {
	w, err := terminal.Size()
	if err != nil {
		return waypoint.Size{}, fmt.Errorf("get size of terminal: %w", err)
	}
	return waypoint.Size{Columns: uint32(w.Width), Rows: uint32(w.Height)}, nil
}
