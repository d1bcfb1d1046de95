package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func restoreCommand() *cli.Command {
	return &cli.Command{
		Name:      "restore",
		Usage:     "move a container in place to one of its nodes; one that is stopped is started there",
		ArgsUsage: "CONTAINER NODE",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 2); err != nil {
				return err
			}
			container, node := cmd.Args().Get(0), cmd.Args().Get(1)
			if node == "" {
				container, node = waypoint.SplitRef(container)
			}
			if node == "" {
				return usagef("usage: statefork restore CONTAINER NODE")
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				res, err := c.Restore(ctx, container, node)
				if err != nil {
					return err
				}
				return printer(cmd).result(res, "not rolled back")
			})
		},
	}
}
