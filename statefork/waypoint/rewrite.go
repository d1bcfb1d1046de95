package waypoint

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/runtime/restart"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/statefork/statefork/statefork"
)

const (
	restartPrefix = "containerd.io/restart."
	// A container of Kubernetes is known to the kubelet and to containerd's CRI
	// plugin by these; a fork must not pass for one that they have created.
	criPrefix = "io.cri-containerd."
	// shortID is how much of an id nerdctl makes a hostname.
	shortID = 12
)

// identity is what tells a fork from its source.
type identity struct {
	// ID of the container, and the key of its snapshot.
	ID string
	// Name is nerdctl's name; empty for containers that are not nerdctl's.
	Name string
	// From is "<container>@<node>".
	From string
}

// forkRecord is a container record for a fork, and what goes with it.
type forkRecord struct {
	containers.Container
	// Late are labels to set once the task runs: containerd's restart monitor
	// would else start the container from scratch in the meantime.
	Late map[string]string
	// Hostname is the fork's hostname if it differs from the source's.
	Hostname string
	// Dropped is what the fork does not have although its source has it.
	Dropped []statefork.External
}

// rewrite makes the record of a fork from that of its source. Everything that
// names the source's id is rewritten, everything that only one container can
// have is dropped and reported, and all else is kept. For a container of
// nerdctl, st is its store; ports are those it has published.
func rewrite(src containers.Container, st *store, ports []portMapping, to identity) (*forkRecord, error) {
	spec, err := specOf(src)
	if err != nil {
		return nil, err
	}
	f := &forkRecord{
		Container: containers.Container{
			ID:          to.ID,
			Labels:      maps.Clone(src.Labels),
			Image:       src.Image,
			Runtime:     src.Runtime,
			SnapshotKey: to.ID,
			Snapshotter: src.Snapshotter,
			Extensions:  maps.Clone(src.Extensions),
			SandboxID:   src.SandboxID,
		},
		Late: map[string]string{},
	}
	if f.Labels == nil {
		f.Labels = map[string]string{}
	}
	if newHost, ok := derivedHostname(src.ID, to.ID, spec.Hostname); ok {
		f.Hostname = newHost
		rewriteHostname(spec, newHost)
	}
	if spec.Linux != nil {
		spec.Linux.CgroupsPath = rewriteCgroup(spec.Linux.CgroupsPath, to.ID)
	}
	if st != nil {
		if err := f.rewriteNerdctl(src, spec, *st, ports, to); err != nil {
			return nil, err
		}
	} else {
		nameNoNetwork(spec)
	}
	f.dropOnce(spec)
	f.Labels[LabelForkedFrom] = to.From
	return f, f.setSpec(src, spec)
}

// nameNoNetwork lets nerdctl remove a fork of a container that it has not made: it
// asks the annotations which networks to clean up, and fails without an answer.
func nameNoNetwork(spec *specs.Spec) {
	if _, ok := spec.Annotations[nerdctlNetworks]; ok {
		return
	}
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[nerdctlNetworks] = `["none"]`
}

func specOf(rec containers.Container) (*specs.Spec, error) {
	spec := &specs.Spec{}
	if rec.Spec == nil {
		return nil, fmt.Errorf("container %q has no spec: %w", rec.ID, errdefs.ErrFailedPrecondition)
	}
	if err := json.Unmarshal(rec.Spec.GetValue(), spec); err != nil {
		return nil, fmt.Errorf("read spec of container %q: %w", rec.ID, err)
	}
	return spec, nil
}

func (f *forkRecord) setSpec(src containers.Container, spec *specs.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("write spec of container %q: %w", f.ID, err)
	}
	f.Spec = typeurl.Any(&anypb.Any{TypeUrl: src.Spec.GetTypeUrl(), Value: b})
	return nil
}

// derivedHostname tells the new hostname, if the old one is made of the id.
func derivedHostname(oldID, newID, hostname string) (string, bool) {
	switch {
	case hostname == "":
		return "", false
	case hostname == oldID:
		return newID, true
	case len(oldID) > shortID && hostname == oldID[:shortID]:
		return newID[:min(shortID, len(newID))], true
	}
	return "", false
}

// rewriteHostname changes the hostname, also in the environment that later
// execs get. Processes that run already keep the environment they have.
func rewriteHostname(spec *specs.Spec, hostname string) {
	old := spec.Hostname
	spec.Hostname = hostname
	if spec.Process == nil {
		return
	}
	for i, e := range spec.Process.Env {
		if e == "HOSTNAME="+old {
			spec.Process.Env[i] = "HOSTNAME=" + hostname
		}
	}
}

// rewriteCgroup gives the fork a cgroup beside its source's. Both of runc's
// forms are known: a path, and systemd's slice:prefix:name. An empty one is
// made of the id by the runtime.
func rewriteCgroup(path, id string) string {
	if path == "" {
		return ""
	}
	if parts := strings.Split(path, ":"); len(parts) == 3 {
		parts[2] = id
		return strings.Join(parts, ":")
	}
	dir := filepath.Dir(path)
	if dir == "." {
		return id
	}
	return filepath.Join(dir, id)
}

