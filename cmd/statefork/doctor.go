package main

import (
	"context"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork/doctor"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "look whether statefork can work on this machine, and say what to do",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if err := nargs(cmd, 0, 0); err != nil {
				return err
			}
			ctx, cancel := deadline(ctx, cmd)
			defer cancel()
			findings := doctor.Run(ctx, doctor.Config{Address: cmd.String("address"), State: cmd.String("state")})
			if err := printer(cmd).findings(findings); err != nil {
				return err
			}
			if doctor.Failed(findings) {
				return errReported
			}
			return nil
		},
	}
}
