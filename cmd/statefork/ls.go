package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func lsCommand() *cli.Command {
	return &cli.Command{
		Name:    "ls",
		Aliases: []string{"list"},
		Usage:   "list the containers that can have nodes",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 0, 0); err != nil {
				return err
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				list, err := c.List(ctx)
				if err != nil {
					return err
				}
				return printer(cmd).containers(list)
			})
		},
	}
}
