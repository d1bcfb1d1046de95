package testbed

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Item is one thing on the machine that a container runtime could leave behind.
type Item struct {
	// Kind is "mount", "process", "zombie", "cgroup", "network namespace",
	// "loop device", "file" or "firewall rule".
	Kind string
	Name string
	// Ours says that a mark is in it, or that it belongs to a process with a
	// mark. Without that another program on the machine may have made it.
	Ours bool
}

func (i Item) String() string { return i.Kind + " " + i.Name }

// Inventory is what there was at one moment, by kind and name.
type Inventory map[[2]string]Item

func (inv Inventory) add(kind, name string, ours bool) {
	key := [2]string{kind, name}
	inv[key] = Item{Kind: kind, Name: name, Ours: ours || inv[key].Ours}
}

// TakeInventory lists what there is on the machine.
func TakeInventory(marks ...string) (Inventory, error) {
	inv := Inventory{}
	m := marking(marks)
	procs, err := readProcesses(m)
	if err != nil {
		return nil, err
	}
	inv.addProcesses(procs)
	return inv, errors.Join(
		inv.addMounts(m),
		inv.addCgroups(m),
		inv.addLoops(m),
		inv.addFiles(m),
		inv.addRules(m),
	)
}

// New returns what is in inv but not in before, sorted.
func (inv Inventory) New(before Inventory) []Item {
	var items []Item
	for key, item := range inv {
		if _, ok := before[key]; !ok {
			items = append(items, item)
		}
	}
	slices.SortFunc(items, func(a, b Item) int { return strings.Compare(a.String(), b.String()) })
	return items
}

// marking finds marks in text.
type marking []string

func (m marking) in(s string) bool {
	return slices.ContainsFunc(m, func(mark string) bool { return strings.Contains(s, mark) })
}

// addMounts lists the mount namespaces in which a mount outlives whoever made
// it: that of process 1, and our own if it is another.
func (inv Inventory) addMounts(m marking) error {
	var all []byte
	for _, name := range []string{"/proc/1/mountinfo", "/proc/self/mountinfo"} {
		b, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("list mounts: %w", err)
		}
		all = append(all, b...)
	}
	for line := range strings.Lines(string(all)) {
		// id, parent and device numbers differ each time
		f := strings.Fields(line)
		if len(f) < 6 {
			continue
		}
		_, source, _ := strings.Cut(line, " - ")
		inv.add("mount", f[4]+" of "+f[3]+", "+strings.TrimSpace(source), m.in(line))
	}
	return nil
}

// addCgroups lists every hierarchy, v1 and unified.
func (inv Inventory) addCgroups(m marking) error {
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // gone while we look
		}
		if err != nil {
			return err
		}
		if e.IsDir() {
			inv.add("cgroup", path, m.in(path))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list cgroups: %w", err)
	}
	return nil
}

func (inv Inventory) addLoops(m marking) error {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // detached while we look
		}
		inv.add("loop device", name+" of "+strings.TrimSpace(string(b)), m.in(string(b)))
	}
	return nil
}

// watched are the directories outside of a testbed in which a container runtime,
// its tools or CRIU keep something.
var watched = []string{
	"/run/containerd", "/run/containerd-statefork", "/run/statefork", "/run/netns", "/run/nerdctl",
	"/run/runc", "/run/criu", "/var/run/netns", "/var/lib/cni", "/var/lib/nerdctl", "/var/lib/containerd",
	"/var/lib/containerd-statefork", "/opt/containerd", "/etc/cni",
}

// caches may stay: they are of the machine and not of a container.
var caches = []string{"/run/statefork", "/run/statefork/kerndat.json", "/run/statefork/kerndat.lock", "/run/criu.kdat"}

// watchedDepth keeps large stores of other programs out.
const watchedDepth = 5

func (inv Inventory) addFiles(m marking) error {
	for _, top := range watched {
		err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if !slices.Contains(caches, path) {
				inv.add("file", path, m.in(path))
			}
			if e.IsDir() && strings.Count(path[len(top):], "/") >= watchedDepth {
				return filepath.SkipDir
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("list files: %w", err)
		}
	}
	for _, pattern := range []string{"/tmp/.criu*", "/tmp/criu*", "/run/criu*", "/run/.criu*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			if !slices.Contains(caches, name) {
				inv.add("file", name, m.in(name))
			}
		}
	}
	return nil
}

// addRules lists the firewall's rules with the tools that the machine has.
func (inv Inventory) addRules(m marking) error {
	for _, cmd := range [][]string{{"iptables-save"}, {"ip6tables-save"}, {"nft", "list", "ruleset"}} {
		path, err := exec.LookPath(cmd[0])
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		out, err := exec.CommandContext(ctx, path, cmd[1:]...).Output()
		cancel()
		if err != nil {
			continue // the kernel may lack one of the kinds of tables
		}
		table := ""
		lines := bufio.NewScanner(bytes.NewReader(out))
		for lines.Scan() {
			line := strings.TrimSpace(lines.Text())
			if line == "" || strings.HasPrefix(line, "#") || line == "COMMIT" || line == "}" {
				continue
			}
			// counters in brackets grow by themselves
			if i := strings.LastIndexByte(line, '['); i > 0 && strings.HasPrefix(line, ":") {
				line = strings.TrimSpace(line[:i])
			}
			if strings.HasPrefix(line, "*") || strings.HasPrefix(line, "table ") {
				table = line
			}
			inv.add("firewall rule", cmd[0]+": "+table+": "+line, m.in(line))
		}
	}
	return nil
}
