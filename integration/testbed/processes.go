package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// process is what /proc shows of one.
type process struct {
	pid, ppid int
	state     byte
	name      string // command line, or the kernel's name in brackets
	start     string // in clock ticks since boot: tells a pid's users apart
	netns     string
	ours      bool
}

func (p process) String() string {
	name := p.name
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%d (started %s, parent %d) %s", p.pid, p.start, p.ppid, name)
}

// readProcesses lists all processes. One is ours if a mark is in its command
// line, executable, directories, cgroups, environment or mounts.
func readProcesses(m marking) ([]process, error) {
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	hostMounts, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf("read own mount namespace: %w", err)
	}
	var procs []process
	byNamespace := map[string]bool{hostMounts: false}
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, err := readProcess(pid)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		p.ours = m.inProcess(pid, p.name, byNamespace) || p.state == 'Z' && p.ppid == os.Getpid()
		procs = append(procs, p)
	}
	return procs, nil
}

func readProcess(pid int) (process, error) {
	dir := "/proc/" + strconv.Itoa(pid)
	p := process{pid: pid}
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return p, gone(err)
	}
	open, end := strings.IndexByte(string(stat), '('), strings.LastIndexByte(string(stat), ')')
	if open < 0 || end < open {
		return p, fmt.Errorf("parse %s/stat", dir)
	}
	f := strings.Fields(string(stat[end+1:]))
	const state, ppid, start = 0, 1, 19
	if len(f) <= start {
		return p, fmt.Errorf("parse %s/stat", dir)
	}
	p.state, p.start = f[state][0], f[start]
	if p.ppid, err = strconv.Atoi(f[ppid]); err != nil {
		return p, fmt.Errorf("parse %s/stat: %w", dir, err)
	}
	cmdline, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return p, gone(err)
	}
	if p.name = strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " ")); p.name == "" {
		p.name = "[" + string(stat[open+1:end]) + "]"
	}
	p.netns, _ = os.Readlink(dir + "/ns/net") // a zombie has none
	return p, nil
}

// gone makes one error of both ways in which a process vanishes while it is
// read.
func gone(err error) error {
	if strings.Contains(err.Error(), "no such process") {
		return fs.ErrNotExist
	}
	return err
}

// inProcess looks for a mark in everything that tells where a process comes
// from. Mounts are read once for each mount namespace.
func (m marking) inProcess(pid int, name string, byNamespace map[string]bool) bool {
	dir := "/proc/" + strconv.Itoa(pid)
	if m.in(name) {
		return true
	}
	for _, link := range []string{"exe", "cwd", "root"} {
		if target, err := os.Readlink(filepath.Join(dir, link)); err == nil && m.in(target) {
			return true
		}
	}
	for _, file := range []string{"cgroup", "environ"} {
		if b, err := os.ReadFile(filepath.Join(dir, file)); err == nil && m.in(string(b)) {
			return true
		}
	}
	ns, err := os.Readlink(dir + "/ns/mnt")
	if err != nil {
		return false
	}
	known, ok := byNamespace[ns]
	if !ok {
		b, err := os.ReadFile(dir + "/mountinfo")
		known = err == nil && m.in(string(b))
		byNamespace[ns] = known
	}
	return known
}

// addProcesses lists the processes that are ours, whatever is a shim or CRIU,
// zombies, and every network namespace that a process is in.
func (inv Inventory) addProcesses(procs []process) {
	for _, p := range procs {
		// a network namespace is there for as long as its users
		if p.netns != "" {
			inv.add("network namespace", p.netns, p.ours)
		}
		base := filepath.Base(strings.Fields(p.name + " x")[0])
		switch {
		case p.state == 'Z':
			inv.add("zombie", p.String(), p.ours)
		case p.ours, strings.HasPrefix(base, "containerd-shim"), base == "criu":
			inv.add("process", p.String(), p.ours)
		}
	}
}

func containsAll(s string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}
