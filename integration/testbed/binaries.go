package testbed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
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

// ours are the binaries that are built from this module, and how.
var ours = []struct{ name, cgo string }{
	{"containerd-shim-statefork-v1", "1"},
	{"containerd-statefork-grpc", "0"},
	{"statefork", "0"},
}

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

// build makes each of our binaries that is older than any source file, with the
// Makefile's flags, so that both find each other's results fresh.
func (b Binaries) build(ctx context.Context) error {
	newest, err := newestSource(b.Root)
	if err != nil {
		return err
	}
	for _, o := range ours {
		target := filepath.Join(b.Dir, o.name)
		if info, err := os.Stat(target); err == nil && info.ModTime().After(newest) {
			continue
		}
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-tags", "seccomp",
			"-o", target, "./cmd/"+o.name)
		cmd.Dir = b.Root
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+o.cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", o.name, err, out)
		}
		now := time.Now()
		if err := os.Chtimes(target, now, now); err != nil {
			return fmt.Errorf("build %s: %w", o.name, err)
		}
	}
	return nil
}

// newestSource is the time of the latest change to what the binaries are made
// of.
func newestSource(root string) (time.Time, error) {
	var newest time.Time
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if e.IsDir() && (rel == "bin" || rel == ".git" || rel == "contrib" || rel == "integration") {
			return filepath.SkipDir
		}
		source := strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go")
		if e.IsDir() || !source && e.Name() != "go.mod" && e.Name() != "go.sum" {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.ModTime().After(newest) {
			newest = info.ModTime()
		}
		return nil
	})
	if err != nil {
		return newest, fmt.Errorf("look for changed sources: %w", err)
	}
	return newest, nil
}
