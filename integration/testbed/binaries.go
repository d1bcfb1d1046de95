package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Binaries are the programs that a testbed runs.
type Binaries struct {
	// Dir holds all of them, criu and the shims among them.
	Dir string
	// Root is the directory of the module.
	Root string

	Containerd, Snapshotterd, Nerdctl, Ctr, Runc, CRIU, Statefork string
}

// ErrMissing says that the machine lacks something that a testbed needs.
var ErrMissing = errors.New("not there")

// FindBinaries finds what "make setup" has put into bin, and builds what is
// stale of the rest there.
func FindBinaries(ctx context.Context) (Binaries, error) {
	var b Binaries
	root, err := moduleRoot()
	if err != nil {
		return b, err
	}
	b.Root, b.Dir = root, filepath.Join(root, "bin")
	if os.Geteuid() != 0 {
		return b, fmt.Errorf("root: %w", ErrMissing)
	}
	for _, name := range []string{"containerd", "nerdctl", "ctr", "runc", "criu", "containerd-shim-runc-v2"} {
		if _, err := os.Stat(filepath.Join(b.Dir, name)); err != nil {
			return b, fmt.Errorf("bin/%s (\"make setup\" puts it there): %w", name, ErrMissing)
		}
	}
	b.Containerd, b.Nerdctl, b.Ctr = filepath.Join(b.Dir, "containerd"), filepath.Join(b.Dir, "nerdctl"), filepath.Join(b.Dir, "ctr")
	b.Runc, b.CRIU = filepath.Join(b.Dir, "runc"), filepath.Join(b.Dir, "criu")
	b.Snapshotterd, b.Statefork = filepath.Join(b.Dir, "containerd-statefork-grpc"), filepath.Join(b.Dir, "statefork")
	return b, b.build(ctx)
}

// moduleRoot is the directory of go.mod above the working directory: tests and
// "go run" are started within the module.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("find the module: no go.mod above the working directory")
		}
	}
}

// build has the Makefile make what is older than the sources, with its flags:
// a test never runs a program that was built in another way.
func (b Binaries) build(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "make", "--silent", "build")
	cmd.Dir = b.Root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the binaries: %w\n%s", err, out)
	}
	return nil
}
