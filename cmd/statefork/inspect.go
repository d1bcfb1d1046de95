package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func inspectCommand() *cli.Command {
	return &cli.Command{
		Name:      "inspect",
		Usage:     "tell everything about a container or a node, as JSON",
		ArgsUsage: "CONTAINER[@NODE]",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				ref := cmd.Args().First()
				var (
					detail any
					err    error
				)
				if _, node := waypoint.SplitRef(ref); node != "" {
					detail, err = c.InspectNode(ctx, ref)
				} else {
					detail, err = c.InspectContainer(ctx, ref)
				}
				if err != nil {
					return err
				}
				return printer(cmd).asJSON(detail)
			})
		},
	}
}
