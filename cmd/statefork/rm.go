package main

import (
	"context"
	"errors"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

func rmCommand() *cli.Command {
	return &cli.Command{
		Name:      "rm",
		Usage:     "remove nodes; what descends from them stays",
		ArgsUsage: "CONTAINER@NODE...",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, -1); err != nil {
				return err
			}
			for _, ref := range cmd.Args().Slice() {
				if _, node := waypoint.SplitRef(ref); node == "" {
					return usagef("%q names no node: want CONTAINER@NODE", ref)
				}
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				// As rm(1) does: go on after an error, and fail in the end.
				removed, errs := []statefork.Node{}, []error{}
				for _, ref := range cmd.Args().Slice() {
					n, err := c.Remove(ctx, ref)
					if err != nil {
						errs = append(errs, err)
						continue
					}
					removed = append(removed, *n)
				}
				return errors.Join(append(errs, printer(cmd).removed(removed))...)
			})
		},
	}
}
