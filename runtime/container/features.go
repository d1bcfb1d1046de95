package container

import (
	"fmt"

	"github.com/opencontainers/runc/libcontainer/capabilities"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// Features says what of the OCI runtime specification is supported, in the
// specification's own form.
func Features() *features.Features {
	yes := true
	f := &features.Features{
		OCIVersionMin: "1.0.0",
		OCIVersionMax: specs.Version,
		Hooks:         configs.KnownHookNames(),
		MountOptions:  specconv.KnownMountOptions(),
		Annotations:   map[string]string{"org.opencontainers.runc.checkpoint.enabled": "true"},
		Linux: &features.Linux{
			Namespaces:   specconv.KnownNamespaces(),
			Capabilities: capabilities.KnownCapabilities(),
			Cgroup:       &features.Cgroup{V1: &yes, V2: &yes, Systemd: &yes, SystemdUser: &yes, Rdma: &yes},
			Apparmor:     &features.Apparmor{Enabled: &yes},
			Selinux:      &features.Selinux{Enabled: &yes},
			IntelRdt:     &features.IntelRdt{Enabled: &yes, Schemata: &yes, Monitoring: &yes},
			MemoryPolicy: &features.MemoryPolicy{
				Modes: specconv.KnownMemoryPolicyModes(),
				Flags: specconv.KnownMemoryPolicyFlags(),
			},
			MountExtensions: &features.MountExtensions{IDMap: &features.IDMap{Enabled: &yes}},
			NetDevices:      &features.NetDevices{Enabled: &yes},
		},
		PotentiallyUnsafeConfigAnnotations: []string{"bundle", "org.systemd.property."},
	}
	if seccomp.Enabled {
		f.Linux.Seccomp = &features.Seccomp{
			Enabled:        &yes,
			Actions:        seccomp.KnownActions(),
			Operators:      seccomp.KnownOperators(),
			Archs:          seccomp.KnownArchs(),
			KnownFlags:     seccomp.KnownFlags(),
			SupportedFlags: seccomp.SupportedFlags(),
		}
		major, minor, patch := seccomp.Version()
		f.Annotations["io.github.seccomp.libseccomp.version"] = fmt.Sprintf("%d.%d.%d", major, minor, patch)
	}
	return f
}
