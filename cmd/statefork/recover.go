package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func recoverCommand() *cli.Command {
	return &cli.Command{
		Name:      "recover",
		Usage:     "start a container again whose shim died in the middle of a checkpoint or restore",
		ArgsUsage: "CONTAINER",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				res, err := c.Recover(ctx, cmd.Args().First())
				if err != nil {
					return err
				}
				return printer(cmd).result(res, "not rolled back")
			})
		},
	}
}
