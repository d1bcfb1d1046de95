package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func forkCommand() *cli.Command {
	return &cli.Command{
		Name:      "fork",
		Usage:     "start new containers at a node, or at a checkpoint made now",
		ArgsUsage: "CONTAINER[@NODE]",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "name", Usage: "name of the fork; with -n, NAME-1, NAME-2 and so on"},
			&cli.IntFlag{Name: "count", Aliases: []string{"n"}, Value: 1, Usage: "how many siblings to start"},
			&cli.StringFlag{Name: "log-uri", Usage: "where output goes (default: nerdctl's log, else nowhere)"},
			&cli.StringFlag{Name: "namespace", Usage: "containerd namespace; here without -n"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			if n := cmd.Int("count"); n < 1 {
				return usagef("count %d is less than 1", n)
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				res, err := c.Fork(ctx, cmd.Args().First(), waypoint.ForkOptions{
					Count:  cmd.Int("count"),
					Name:   cmd.String("name"),
					LogURI: cmd.String("log-uri"),
				})
				if err != nil {
					return err
				}
				if err := printer(cmd).fork(res); err != nil {
					return err
				}
				if res.Err() != nil {
					return errReported
				}
				return nil
			})
		},
	}
}
