// Package doctor looks at a machine and says whether statefork can work there,
// and what to do where it cannot.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork/waypoint"
)

// Level says how bad a finding is.
type Level string

// A failed check keeps statefork from working, a warning takes something away.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Fail Level = "fail"
)

// Finding is the outcome of one check.
type Finding struct {
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Detail is what was found.
	Detail string `json:"detail"`
	// Fix is what to do, empty if all is well.
	Fix string `json:"fix,omitempty"`
}

// Config says what to look at; empty fields mean the machine's own.
type Config struct {
	// Address is containerd's socket.
	Address string
	// State is containerd's state directory.
	State string
	// Root is put before /proc, /sys and the directories of CNI plugins.
	Root string
}

const (
	shimName  = "containerd-shim-statefork-v1"
	minKernel = "5.10"
	minCRIU   = "4.1"
	// From socketKernel on, CRIU older than minCRIUSockets cannot dump TCP
	// sockets.
	socketKernel   = "6.16"
	minCRIUSockets = "4.2"
	minContainerd  = "2.3"
)

// Run does all checks, in the order in which a user would fix them.
func Run(ctx context.Context, cfg Config) []Finding {
	if cfg.State == "" {
		cfg.State = api.DefaultState
	}
	findings := []Finding{
		root(os.Geteuid()),
		kernel(cfg.Root),
		overlay(cfg.Root),
		cgroup(cfg.Root),
		userfaultfd(),
	}
	findings = append(findings, criu(ctx, kernelRelease(cfg.Root))...)
	findings = append(findings, memoryTracking(ctx))
	findings = append(findings, daemon(ctx, cfg)...)
	return append(findings, state(cfg.State), shim(), stray(), cni(cfg.Root), nerdctl(ctx))
}

// Failed says whether a check failed that must not.
func Failed(findings []Finding) bool {
	for _, f := range findings {
		if f.Level == Fail {
			return true
		}
	}
	return false
}

func root(uid int) Finding {
	if uid != 0 {
		return Finding{"user", Fail, fmt.Sprintf("uid %d", uid), "run as root"}
	}
	return Finding{"user", OK, "root", ""}
}

