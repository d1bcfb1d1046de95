package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// CRIU runs inside the container's network, UTS and IPC namespaces. They are
// then its own and not part of the images, which saves most of the time that a
// dump and a restore would take, and keeps the network as it is. What these
// namespaces hold beyond that is brought back here: the host name, and, if
// there are any, System V objects by leaving the IPC namespace to CRIU.

// namespaceFiles are open namespaces, by their name under /proc/<pid>/ns. They
// outlive the processes in them.
type namespaceFiles map[string]*os.File

var namespaceFlags = map[string]int{
	"net": unix.CLONE_NEWNET,
	"uts": unix.CLONE_NEWUTS,
	"ipc": unix.CLONE_NEWIPC,
}

// openNamespaces holds the namespaces of process pid that CRIU is to enter.
func openNamespaces(pid int) (namespaceFiles, error) {
	n := namespaceFiles{}
	for name := range namespaceFlags {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, name))
		if err != nil {
			n.Close()
			return nil, fmt.Errorf("open namespaces of pid %d: %w", pid, err)
		}
		n[name] = f
	}
	return n, nil
}

func (n namespaceFiles) Close() error {
	var errs []error
	for _, f := range n {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// names lists the namespaces in a fixed order.
func (n namespaceFiles) names() []string {
	out := make([]string, 0, len(n))
	for name := range n {
		out = append(out, name)
	}
	sort.Strings(out)
	return out
}

// namespacePlan says in which namespaces a CRIU process is to run.
type namespacePlan struct {
	enter namespaceFiles
	// cgroup is the container's cgroup namespace, nil for the host's. What the
	// process restores is born in it. Only a restore needs it.
	cgroup *os.File
	// create holds the CLONE_NEW flags of namespaces to make.
	create int
	// hostname and domainname are set if not empty.
	hostname, domainname string
	// loopback asks for the loopback device to be brought up.
	loopback bool
	sysctls  map[string]string
}

// Close closes the namespaces' files.
func (p namespacePlan) Close() error {
	err := p.enter.Close()
	if p.cgroup != nil {
		err = errors.Join(err, p.cgroup.Close())
	}
	return err
}

// apply carries the plan out on the calling OS thread.
func (p namespacePlan) apply() error {
	for _, name := range p.enter.names() {
		if err := unix.Setns(int(p.enter[name].Fd()), namespaceFlags[name]); err != nil {
			return fmt.Errorf("enter %s namespace: %w", name, os.NewSyscallError("setns", err))
		}
	}
	if p.cgroup != nil {
		if err := unix.Setns(int(p.cgroup.Fd()), unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("enter cgroup namespace: %w", os.NewSyscallError("setns", err))
		}
	}
	if p.create != 0 {
		if err := unix.Unshare(p.create); err != nil {
			return fmt.Errorf("create namespaces: %w", os.NewSyscallError("unshare", err))
		}
	}
	if p.hostname != "" {
		if err := unix.Sethostname([]byte(p.hostname)); err != nil {
			return os.NewSyscallError("sethostname", err)
		}
	}
	if p.domainname != "" {
		if err := unix.Setdomainname([]byte(p.domainname)); err != nil {
			return os.NewSyscallError("setdomainname", err)
		}
	}
	if p.loopback {
		if err := raiseLoopback(); err != nil {
			return err
		}
	}
	for k, v := range p.sysctls {
		name := filepath.Join("/proc/sys", strings.ReplaceAll(k, ".", "/"))
		if err := os.WriteFile(name, []byte(v), 0o644); err != nil {
			return fmt.Errorf("set sysctl %q: %w", k, err)
		}
	}
	return nil
}

// raiseLoopback brings up "lo" in the calling thread's network namespace.
func raiseLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return fmt.Errorf("read flags of loopback device: %w", err)
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("bring up loopback device: %w", err)
	}
	return nil
}

// planNamespaces says how a new container with the given configuration gets
// the namespaces that d's images do not hold.
func planNamespaces(cfg *configs.Config, d *Description) (_ namespacePlan, retErr error) {
	p := namespacePlan{enter: namespaceFiles{}, hostname: cfg.Hostname, domainname: cfg.Domainname, sysctls: map[string]string{}}
	defer func() {
		if retErr != nil {
			p.enter.Close()
		}
	}()
	for name, t := range map[string]configs.NamespaceType{"net": configs.NEWNET, "uts": configs.NEWUTS, "ipc": configs.NEWIPC} {
		if !cfg.Namespaces.Contains(t) {
			continue // the host's
		}
		if path := cfg.Namespaces.PathOf(t); path != "" {
			f, err := os.Open(path)
			if err != nil {
				return p, fmt.Errorf("open %s namespace: %w", name, err)
			}
			p.enter[name] = f
			continue
		}
		if d.entered(name) {
			p.create |= namespaceFlags[name]
			p.loopback = p.loopback || name == "net"
		}
	}
	if !cfg.Namespaces.IsPrivate(configs.NEWUTS) {
		p.hostname, p.domainname = "", ""
	}
	for k, v := range cfg.Sysctl {
		if !d.entered("ipc") && !strings.HasPrefix(k, "net.") {
			continue // CRIU brings it back with the namespace
		}
		p.sysctls[k] = v
	}
	return p, nil
}

// checkNamespaces refuses configurations whose namespaces cannot be kept.
func checkNamespaces(cfg *configs.Config) error {
	if !cfg.Namespaces.IsPrivate(configs.NEWPID) {
		return fmt.Errorf("container has no pid namespace of its own, so its processes cannot get their pids back: %w", errdefs.ErrNotImplemented)
	}
	if cfg.Namespaces.Contains(configs.NEWUSER) {
		return fmt.Errorf("container has a user namespace, which cannot be checkpointed yet: %w", errdefs.ErrNotImplemented)
	}
	return nil
}
