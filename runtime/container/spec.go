package container

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
)

// loadSpec reads the bundle's config.json.
func loadSpec(bundle string) (*specs.Spec, error) {
	name := filepath.Join(bundle, "config.json")
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read container's configuration: %w", err)
	}
	spec := &specs.Spec{}
	if err := json.Unmarshal(b, spec); err != nil {
		return nil, fmt.Errorf("parse %q: %w: %w", name, err, errdefs.ErrInvalidArgument)
	}
	if spec.Linux == nil || spec.Root == nil {
		return nil, fmt.Errorf("%q does not describe a Linux container with a root: %w", name, errdefs.ErrInvalidArgument)
	}
	return spec, validateProcess(spec.Process)
}

// validateProcess checks what libcontainer takes for granted.
func validateProcess(p *specs.Process) error {
	switch {
	case p == nil:
		return fmt.Errorf("process is missing: %w", errdefs.ErrInvalidArgument)
	case len(p.Args) == 0:
		return fmt.Errorf("process has no arguments: %w", errdefs.ErrInvalidArgument)
	case !filepath.IsAbs(p.Cwd):
		return fmt.Errorf("working directory %q is not absolute: %w", p.Cwd, errdefs.ErrInvalidArgument)
	case p.SelinuxLabel != "" && !selinux.GetEnabled():
		return fmt.Errorf("process has a SELinux label, and SELinux is not enabled: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// libcontainerConfig turns the specification into libcontainer's
// configuration. That takes the working directory for the bundle, which it is
// only for the first container of a shim: so nothing relative is left to it.
func libcontainerConfig(cfg Config, spec *specs.Spec) (*configs.Config, error) {
	s, root := *spec, *spec.Root
	root.Path = absolute(cfg.Bundle, root.Path)
	if len(cfg.Mounts) > 0 {
		root.Path = filepath.Join(cfg.Bundle, "rootfs")
	}
	s.Root = &root
	s.Mounts = slices.Clone(spec.Mounts)
	for i, m := range s.Mounts {
		if isBind(m) {
			s.Mounts[i].Source = absolute(cfg.Bundle, m.Source)
		}
	}
	rootless := os.Geteuid() != 0
	conf, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName:       cfg.ID,
		UseSystemdCgroup: cfg.SystemdCgroup,
		NoPivotRoot:      cfg.NoPivotRoot,
		NoNewKeyring:     cfg.NoNewKeyring,
		Spec:             &s,
		RootlessEUID:     rootless,
		RootlessCgroups:  rootless,
	})
	if err != nil {
		return nil, fmt.Errorf("container's configuration: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	// Hooks are told the bundle by way of this label.
	const bundle = "bundle="
	conf.Labels = slices.DeleteFunc(conf.Labels, func(l string) bool { return strings.HasPrefix(l, bundle) })
	conf.Labels = append(conf.Labels, bundle+cfg.Bundle)
	disableMPTCP(conf)
	return conf, nil
}

// disableMPTCP has the container's network namespace fall back to TCP, unless
// its configuration says otherwise: CRIU cannot dump multipath TCP, and Go
// programs listen with it by default.
func disableMPTCP(conf *configs.Config) {
	const key, file = "net.mptcp.enabled", "/proc/sys/net/mptcp/enabled"
	if _, set := conf.Sysctl[key]; set || !conf.Namespaces.IsPrivate(configs.NEWNET) {
		return
	}
	if _, err := os.Stat(file); err != nil {
		return
	}
	conf.Sysctl = maps.Clone(conf.Sysctl)
	if conf.Sysctl == nil {
		conf.Sysctl = map[string]string{}
	}
	conf.Sysctl[key] = "0"
}

func absolute(dir, name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(dir, name)
}

func isBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// libcontainerProcess turns a process' specification into libcontainer's.
func libcontainerProcess(p *specs.Process) (*libcontainer.Process, error) {
	lp := &libcontainer.Process{
		Args:            p.Args,
		Env:             p.Env,
		UID:             int(p.User.UID),
		GID:             int(p.User.GID),
		Cwd:             p.Cwd,
		Label:           p.SelinuxLabel,
		NoNewPrivileges: &p.NoNewPrivileges,
		AppArmorProfile: p.ApparmorProfile,
		Scheduler:       p.Scheduler,
		IOPriority:      p.IOPriority,
		LogLevel:        strconv.Itoa(int(min(log.GetLevel(), log.InfoLevel))), // debugging ends up in stderr
	}
	for _, gid := range p.User.AdditionalGids {
		lp.AdditionalGroups = append(lp.AdditionalGroups, int(gid))
	}
	if size := p.ConsoleSize; size != nil {
		lp.ConsoleWidth, lp.ConsoleHeight = uint16(size.Width), uint16(size.Height)
	}
	if c := p.Capabilities; c != nil {
		lp.Capabilities = &configs.Capabilities{
			Bounding:    c.Bounding,
			Effective:   c.Effective,
			Inheritable: c.Inheritable,
			Permitted:   c.Permitted,
			Ambient:     c.Ambient,
		}
	}
	for _, r := range p.Rlimits {
		resource, ok := rlimits[r.Type]
		if !ok {
			return nil, fmt.Errorf("rlimit %q is unknown: %w", r.Type, errdefs.ErrInvalidArgument)
		}
		lp.Rlimits = append(lp.Rlimits, configs.Rlimit{Type: resource, Hard: r.Hard, Soft: r.Soft})
	}
	var err error
	if lp.CPUAffinity, err = configs.ConvertCPUAffinity(p.ExecCPUAffinity); err != nil {
		return nil, fmt.Errorf("affinity of exec: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return lp, nil
}

var rlimits = map[string]int{
	"RLIMIT_AS":         unix.RLIMIT_AS,
	"RLIMIT_CORE":       unix.RLIMIT_CORE,
	"RLIMIT_CPU":        unix.RLIMIT_CPU,
	"RLIMIT_DATA":       unix.RLIMIT_DATA,
	"RLIMIT_FSIZE":      unix.RLIMIT_FSIZE,
	"RLIMIT_LOCKS":      unix.RLIMIT_LOCKS,
	"RLIMIT_MEMLOCK":    unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE":   unix.RLIMIT_MSGQUEUE,
	"RLIMIT_NICE":       unix.RLIMIT_NICE,
	"RLIMIT_NOFILE":     unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC":      unix.RLIMIT_NPROC,
	"RLIMIT_RSS":        unix.RLIMIT_RSS,
	"RLIMIT_RTPRIO":     unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME":     unix.RLIMIT_RTTIME,
	"RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING,
	"RLIMIT_STACK":      unix.RLIMIT_STACK,
}
