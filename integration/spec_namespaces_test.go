package integration_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// linked is the identity of a namespace of a process: "ipc:[4026531839]".
func linked(t *testing.T, pid, name string) string {
	t.Helper()
	link, err := os.Readlink("/proc/" + pid + "/ns/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// procName is the name of a namespace's type below /proc/<pid>/ns.
func procName(typ specs.LinuxNamespaceType) string {
	switch typ {
	case specs.NetworkNamespace:
		return "net"
	case specs.MountNamespace:
		return "mnt"
	}
	return string(typ)
}

// TestSpecNamespaces: a container stays in the namespaces of the host's and of
// others' that it was given, and their names stay what they are.
func TestSpecNamespaces(t *testing.T) {
	const host, joined = "host", "joined"
	tests := []map[specs.LinuxNamespaceType]string{
		{specs.NetworkNamespace: host},
		{specs.UTSNamespace: host},
		{specs.NetworkNamespace: host, specs.UTSNamespace: host, specs.IPCNamespace: host},
		{specs.NetworkNamespace: joined, specs.IPCNamespace: joined, specs.UTSNamespace: joined},
		{specs.IPCNamespace: joined},
	}
	for _, from := range tests {
		name := strings.Trim(fmt.Sprint(from), "map[]")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.specified("pod", oci.WithHostname("pod"))
			task, err := e.ns.Task(e.ctx, "pod")
			if err != nil {
				t.Fatal(err)
			}
			podPid := fmt.Sprint(task.Pid())
			hostname, err := os.Hostname()
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]string{}
			var opts []oci.SpecOpts
			for typ, whose := range from {
				if whose == host {
					want[procName(typ)] = linked(t, "self", procName(typ))
					opts = append(opts, oci.WithHostNamespace(typ))
					continue
				}
				want[procName(typ)] = linked(t, podPid, procName(typ))
				opts = append(opts, oci.WithLinuxNamespace(specs.LinuxNamespace{
					Type: typ, Path: "/proc/" + podPid + "/ns/" + procName(typ),
				}))
			}
			called := "apart"
			switch from[specs.UTSNamespace] {
			case host:
				called = hostname
			case joined:
				called = "pod"
			default:
				opts = append(opts, oci.WithHostname("apart"))
			}
			e.specified("box", opts...)
			e.keeps("box", func(id string) string {
				e.Helper()
				for ns, link := range want {
					e.equal(ns+" namespace of "+id, e.sh(id, "readlink /proc/1/ns/"+ns), link)
					e.equal(ns+" namespace of an exec in "+id, e.sh(id, "readlink /proc/self/ns/"+ns), link)
				}
				e.equal("hostname in "+id, e.sh(id, "hostname"), called)
				return "as wanted"
			})
			e.equal("the pod's hostname", e.sh("pod", "hostname"), "pod")
			if now, err := os.Hostname(); err != nil || now != hostname {
				t.Errorf("the host is called %q, %v; it was %q", now, err, hostname)
			}
		})
	}
}

// TestSpecNamespacesRefused: what cannot be kept runs, and a checkpoint of it is
// refused with its name and nothing changed.
func TestSpecNamespacesRefused(t *testing.T) {
	user := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 0, Size: 65536}}
	tests := []struct {
		name string
		opt  oci.SpecOpts
	}{
		{"pid", oci.WithHostNamespace(specs.PIDNamespace)},
		{"user", oci.WithUserNamespace(user, user)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.specified("box", tt.opt)
			link := e.sh("box", "readlink /proc/self/ns/"+tt.name)
			before := e.inventory("box")
			for range 2 {
				if msg := e.refused(4, "checkpoint", "box", "--name", "never"); !strings.Contains(msg, tt.name+" namespace") {
					t.Errorf("%q does not name the %s namespace", msg, tt.name)
				}
				e.equal("what is there", e.inventory("box"), before)
				e.equal("namespace", e.sh("box", "readlink /proc/self/ns/"+tt.name), link)
				e.equal("init", e.try("box", "true"), "yes")
			}
		})
	}
}

// TestSpecCgroupNamespace: a container does not see where on the host its cgroup
// is, and neither does a fork.
func TestSpecCgroupNamespace(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.specified("box", oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.CgroupNamespace}))
	e.keeps("box", func(id string) string {
		e.Helper()
		for _, p := range []string{"1", "self"} {
			if link := e.sh(id, "readlink /proc/"+p+"/ns/cgroup"); link == linked(t, "self", "cgroup") {
				t.Errorf("process %s of %s is in the host's cgroup namespace", p, id)
			}
		}
		// 4:memory:/
		return e.sh(id, "cut -d: -f3 /proc/1/cgroup /proc/self/cgroup | sort -u")
	})
}

// TestSpecTimeNamespace: the clocks of a container stay as far ahead as they were
// set.
func TestSpecTimeNamespace(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	const ahead = 10_000_000
	e.specified("box", oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.TimeNamespace}),
		spec(func(s *specs.Spec) {
			offset := specs.LinuxTimeOffset{Secs: ahead}
			s.Linux.TimeOffsets = map[string]specs.LinuxTimeOffset{"monotonic": offset, "boottime": offset}
		}))
	e.keeps("box", func(id string) string {
		e.Helper()
		return e.sh(id, fmt.Sprintf("read up rest </proc/uptime; test ${up%%%%.*} -ge %d && test ${up%%%%.*} -lt %d && echo ahead || echo $up",
			ahead, ahead+1_000_000))
	})
}
