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
		Action: withArgs(1, -1, func(ctx context.Context, cmd *cli.Command, c *waypoint.Client) error {
			for _, ref := range cmd.Args().Slice() {
				if _, node := waypoint.SplitRef(ref); node == "" {
					return usagef("%q names no node: want CONTAINER@NODE", ref)
				}
			}
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
		}),
	}
}