// kernelRelease returns the kernel's release, or nothing if /proc is not there.
func kernelRelease(root string) string {
	b, err := os.ReadFile(filepath.Join(root, "/proc/sys/kernel/osrelease"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func kernel(root string) Finding {
	release := kernelRelease(root)
	if release == "" {
		return Finding{"kernel", Fail, "release is unknown", "mount /proc"}
	}
	if !atLeast(release, minKernel) {
		return Finding{"kernel", Fail, release + " is too old", "use Linux " + minKernel + " or newer"}
	}
	return Finding{"kernel", OK, release, ""}
}

func overlay(root string) Finding {
	b, err := os.ReadFile(filepath.Join(root, "/proc/filesystems"))
	if err != nil {
		return Finding{"overlay", Fail, err.Error(), "mount /proc"}
	}
	for line := range strings.Lines(string(b)) {
		if strings.TrimSpace(strings.TrimPrefix(line, "nodev")) == "overlay" {
			return Finding{"overlay", OK, "in /proc/filesystems", ""}
		}
	}
	return Finding{"overlay", Fail, "not in /proc/filesystems", "load the module: modprobe overlay"}
}

// cgroup finds the hierarchy that can freeze a container.
func cgroup(root string) Finding {
	dir := filepath.Join(root, "/sys/fs/cgroup")
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	switch {
	case exists("cgroup.controllers"):
		return Finding{"cgroup", OK, "v2", ""}
	case exists("freezer") && exists("unified"):
		return Finding{"cgroup", OK, "v1 with a v2 hierarchy beside it", ""}
	case exists("freezer"):
		return Finding{"cgroup", OK, "v1", ""}
	}
	return Finding{"cgroup", Fail, "no freezer in " + dir, "mount cgroup v2, or the v1 freezer hierarchy"}
}

// findCRIU looks where the shim does: at what $STATEFORK_CRIU names, else beside
// the shim, else in PATH. containerd's own environment may be another one.
func findCRIU() (string, error) {
	if path := os.Getenv("STATEFORK_CRIU"); path != "" {
		return path, nil
	}
	if path := findShim(); path != "" {
		beside := filepath.Join(filepath.Dir(path), "criu")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	return exec.LookPath("criu")
}

func criu(ctx context.Context, kernel string) []Finding {
	least := minCRIU
	if atLeast(kernel, socketKernel) {
		least = minCRIUSockets
	}
	path, err := findCRIU()
	if err != nil {
		return []Finding{{"criu", Fail, "not in PATH", "install criu " + least + " or newer, or name one in $STATEFORK_CRIU"}}
	}
	out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput()
	version := firstVersion(string(out))
	if err != nil || version == "" {
		return []Finding{{"criu", Fail, path + " does not tell its version: " + lastLine(out, err), "install criu " + least + " or newer"}}
	}
	if !atLeast(version, least) {
		return []Finding{{"criu", Fail, version + " at " + path + " is too old", "install criu " + least + " or newer"}}
	}
	found := []Finding{{"criu", OK, version + " at " + path, ""}}
	if out, err := exec.CommandContext(ctx, path, "check").CombinedOutput(); err != nil {
		return append(found, Finding{"criu check", Fail, lastLine(out, err), "see what \"criu check\" misses in the kernel"})
	}
	return append(found, Finding{"criu check", OK, "the kernel has what criu needs", ""})
}

// daemon checks containerd and what is plugged into it.
func daemon(ctx context.Context, cfg Config) []Finding {
	const check = "containerd"
	fix := "start containerd, or give its address"
	client, err := waypoint.Connect(ctx, cfg.Address)
	if err != nil {
		return []Finding{{check, Fail, oneLine(err), fix}}
	}
	defer client.Close()
	version, err := client.Version(ctx)
	if err != nil {
		return []Finding{{check, Fail, oneLine(err), fix}}
	}
	found := Finding{check, OK, version.Version + " at " + cfg.Address, ""}
	if v := firstVersion(version.Version); v != "" && !atLeast(v, minContainerd) {
		found.Level, found.Fix = Fail, "use containerd "+minContainerd+" or newer"
	}
	return []Finding{found, snapshotter(ctx, client)}
}

func snapshotter(ctx context.Context, client *containerd.Client) Finding {
	const check = "snapshotter"
	resp, err := client.IntrospectionService().Plugins(ctx, "type==io.containerd.snapshotter.v1,id==statefork")
	if err != nil {
		return Finding{check, Warn, oneLine(err), "see containerd's log"}
	}
	if len(resp.Plugins) == 0 {
		return Finding{check, Warn, "statefork is not registered; overlayfs works, with less depth",
			"add proxy_plugins.statefork to containerd's configuration"}
	}
	if e := resp.Plugins[0].InitErr; e != nil {
		return Finding{check, Fail, e.Message, "see whether containerd-statefork-grpc runs"}
	}
	// A proxy is registered whether or not anybody listens behind it.
	sn := client.SnapshotService("statefork")
	if _, err := sn.Stat(withNamespace(ctx), "statefork-doctor"); err != nil && !errdefs.IsNotFound(err) {
		return Finding{check, Fail, oneLine(err), "see whether containerd-statefork-grpc runs"}
	}
	return Finding{check, OK, "statefork is registered and answers", ""}
}

func state(dir string) Finding {
	path := filepath.Join(dir, "io.containerd.runtime.v2.task")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return Finding{"state directory", Warn, path + " does not exist", "give containerd's state directory"}
	} else if err != nil {
		return Finding{"state directory", Fail, err.Error(), "run as root"}
	}
	return Finding{"state directory", OK, path, ""}
}

// findShim looks where containerd does: in PATH, and beside its own program.
func findShim() string {
	if path, err := exec.LookPath(shimName); err == nil {
		return path
	}
	if path, err := exec.LookPath("containerd"); err == nil {
		beside := filepath.Join(filepath.Dir(path), shimName)
		if _, err := os.Stat(beside); err == nil {
			return beside
		}
	}
	return ""
}

func shim() Finding {
	if path := findShim(); path != "" {
		return Finding{"shim", OK, path, ""}
	}
	return Finding{"shim", Fail, shimName + " is not in PATH", "install it beside containerd or in containerd's PATH"}
}

// stray looks for a program with the runtime's name, which nerdctl would run as
// an OCI runtime instead of asking for the shim.
func stray() Finding {
	if path, err := exec.LookPath(api.RuntimeName); err == nil {
		return Finding{"runtime name", Fail, path + " hides the runtime from nerdctl", "remove the file"}
	}
	return Finding{"runtime name", OK, api.RuntimeName, ""}
}

func cni(root string) Finding {
	dirs := []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni", "/usr/local/libexec/cni"}
	if env := os.Getenv("CNI_PATH"); env != "" {
		dirs = append([]string{env}, dirs...)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(root, dir, "bridge")); err == nil {
			return Finding{"cni plugins", OK, dir, ""}
		}
	}
	return Finding{"cni plugins", Warn, "not found", "install the CNI plugins for containers with a network of their own"}
}

func nerdctl(ctx context.Context) Finding {
	path, err := exec.LookPath("nerdctl")
	if err != nil {
		return Finding{"nerdctl", Warn, "not in PATH", "install nerdctl, or use ctr"}
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return Finding{"nerdctl", Warn, path + ": " + oneLine(err), "reinstall nerdctl"}
	}
	return Finding{"nerdctl", OK, firstVersion(string(out)) + " at " + path, ""}
}

var versionRE = regexp.MustCompile(`\d+\.\d+(\.\d+)?`)

func firstVersion(s string) string { return versionRE.FindString(s) }

// atLeast compares the leading numbers of two dotted versions.
func atLeast(have, want string) bool {
	h, w := numbers(have), numbers(want)
	for i, n := range w {
		if i >= len(h) || h[i] != n {
			return i < len(h) && h[i] > n
		}
	}
	return true
}

func numbers(version string) []int {
	var list []int
	for part := range strings.SplitSeq(versionRE.FindString(version), ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return list
		}
		list = append(list, n)
	}
	return list
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// lastLine is what a failed program said last.
func lastLine(out []byte, err error) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		return last
	}
	if err != nil {
		return oneLine(err)
	}
	return "it says nothing"
}
