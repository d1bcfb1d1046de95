package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"regexp"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/integration/testbed"
)

// machine is where a run took place; without it figures say nothing.
type machine struct {
	Kernel    string `json:"kernel"`
	Arch      string `json:"arch"`
	Cores     int    `json:"cores"`
	MemoryMiB uint64 `json:"memory_mib"`
	// Load is the load average of the minute before the rounds.
	Load       float64 `json:"load_average"`
	Cgroup     string  `json:"cgroup"`
	FileSystem string  `json:"file_system"`
	CRIU       string  `json:"criu"`
	Containerd string  `json:"containerd"`
	Runc       string  `json:"runc"`
	Go         string  `json:"go"`
}

func (m machine) String() string {
	return fmt.Sprintf("Linux %s on %s, %d cores, %d MiB of memory, %s, all files on %s, a load average of %.1f before the run; CRIU %s, containerd %s, runc %s, %s",
		m.Kernel, m.Arch, m.Cores, m.MemoryMiB, m.Cgroup, m.FileSystem, m.Load, m.CRIU, m.Containerd, m.Runc, m.Go)
}

func describeMachine(ctx context.Context, tb *testbed.Testbed) (machine, error) {
	m := machine{Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Cgroup: "cgroup v1", Go: runtime.Version()}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return m, fmt.Errorf("describe machine: %w", err)
	}
	m.Kernel = unix.ByteSliceToString(uts.Release[:])
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return m, fmt.Errorf("describe machine: %w", err)
	}
	m.MemoryMiB = uint64(info.Totalram) * uint64(info.Unit) >> 20
	// The kernel counts in 65536ths.
	m.Load = math.Round(float64(info.Loads[0])/65536*10) / 10
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		m.Cgroup = "cgroup v2"
	}
	var err error
	if m.FileSystem, err = fileSystem(tb.Dir); err != nil {
		return m, err
	}
	for _, tool := range []struct {
		name    string
		version *string
	}{{"criu", &m.CRIU}, {"containerd", &m.Containerd}, {"runc", &m.Runc}} {
		out, err := tb.Exec(ctx, tool.name, "--version")
		if err != nil {
			return m, fmt.Errorf("describe machine: %w", err)
		}
		*tool.version = versionRE.FindString(out.Stdout)
	}
	return m, nil
}

var versionRE = regexp.MustCompile(`\d+\.\d+(\.\d+)?`)

// fileSystem names the type of the file system at path, which is that of the
// mount with the longest prefix of it.
func fileSystem(path string) (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("describe machine: %w", err)
	}
	longest, kind := "", ""
	for line := range strings.Lines(string(b)) {
		left, right, _ := strings.Cut(line, " - ")
		f, source := strings.Fields(left), strings.Fields(right)
		if len(f) < 5 || len(source) < 1 {
			continue
		}
		at := f[4]
		if (path == at || strings.HasPrefix(path, strings.TrimSuffix(at, "/")+"/")) && len(at) >= len(longest) {
			longest, kind = at, source[0]
		}
	}
	if kind == "" {
		return "", fmt.Errorf("describe machine: no mount holds %q", path)
	}
	return kind, nil
}
