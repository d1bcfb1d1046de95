package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// commandTimeout ends a command that hangs.
const commandTimeout = 2 * time.Minute

// Output is what a command left.
type Output struct {
	Stdout, Stderr string
	Code           int
}

// Exec runs a program of the testbed's bin, or of the machine, and fails unless
// it exits with 0. The output is there in both cases.
func (tb *Testbed) Exec(ctx context.Context, name string, args ...string) (Output, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd := tb.Command(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// A child of the command that holds its output open must not hold us.
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	out := Output{Stdout: stdout.String(), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, ctx.Err())
		}
		err = fmt.Errorf("%s: %w\n%s%s", typed(name, args), err, out.Stdout, out.Stderr)
	}
	return out, err
}

// Command prepares a program of the testbed's bin, or of the machine, with the
// testbed's environment.
func (tb *Testbed) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	path := filepath.Join(tb.bin.Dir, name)
	if _, err := exec.LookPath(path); err != nil {
		path = name
	}
	argv := slices.Concat(tb.wrapper(), []string{path}, args)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = tb.environ()
	return cmd
}

// Namespace is one containerd namespace of a testbed.
type Namespace struct {
	*Testbed
	// NS is its name.
	NS string
}

// Namespace returns the namespace of that name. The name should contain the
// testbed's: cgroups are found again by it.
func (tb *Testbed) Namespace(name string) *Namespace { return &Namespace{Testbed: tb, NS: name} }

// Nerdctl runs nerdctl in the namespace.
func (n *Namespace) Nerdctl(ctx context.Context, args ...string) (Output, error) {
	return n.Exec(ctx, "nerdctl", n.NerdctlArgs(args...)...)
}

// NerdctlArgs puts nerdctl's global flags before args.
func (n *Namespace) NerdctlArgs(args ...string) []string {
	return append([]string{"--namespace", n.NS}, args...)
}

// Ctr runs containerd's own tool in the namespace.
func (n *Namespace) Ctr(ctx context.Context, args ...string) (Output, error) {
	return n.Exec(ctx, "ctr", append([]string{"--address", n.Address(), "--namespace", n.NS}, args...)...)
}

// Statefork runs our tool in the namespace.
func (n *Namespace) Statefork(ctx context.Context, args ...string) (Output, error) {
	return n.Exec(ctx, "statefork", append([]string{"--address", n.Address(), "--namespace", n.NS, "--state", n.State()}, args...)...)
}

// typed is a command as one would type it, with scripts cut short.
func typed(name string, args []string) string {
	words := []string{filepath.Base(name)}
	for _, a := range args {
		if first, _, many := strings.Cut(a, "\n"); many {
			a = first + "…"
		}
		words = append(words, a)
	}
	return strings.Join(words, " ")
}
