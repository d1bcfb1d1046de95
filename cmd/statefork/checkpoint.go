package main

import (
	"context"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/waypoint"
)

func checkpointCommand() *cli.Command {
	return &cli.Command{
		Name:      "checkpoint",
		Usage:     "make a node of a running container, which goes on from there",
		ArgsUsage: "CONTAINER",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "name", Usage: "name of the node, unique in the container"},
			&cli.StringSliceFlag{Name: "label", Aliases: []string{"l"}, Usage: "label KEY=VALUE to keep with the node; may be repeated"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 1, 1); err != nil {
				return err
			}
			labels, err := parseLabels(cmd.StringSlice("label"))
			if err != nil {
				return err
			}
			return withClient(ctx, cmd, func(ctx context.Context, c *waypoint.Client) error {
				res, err := c.Checkpoint(ctx, cmd.Args().First(), cmd.String("name"), labels)
				if err != nil {
					return err
				}
				return printer(cmd).result(res, "not part of the node")
			})
		},
	}
}

func parseLabels(list []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, l := range list {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, usagef("label %q is not KEY=VALUE", l)
		}
		labels[k] = v
	}
	return labels, nil
}
