package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func treeCommand() *cli.Command {
	return &cli.Command{
		Name:      "tree",
		Usage:     "show a container's nodes, where it stands, and its forks",
		ArgsUsage: "CONTAINER",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				t, err := c.Tree(ctx, cmd.Args().First())
				if err != nil {
					return err
				}
				return printer(cmd).tree(t)
			})
		},
	}
}
