package testbed

import (
	"context"
	"errors"
	"fmt"
)

// addNetwork makes the testbed's own network namespace, with a loopback
// interface.
func (tb *Testbed) addNetwork(ctx context.Context) error {
	if _, err := tb.Exec(ctx, "ip", "netns", "add", tb.Name); err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	tb.netns = "/run/netns/" + tb.Name
	if _, err := tb.Exec(ctx, "ip", "link", "set", "lo", "up"); err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	return nil
}

func (tb *Testbed) removeNetwork(ctx context.Context) error {
	tb.netns = ""
	if _, err := tb.Exec(ctx, "ip", "netns", "delete", tb.Name); err != nil {
		return errors.Join(errors.New("remove network namespace"), err)
	}
	return nil
}

// wrapper is what puts a program into the testbed's network namespace.
func (tb *Testbed) wrapper() []string {
	if tb.netns == "" {
		return nil
	}
	return []string{"nsenter", "--net=" + tb.netns, "--"}
}
