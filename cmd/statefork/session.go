package main

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/statefork/waypoint"
)

func sessionCommand() *cli.Command {
	return &cli.Command{
		Name:  "session",
		Usage: "work with the sessions of a container: its persistent shells",
		Commands: []*cli.Command{
			sessionLsCommand(), sessionOpenCommand(), sessionCloseCommand(), sessionSendCommand(),
			sessionInterruptCommand(), sessionLogCommand(), sessionWaitCommand(), sessionAttachCommand(),
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usagef("no command \"session %s\"", name)
			}
			return cli.ShowSubcommandHelp(cmd)
		},
	}
}

// withSessions calls f with the sessions of the container that the first
// argument names.
func withSessions(ctx context.Context, cmd *cli.Command, f func(context.Context, *waypoint.Sessions) error) error {
	return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
		s, err := c.Sessions(ctx, cmd.Args().First())
		if err != nil {
			return err
		}
		defer s.Close()
		return f(ctx, s)
	})
}

// sessionArg is the second argument, or the main session.
func sessionArg(cmd *cli.Command) string {
	if name := cmd.Args().Get(1); name != "" {
		return name
	}
	return waypoint.MainSession
}

// sessionVerb is a verb that takes a container and a session. What ready
// returns is called when the command line is right.
func sessionVerb(cmd *cli.Command, ready func(*cli.Command) (onSessions, error)) *cli.Command {
	cmd.ArgsUsage = "CONTAINER [SESSION]"
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error {
		if err := nargs(cmd, 1, 2); err != nil {
			return err
		}
		f, err := ready(cmd)
		if err != nil {
			return err
		}
		return withSessions(ctx, cmd, f)
	}
	return cmd
}

type onSessions = func(context.Context, *waypoint.Sessions) error

func sessionLsCommand() *cli.Command {
	return &cli.Command{
		Name:      "ls",
		Aliases:   []string{"list"},
		Usage:     "list the sessions",
		ArgsUsage: "CONTAINER",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			return withSessions(ctx, cmd, func(ctx context.Context, s *waypoint.Sessions) error {
				list, err := s.List(ctx)
				if err != nil {
					return err
				}
				return printer(cmd).sessions(list)
			})
		},
	}
}

func (o *output) sessions(list []waypoint.Session) error {
	if o.json {
		return o.asJSON(list)
	}
	w := tabwriter.NewWriter(o.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "SESSION\tSHELL\tPID\tSTEP\tSTATE\tDIRECTORY\tSERVICE")
	for _, s := range list {
		state := "idle"
		switch {
		case s.Running:
			state = "running"
		case s.Shell == "":
			state = "ended"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\t%s\n", s.Name, dash(s.Shell), s.PID, s.LastStep, state, printable(s.Cwd), printable(s.Service))
	}
	return w.Flush()
}

// printable is text of the container's in one short line, of which a terminal
// sees nothing but characters.
func printable(text string) string {
	const most = 40
	if r := []rune(text); len(r) > most {
		text = string(r[:most-3]) + "..."
	}
	quoted := fmt.Sprintf("%q", text)
	return dash(quoted[1 : len(quoted)-1])
}

func sessionOpenCommand() *cli.Command {
	return sessionVerb(&cli.Command{
		Name:  "open",
		Usage: "start a session, unless it is there",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "shell", Usage: "name or path of a shell in the container (default: bash if there is one, else sh)"},
			&cli.StringFlag{Name: "cwd", Usage: "directory to begin in (default: the container's)"},
			&cli.StringFlag{Name: "user", Usage: "user to run as (default: the container's)"},
			&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "variable NAME=VALUE; may be repeated"},
			&cli.Uint32Flag{Name: "columns", Usage: "width of the terminal", HideDefault: true},
			&cli.Uint32Flag{Name: "rows", Usage: "height of the terminal", HideDefault: true},
		},
	}, func(cmd *cli.Command) (onSessions, error) {
		for _, v := range cmd.StringSlice("env") {
			if name, _, ok := strings.Cut(v, "="); !ok || name == "" {
				return nil, usagef("variable %q is not NAME=VALUE", v)
			}
		}
		return func(ctx context.Context, s *waypoint.Sessions) error {
			res, err := s.Open(ctx, waypoint.OpenOptions{
				Session: sessionArg(cmd), Shell: cmd.String("shell"), Cwd: cmd.String("cwd"), User: cmd.String("user"),
				Env: cmd.StringSlice("env"), Size: waypoint.Size{Columns: cmd.Uint32("columns"), Rows: cmd.Uint32("rows")},
			})
			if err != nil {
				return err
			}
			o := printer(cmd)
			if o.json {
				return o.asJSON(res)
			}
			_, err = fmt.Fprintln(o.out, res.Name)
			return err
		}, nil
	})
}

func sessionCloseCommand() *cli.Command {
	return sessionVerb(&cli.Command{
		Name:  "close",
		Usage: "end a session, its shell and what runs on its terminal",
	}, func(cmd *cli.Command) (onSessions, error) {
		return func(ctx context.Context, s *waypoint.Sessions) error {
			return s.CloseSession(ctx, sessionArg(cmd))
		}, nil
	})
}

func sessionInterruptCommand() *cli.Command {
	return sessionVerb(&cli.Command{
		Name:  "interrupt",
		Usage: "interrupt what runs in a session, or send it another signal",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "signal", Value: "INT", Usage: "name of the signal"},
		},
	}, func(cmd *cli.Command) (onSessions, error) {
		sig, err := parseSignal(cmd.String("signal"))
		return func(ctx context.Context, s *waypoint.Sessions) error {
			return s.Signal(ctx, sessionArg(cmd), sig)
		}, err
	})
}

func parseSignal(name string) (syscall.Signal, error) {
	sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
	if sig == 0 {
		return 0, usagef("no signal %q", name)
	}
	return sig, nil
}

func sessionWaitCommand() *cli.Command {
	return ownCodes(&cli.Command{
		Name:        "wait",
		Usage:       "wait for a step, and print its output",
		ArgsUsage:   "CONTAINER [SESSION]",
		Description: exitCodes,
		Flags: []cli.Flag{
			&cli.Uint64Flag{Name: "step", Usage: "number of the step (default: the newest)", HideDefault: true},
			&cli.Uint64Flag{Name: "offset", Usage: "leave out that many bytes of the output"},
			&cli.DurationFlag{Name: "wait", Usage: "return after this time, and leave the step running", HideDefault: true},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 2); err != nil {
				return err
			}
			if err := positive(cmd, "wait"); err != nil {
				return err
			}
			return stepVerb(ctx, cmd, func(ctx context.Context, s *waypoint.Sessions, f waypoint.FollowOptions) (*waypoint.StepResult, error) {
				f.Wait = cmd.Duration("wait")
				return s.Wait(ctx, waypoint.WaitOptions{
					Session: sessionArg(cmd), Step: cmd.Uint64("step"), Offset: cmd.Uint64("offset"), FollowOptions: f,
				})
			})
		},
	})
}
