package integration_test

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/statefork/waypoint"
)

// tryer is an init process that answers on /q/a whether each command that it is
// given on /q/q has worked. The FIFOs are in a tmpfs, as its root may be
// read-only. The umask is what the specification says: it is not set here.
const tryer = `cd /q
mkfifo q a
exec 3<>q
while read -r cmd <&3; do
	if sh -c "$cmd" >/dev/null 2>&1; then echo yes >a; else echo no >a; fi
done`

// specified runs a container with containerd's client alone, changed by opts.
func (e *env) specified(id string, opts ...oci.SpecOpts) {
	e.Helper()
	all := append([]oci.SpecOpts{
		oci.WithProcessArgs("sh", "-c", tryer),
		oci.WithMounts([]specs.Mount{{Destination: "/q", Type: "tmpfs", Source: "q", Options: []string{"nosuid", "nodev", "mode=1777"}}}),
	}, opts...)
	c, err := e.ns.Create(e.ctx, id, testbed.Runtime, e.snapshotter, all...)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() {
		if err := testbed.Destroy(e.cleanupContext(), c); err != nil {
			e.Error(err)
		}
	})
	task, err := c.NewTask(e.ctx, cio.NullIO)
	if err != nil {
		e.Fatal(err)
	}
	if err := task.Start(e.ctx); err != nil {
		e.Fatal(err)
	}
	e.eventually(func() error {
		_, err := e.ns.ExecIn(e.ctx, id, "test", "-p", "/q/a")
		return err
	})
}

// try has init itself run a command, not an exec: its filter, its root.
func (e *env) try(container, command string) string {
	e.Helper()
	return e.exec(container, "sh", "-c", `echo "$1" >/q/q; cat /q/a`, "-", command)
}

// facts prints what the kernel says of the process 1 and of the one that asks.
const facts = `for p in 1 self; do
	grep -E '^(Uid|Gid|Groups|Umask|Cap|NoNewPrivs|Seccomp)' /proc/$p/status
	cat /proc/$p/limits /proc/$p/oom_score_adj
	cat /proc/$p/attr/current 2>/dev/null || echo no label
done
hostname
cat /proc/sys/kernel/domainname
tr '\0' '\n' </proc/1/environ
sort -k5 /proc/1/mountinfo`