// rewriteNerdctl changes nerdctl's labels, their copies in the annotations, and
// the mounts that come from the source's own directories.
func (f *forkRecord) rewriteNerdctl(src containers.Container, spec *specs.Spec, st store, ports []portMapping, to identity) error {
	if err := refuseSharedIPC(src); err != nil {
		return err
	}
	set := map[string]string{nerdctlName: to.Name, nerdctlStateDir: st.state(to.ID)}
	if f.Hostname != "" {
		set[nerdctlHostname] = f.Hostname
	}
	for k, edit := range map[string]func([]byte) ([]byte, error){
		nerdctlLogConfig:  withoutLogPath,
		nerdctlHostConfig: withoutCIDFile,
	} {
		if v, ok := src.Labels[k]; ok {
			b, err := edit([]byte(v))
			if err != nil {
				return fmt.Errorf("edit label %q: %w", k, err)
			}
			set[k] = string(b)
		}
	}
	for k, v := range set {
		f.Labels[k] = v
		if _, ok := spec.Annotations[k]; ok {
			spec.Annotations[k] = v
		}
	}
	for i := range spec.Mounts {
		m := &spec.Mounts[i]
		m.Source = moved(m.Source, st.state(src.ID), st.state(to.ID))
		m.Source = moved(m.Source, st.hosts(src.ID), st.hosts(to.ID))
	}
	for _, p := range ports {
		f.drop("port", portName(p), "published by the source")
	}
	return nil
}

// refuseSharedIPC stops at a container whose /dev/shm is a mount in its state
// directory: it is in no node, and a fork would have to share it.
func refuseSharedIPC(src containers.Container) error {
	var ipc struct {
		HostShmPath string `json:"hostShmPath"`
	}
	if v := src.Labels[nerdctlIPC]; v != "" {
		if err := json.Unmarshal([]byte(v), &ipc); err != nil {
			return fmt.Errorf("read label %q: %w", nerdctlIPC, err)
		}
	}
	if ipc.HostShmPath == "" {
		return nil
	}
	return statefork.WithHint(
		fmt.Errorf("container %q has a shareable ipc namespace: %w", src.ID, errdefs.ErrFailedPrecondition),
		"create it without --ipc=shareable")
}

func withoutCIDFile(b []byte) ([]byte, error) {
	return editJSON(b, func(m map[string]any) {
		if _, ok := m["CidFile"]; ok {
			m["CidFile"] = ""
		}
	})
}

// once are the settings that only one container can have.
var once = map[string]string{
	nerdctlPorts:       "ports",
	nerdctlPIDFile:     "pid file",
	nerdctlIP:          "ip address",
	nerdctlIP6:         "ipv6 address",
	nerdctlMAC:         "mac address",
	nerdctlHealthcheck: "health check",
	// Who has this label removes the volumes together with the container.
	nerdctlAnonymous: "ownership of anonymous volumes",
}

// dropOnce takes out the settings that only one container can have, and puts
// aside the ones that must wait for the task.
func (f *forkRecord) dropOnce(spec *specs.Spec) {
	for _, k := range slices.Sorted(maps.Keys(f.Labels)) {
		v := f.Labels[k]
		what, single := once[k]
		switch {
		case single:
			if k != nerdctlPorts {
				f.drop("setting", what, v)
			}
		case k == restart.CountLabel:
			// A fork has not been restarted yet.
		case strings.HasPrefix(k, restartPrefix):
			f.Late[k] = v
		case strings.HasPrefix(k, criPrefix):
			f.drop("setting", k, v)
		default:
			continue
		}
		delete(f.Labels, k)
	}
	for k := range once {
		delete(spec.Annotations, k)
	}
	for k := range f.Extensions {
		if strings.HasPrefix(k, criPrefix) {
			delete(f.Extensions, k)
		}
	}
}

func (f *forkRecord) drop(kind, name, detail string) {
	f.Dropped = append(f.Dropped, statefork.External{Kind: kind, Name: name, Detail: detail})
}

func portName(p portMapping) string {
	host := strconv.Itoa(int(p.HostPort))
	if p.HostIP != "" {
		host = p.HostIP + ":" + host
	}
	return host + "->" + strconv.Itoa(int(p.ContainerPort)) + "/" + p.Protocol
}

// moved rewrites a path in directory from to one in directory to.
func moved(path, from, to string) string {
	if rest, ok := strings.CutPrefix(path, from); ok && (rest == "" || rest[0] == '/') {
		return to + rest
	}
	return path
}

// externalOf lists what a container of this record shares with the host or with
// other containers: no node has it, and forks share it.
func externalOf(rec containers.Container) []statefork.External {
	spec, err := specOf(rec)
	if err != nil {
		return nil
	}
	var own []string
	if st, err := storeOf(rec.Labels[nerdctlStateDir], rec.Labels[nerdctlPrefix+"namespace"], rec.ID); err == nil {
		own = []string{st.state(rec.ID), st.hosts(rec.ID)}
	}
	var ext []statefork.External
	for _, m := range spec.Mounts {
		bind := m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
		if bind && !slices.ContainsFunc(own, func(dir string) bool { return moved(m.Source, dir, "") != m.Source }) {
			ext = append(ext, statefork.External{Kind: "mount", Name: m.Destination, Detail: m.Source})
		}
	}
	if spec.Linux != nil {
		for _, ns := range spec.Linux.Namespaces {
			if ns.Path != "" {
				ext = append(ext, statefork.External{Kind: string(ns.Type), Name: string(ns.Type) + " namespace", Detail: ns.Path})
			}
		}
	}
	return ext
}
