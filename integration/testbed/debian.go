package testbed

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Debian is the name of the image with python3, sqlite3 and procps.
const Debian = "localhost/debian:latest"

// debianRecipe is what debootstrap is told, and debianTrim what is removed then:
// a container needs no documentation and no packages to install again.
var (
	debianRecipe = []string{"--variant=minbase", "--include=python3,sqlite3,procps"}
	debianTrim   = []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"}
)

// ImportDebian puts the Debian image into the namespace, unpacked for our
// snapshotter. It is made by debootstrap from the machine's own mirror the first
// time, and then kept in the user's cache.
func (n *Namespace) ImportDebian(ctx context.Context) error {
	path, err := n.debianImage(ctx)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open image of Debian: %w", err)
	}
	defer f.Close()
	return n.importImage(ctx, f, Snapshotter)
}

// debianImage returns the archive's path in the cache. Its name follows from all
// that its contents depend on but the mirror's state.
func (tb *Testbed) debianImage(ctx context.Context) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find cache: %w", err)
	}
	suite, err := debianSuite()
	if err != nil {
		return "", err
	}
	recipe := strings.Join(append(append([]string{Debian, suite, runtime.GOARCH}, debianRecipe...), debianTrim...), " ")
	sum := sha256.Sum256([]byte(recipe))
	target := filepath.Join(cache, "statefork", "debian-"+hex.EncodeToString(sum[:6])+".tar")
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	tb.logf("make an image of Debian %s (once; kept as %s)", suite, target)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return "", fmt.Errorf("make cache: %w", err)
	}
	if err := tb.makeDebian(ctx, suite, target); err != nil {
		return "", fmt.Errorf("make image of Debian: %w", err)
	}
	return target, nil
}

func (tb *Testbed) makeDebian(ctx context.Context, suite, target string) (retErr error) {
	root := tb.path("debian")
	// mounts that debootstrap makes in it are gone when it has ended
	defer func() { retErr = errors.Join(retErr, os.RemoveAll(root)) }()
	args := append(append([]string{}, debianRecipe...), suite, root)
	if mirror := debianMirror(); mirror != "" {
		args = append(args, mirror)
	}
	cmd := exec.CommandContext(ctx, "debootstrap", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("debootstrap: %w\n%s", err, out)
	}
	for _, dir := range debianTrim {
		if err := os.RemoveAll(filepath.Join(root, dir)); err != nil {
			return err
		}
	}
	tarball := tb.path("debian.tar")
	defer os.Remove(tarball)
	// sorted and without the time of day, so that the same packages make the
	// same layer
	tar := exec.CommandContext(ctx, "tar", "--sort=name", "--numeric-owner", "--xattrs", "-C", root, "-cf", tarball, ".")
	if out, err := tar.CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %w\n%s", err, out)
	}
	l, err := fileLayer(tarball)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(target), "debian-*.part")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	cfg := ocispec.ImageConfig{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, Cmd: []string{"bash"}}
	if err := errors.Join(writeImage(f, Debian, cfg, l), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), target)
}

func fileLayer(path string) (layer, error) {
	f, err := os.Open(path)
	if err != nil {
		return layer{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return layer{}, err
	}
	d, err := digest.FromReader(f)
	return layer{d, info.Size(), func() (io.ReadCloser, error) { return os.Open(path) }}, err
}

// debianSuite is the machine's own release: its mirror surely has that.
func debianSuite() (string, error) {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("find the machine's release: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return strings.Trim(strings.TrimSpace(v), `"`), nil
		}
	}
	return "", errors.New("find the machine's release: no codename in /etc/os-release")
}

// debianMirror is the first that apt uses; without one debootstrap's own applies.
func debianMirror() string {
	out, err := exec.Command("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		return ""
	}
	first, _, _ := bytes.Cut(out, []byte("\n"))
	return string(first)
}