var (
	// A mount's number, that of the one below it, its device and its peer
	// groups' are new each time it is made.
	mountLine  = regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ (.*)$`)
	peerGroup  = regexp.MustCompile(`(shared|master|propagate_from):\d+`)
	layerNames = regexp.MustCompile(`(lowerdir|upperdir|workdir)=[^, ]+`)
)

// holding is what a container has of its specification.
func (e *env) holding(container string) string {
	e.Helper()
	s := e.sh(container, facts)
	s = mountLine.ReplaceAllString(s, "$1")
	s = peerGroup.ReplaceAllString(s, "$1")
	s = layerNames.ReplaceAllString(s, "$1")
	// Each container has a cgroup of its own, in which its mounts begin.
	return strings.ReplaceAll(s, "/"+container+" ", "/ID ")
}

// keeps compares what holds in a container, before anything, with what holds
// after a checkpoint, after a restore, in a fork, and in a fork of that.
func (e *env) keeps(container string, look func(container string) string) {
	e.Helper()
	want := look(container)
	e.checkpoint(container, "n1")
	e.equal("after a checkpoint", look(container), want)
	e.checkpoint(container, "n2")
	e.restore(container, "n1")
	e.equal("after a restore", look(container), want)
	fork := e.bareFork(container + "@n1")
	e.equal("in a fork", look(fork), want)
	again := e.bareFork(fork)
	e.equal("in the fork after its own checkpoint", look(fork), want)
	e.equal("in a fork of the fork", look(again), want)
}

// bareFork is fork for a container that nerdctl does not know, which would leave
// a directory of its own when it removes one.
func (e *env) bareFork(ref string) string {
	e.Helper()
	var res waypoint.ForkResult
	e.statefork(&res, "fork", ref)
	id := res.Siblings[0].ID
	e.Cleanup(func() {
		ctx := e.cleanupContext()
		c, err := e.ns.Find(ctx, id)
		if err == nil {
			err = testbed.Destroy(ctx, c)
		}
		if err != nil {
			e.Error(err)
		}
	})
	return id
}

// process changes the process of a specification.
func process(change func(*specs.Process)) oci.SpecOpts {
	return spec(func(s *specs.Spec) { change(s.Process) })
}

func spec(change func(*specs.Spec)) oci.SpecOpts {
	return func(_ context.Context, _ oci.Client, _ *containers.Container, s *specs.Spec) error {
		change(s)
		return nil
	}
}

// confine takes most of its rights from a process.
func confine(p *specs.Process) {
	p.Capabilities = &specs.LinuxCapabilities{
		Bounding:    []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE"},
		Permitted:   []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"},
		Inheritable: []string{"CAP_KILL", "CAP_NET_RAW"},
		Effective:   []string{"CAP_NET_RAW"},
		Ambient:     []string{"CAP_NET_RAW"},
	}
	p.NoNewPrivileges = true
	adjust := 123
	p.OOMScoreAdj = &adjust
	p.Rlimits = []specs.POSIXRlimit{
		{Type: "RLIMIT_NOFILE", Hard: 512, Soft: 300},
		{Type: "RLIMIT_CORE", Hard: 0, Soft: 0},
		{Type: "RLIMIT_STACK", Hard: 64 << 20, Soft: 4 << 20},
		{Type: "RLIMIT_FSIZE", Hard: 1 << 30, Soft: 1 << 20},
	}
}

// TestSpecUser: a user other than root is kept, or refused with the process'
// name where the kernel does not tell its limits.
func TestSpecUser(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.specified("box", process(func(p *specs.Process) {
		p.User = specs.User{UID: 1234, GID: 2345, AdditionalGids: []uint32{10, 77}}
		confine(p)
	}))
	look := func(id string) string {
		e.Helper()
		e.equal("writing to /etc in "+id, e.try(id, "echo x >/etc/not"), "no")
		e.equal("writing to /q in "+id, e.try(id, "echo x >/q/mine"), "yes")
		return e.holding(id)
	}
	want := look("box")
	if !strings.Contains(want, "1234\t1234") || !strings.Contains(want, "2345\t2345") {
		t.Errorf("the container does not show its user but %s", want)
	}
	if mayRaiseLimits(t) {
		e.keeps("box", look)
		return
	}
	before := e.inventory("box")
	e.namesCulprit(e.refused(4, "checkpoint", "box", "--name", "never"), "sh", "box")
	e.equal("what is there", e.inventory("box"), before)
	e.equal("after the refusal", look("box"), want)
}

// mayRaiseLimits says whether the shim, as this process, has CAP_SYS_RESOURCE.
func mayRaiseLimits(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^CapEff:\s*([0-9a-f]+)$`).FindSubmatch(b)
	if m == nil {
		t.Fatal("/proc/self/status shows no capabilities")
	}
	set, err := strconv.ParseUint(string(m[1]), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return set&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// TestSpecForkRemovedByNerdctl: nerdctl removes a running fork of a container that
// it has not made. Its own directory of such a container it forgets.
func TestSpecForkRemovedByNerdctl(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	e.specified("box")
	var res waypoint.ForkResult
	e.statefork(&res, "fork", "box")
	id := res.Siblings[0].ID
	e.equal("removed", e.nerdctl("rm", "-f", id), id)
	if _, err := e.ns.Find(e.ctx, id); !errdefs.IsNotFound(err) {
		t.Errorf("the fork is there after it was removed: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(e.ns.Dir, "nerdctl", "*", "containers", e.ns.NS, id))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	}
}

// TestSpecSecurity: what confines a container's processes confines them also
// after they were brought back.
func TestSpecSecurity(t *testing.T) {
	umask := uint32(0o027)
	tests := []struct {
		name string
		opts func(e *env) []oci.SpecOpts
		// tries are commands of init's, and whether they work.
		tries map[string]string
		// shows must be in what holds from the start.
		shows []string
	}{
		{
			name: "process",
			opts: func(*env) []oci.SpecOpts {
				return []oci.SpecOpts{process(func(p *specs.Process) {
					p.User = specs.User{AdditionalGids: []uint32{10, 77}, Umask: &umask}
					confine(p)
				})}
			},
			tries: map[string]string{
				"echo x >/q/mine && chgrp 77 /q/mine": "yes",
				"chroot / true":                       "no",
				"head -c 2000000 /dev/zero >/q/big":   "no",
			},
			shows: []string{"Groups:\t10 77", "Umask:\t0027", "NoNewPrivs:\t1", "\n123\n"},
		},
		{
			name: "seccomp",
			opts: func(*env) []oci.SpecOpts {
				return []oci.SpecOpts{spec(func(s *specs.Spec) {
					denied := uint(1)
					s.Linux.Seccomp = &specs.LinuxSeccomp{
						DefaultAction: specs.ActAllow,
						Syscalls: []specs.LinuxSyscall{{
							Names: []string{"mkdir", "mkdirat"}, Action: specs.ActErrno, ErrnoRet: &denied,
						}},
					}
				})}
			},
			tries: map[string]string{"mkdir /q/dir": "no", "touch /q/file": "yes"},
			shows: []string{"Seccomp:\t2"},
		},
		{
			name: "paths",
			opts: func(e *env) []oci.SpecOpts {
				host := e.TempDir()
				if err := os.WriteFile(filepath.Join(host, "run"), []byte("#!/bin/sh\n"), 0o755); err != nil {
					e.Fatal(err)
				}
				return []oci.SpecOpts{
					oci.WithRootFSReadonly(),
					oci.WithMounts([]specs.Mount{
						{Destination: "/ro", Type: "bind", Source: host, Options: []string{"rbind", "ro", "nosuid", "nodev", "noexec", "rprivate"}},
						{Destination: "/rw", Type: "bind", Source: host, Options: []string{"rbind", "rw", "noatime", "rslave"}},
						{Destination: "/noexec", Type: "tmpfs", Source: "tmpfs", Options: []string{"noexec", "nosuid", "size=1m", "mode=1777"}},
					}),
					spec(func(s *specs.Spec) {
						s.Linux.MaskedPaths = []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/etc/base", "/bin/masked", "/sys/kernel"}
						s.Linux.ReadonlyPaths = []string{"/proc/bus", "/proc/sys", "/proc/irq"}
					}),
				}
			},
			tries: map[string]string{
				"touch /new":    "no",
				"touch /ro/new": "no",
				"/ro/run":       "no",
				"/rw/run":       "yes",
				"cp /bin/busybox /noexec/b && /noexec/b true":            "no",
				"test -s /etc/base":                                      "no",
				"test -n \"$(ls /sys/kernel)\"":                          "no",
				"echo 1 >/proc/sys/net/ipv4/ip_forward":                  "no",
				"head -c 2000000 /dev/zero >/noexec/more":                "no",
				"mount -o remount,rw /ro":                                "no",
				"test \"$(cat /proc/sys/kernel/domainname)\" = '(none)'": "yes",
			},
		},
		{
			name: "privileged",
			opts: func(*env) []oci.SpecOpts {
				return []oci.SpecOpts{oci.WithPrivileged, oci.WithWriteableSysfs}
			},
			tries: map[string]string{"touch /new": "yes", "mount -t tmpfs t /mnt && umount /mnt || mkdir -p /mnt": "yes"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := setup(t, common(t))
			e.specified("box", tt.opts(e)...)
			for _, s := range tt.shows {
				if !strings.Contains(e.holding("box"), s) {
					t.Errorf("the container does not show %q but %s", s, e.holding("box"))
				}
			}
			e.keeps("box", func(id string) string {
				e.Helper()
				for command, want := range tt.tries {
					e.equal(strconv.Quote(command)+" in "+id, e.try(id, command), want)
				}
				return e.holding(id)
			})
		})
	}
}
