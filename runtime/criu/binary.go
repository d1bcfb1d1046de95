package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// pathVariable names the CRIU executable to use.
	pathVariable = "STATEFORK_CRIU"
	// oldest is the oldest CRIU that runs on current kernels and has the
	// network lock "skip" in its service.
	oldest = 40100
	// oldestSockets is the oldest that can dump a TCP socket on kernel 6.16 or
	// newer: these no longer know, for other than unix sockets, options that older ones ask
	// for.
	oldestSockets = 40200
)

// required is the oldest version that will do here.
var required = sync.OnceValue(func() int {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return oldest
	}
	return requiredOn(unix.ByteSliceToString(uts.Release[:]))
})

// requiredOn is the oldest version that will do on a kernel release.
func requiredOn(release string) int {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return oldest
	}
	if major > 6 || major == 6 && minor >= 16 {
		return oldestSockets
	}
	return oldest
}

// advice says how to come to a usable CRIU.
func advice() string {
	return fmt.Sprintf("install criu %s or newer, or name one in $%s", &Binary{Version: required()}, pathVariable)
}

// Binary is a CRIU executable that is new enough.
type Binary struct {
	// Path is absolute.
	Path string
	// Version is 10000*major + 100*minor + sublevel: 40201 is 4.2.1.
	Version int
}

// Find returns the CRIU to use: the one that $STATEFORK_CRIU names, else the
// first that is new enough of "criu" beside the running executable and "criu"
// in PATH. It fails with errdefs.ErrUnavailable if there is none.
func Find(ctx context.Context) (*Binary, error) {
	if path := os.Getenv(pathVariable); path != "" {
		b, err := inspect(ctx, path)
		if err != nil {
			return nil, fmt.Errorf("use criu of $%s: %w", pathVariable, err)
		}
		return b, nil
	}
	var errs []error
	for _, path := range candidates() {
		b, err := inspect(ctx, path)
		if err == nil {
			return b, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("find criu: %s: %w", advice(), errdefs.ErrUnavailable)
	}
	return nil, errs[0]
}

// candidates returns the executables that are there, the preferred one first.
func candidates() []string {
	var paths []string
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "criu")
		if _, err := os.Stat(beside); err == nil {
			paths = append(paths, beside)
		}
	}
	if path, err := exec.LookPath("criu"); err == nil {
		paths = append(paths, path)
	}
	return paths
}

// inspect asks the executable at path for its version.
func inspect(ctx context.Context, path string) (*Binary, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("find criu: %w", err)
	}
	b := &Binary{Path: path}
	out, err := b.run(ctx, "--version")
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("run %q: %w", path, ctx.Err())
		}
		return nil, fmt.Errorf("run %q: %w; %s: %w", path, err, advice(), errdefs.ErrUnavailable)
	}
	if b.Version, err = parseVersion(out); err != nil {
		return nil, fmt.Errorf("read version of %q: %w; %s: %w", path, err, advice(), errdefs.ErrUnavailable)
	}
	if b.Version < required() {
		return nil, fmt.Errorf("criu %s at %q is too old; %s: %w", b, path, advice(), errdefs.ErrUnavailable)
	}
	return b, nil
}

// String returns the version as people write it: "4.2.1".
func (b *Binary) String() string {
	return fmt.Sprintf("%d.%d.%d", b.Version/10000, b.Version/100%100, b.Version%100)
}

// Check asks CRIU whether the kernel has what CRIU cannot do without. It fails
// with errdefs.ErrUnavailable if not.
func (b *Binary) Check(ctx context.Context) error {
	out, err := b.run(ctx, "check")
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("check kernel by criu: %w", ctx.Err())
	}
	summary, _ := summarize(strings.NewReader(out))
	return &Error{Op: "check", Summary: orElse(summary, err.Error()), Err: errdefs.ErrUnavailable}
}

// run runs CRIU with one argument and returns what it printed.
func (b *Binary) run(ctx context.Context, arg string) (string, error) {
	cmd := b.command(ctx, arg)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// command prepares to run CRIU with nothing of our environment but the search
// path, in which CRIU finds its tools (tar, nft, iptables-restore).
func (b *Binary) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.Path, args...)
	cmd.Env = []string{"PATH=" + orElse(os.Getenv("PATH"), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")}
	cmd.Dir = "/"
	return cmd
}

// parseVersion reads what "criu --version" prints: "Version: 4.1" with an
// optional sublevel or suffix, among other lines.
func parseVersion(out string) (int, error) {
	for line := range strings.Lines(out) {
		v, ok := strings.CutPrefix(strings.TrimSpace(line), "Version:")
		if !ok {
			continue
		}
		v, _, _ = strings.Cut(strings.TrimSpace(v), "-")
		var parts [3]int
		for i, s := range strings.SplitN(v, ".", len(parts)) {
			n, err := strconv.Atoi(s)
			if err != nil || n < 0 || n > 99 {
				return 0, fmt.Errorf("unknown form of version %q", v)
			}
			parts[i] = n
		}
		return parts[0]*10000 + parts[1]*100 + parts[2], nil
	}
	return 0, errors.New("no version in its output")
}

// orElse returns s, or fallback if s is empty.
func orElse(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}
