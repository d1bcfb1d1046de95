package container

import (
	"reflect"
	"slices"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// TestConfigOfBundle has no trace of the working directory, which is another
// container's bundle for all but the first of a pod.
func TestConfigOfBundle(t *testing.T) {
	spec := specconv.Example()
	spec.Annotations = map[string]string{"a": "b"}
	spec.Mounts = append(spec.Mounts, specs.Mount{Type: "bind", Source: "files", Destination: "/files", Options: []string{"rbind"}})
	conf, err := libcontainerConfig(Config{ID: "x", Bundle: "/some/bundle"}, spec)
	if err != nil {
		t.Fatal(err)
	}
	if conf.Rootfs != "/some/bundle/rootfs" {
		t.Errorf("root is %q", conf.Rootfs)
	}
	if got := conf.Mounts[len(conf.Mounts)-1].Source; got != "/some/bundle/files" {
		t.Errorf("source of bind mount is %q", got)
	}
	slices.Sort(conf.Labels)
	if want := []string{"a=b", "bundle=/some/bundle"}; !reflect.DeepEqual(conf.Labels, want) {
		t.Errorf("labels are %q, want %q", conf.Labels, want)
	}
	if conf.Cgroups.Path != "" || conf.Cgroups.Name != "x" {
		t.Errorf("cgroup is %q, name %q; want that of the id", conf.Cgroups.Path, conf.Cgroups.Name)
	}
	if spec.Root.Path != "rootfs" || spec.Mounts[len(spec.Mounts)-1].Source != "files" {
		t.Error("the specification was changed")
	}
}

func TestRootWithMounts(t *testing.T) {
	spec := specconv.Example()
	spec.Root.Path = "/elsewhere"
	conf, err := libcontainerConfig(Config{ID: "x", Bundle: "/b", Mounts: []mount.Mount{{}}}, spec)
	if err != nil {
		t.Fatal(err)
	}
	if conf.Rootfs != "/b/rootfs" {
		t.Errorf("with mounts the root is %q", conf.Rootfs)
	}
	if conf, err = libcontainerConfig(Config{ID: "x", Bundle: "/b"}, spec); err != nil || conf.Rootfs != "/elsewhere" {
		t.Errorf("without mounts the root is %q, %v", conf.Rootfs, err)
	}
}

func TestLibcontainerProcess(t *testing.T) {
	p := &specs.Process{
		Args: []string{"a", "b"}, Env: []string{"C=d"}, Cwd: "/e",
		User:            specs.User{UID: 1, GID: 2, AdditionalGids: []uint32{3, 4}},
		ConsoleSize:     &specs.Box{Width: 80, Height: 24},
		Capabilities:    &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}, Ambient: []string{"CAP_CHOWN"}},
		Rlimits:         []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 5, Hard: 6}},
		NoNewPrivileges: true,
		ApparmorProfile: "profile",
	}
	lp, err := libcontainerProcess(p)
	if err != nil {
		t.Fatal(err)
	}
	if lp.UID != 1 || lp.GID != 2 || !reflect.DeepEqual(lp.AdditionalGroups, []int{3, 4}) {
		t.Errorf("user is %d:%d %v", lp.UID, lp.GID, lp.AdditionalGroups)
	}
	if lp.ConsoleWidth != 80 || lp.ConsoleHeight != 24 || lp.Cwd != "/e" || lp.AppArmorProfile != "profile" || !*lp.NoNewPrivileges {
		t.Errorf("got %+v", lp)
	}
	if want := []configs.Rlimit{{Type: unix.RLIMIT_NOFILE, Soft: 5, Hard: 6}}; !reflect.DeepEqual(lp.Rlimits, want) {
		t.Errorf("rlimits are %v", lp.Rlimits)
	}
	if !reflect.DeepEqual(lp.Capabilities.Bounding, []string{"CAP_KILL"}) || !reflect.DeepEqual(lp.Capabilities.Ambient, []string{"CAP_CHOWN"}) {
		t.Errorf("capabilities are %+v", lp.Capabilities)
	}
	p.Rlimits[0].Type = "RLIMIT_TEA"
	if _, err := libcontainerProcess(p); !errdefs.IsInvalidArgument(err) {
		t.Errorf("unknown rlimit: got %v", err)
	}
}

func TestValidateProcess(t *testing.T) {
	good := specs.Process{Args: []string{"a"}, Cwd: "/"}
	if err := validateProcess(&good); err != nil {
		t.Error(err)
	}
	for name, p := range map[string]*specs.Process{
		"none":         nil,
		"no arguments": {Cwd: "/"},
		"relative":     {Args: []string{"a"}, Cwd: "b"},
	} {
		if err := validateProcess(p); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
