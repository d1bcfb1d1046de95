package waypoint

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/statefork/statefork/statefork"
)

// record reads what "ctr container info" has said of a container.
func record(t *testing.T, name string) containers.Container {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		ID, Image, SnapshotKey, Snapshotter, SandboxID string
		Labels                                         map[string]string
		Runtime                                        struct{ Name string }
		Spec                                           json.RawMessage
	}
	if err := json.Unmarshal(b, &info); err != nil {
		t.Fatal(err)
	}
	return containers.Container{
		ID: info.ID, Image: info.Image, SnapshotKey: info.SnapshotKey, Snapshotter: info.Snapshotter,
		SandboxID: info.SandboxID, Labels: info.Labels,
		Runtime: containers.RuntimeInfo{Name: info.Runtime.Name},
		Spec:    &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: info.Spec},
	}
}

func edited(t *testing.T, rec containers.Container, edit func(*specs.Spec)) containers.Container {
	t.Helper()
	spec, err := specOf(rec)
	if err != nil {
		t.Fatal(err)
	}
	edit(spec)
	b, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	rec.Spec = &anypb.Any{TypeUrl: rec.Spec.GetTypeUrl(), Value: b}
	return rec
}

const (
	webID  = "566df6bcc9ff25e890d5de5a299f8bfc2f50f29913496d4d17f371544ade4a47"
	forkID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	data   = "/var/lib/nerdctl/b3bb6081"
)

func TestRewriteNerdctl(t *testing.T) {
	src := record(t, "nerdctl.json")
	src.Labels["containerd.io/restart.count"] = "4"
	before, _ := json.Marshal(src)
	st := store{root: data, ns: "default"}
	ports := []portMapping{{HostPort: 18080, ContainerPort: 80, Protocol: "tcp", HostIP: "0.0.0.0"}}
	f, err := rewrite(src, &st, ports, identity{ID: forkID, Name: "web-2", From: "web@1"})
	if err != nil {
		t.Fatal(err)
	}
	if after, _ := json.Marshal(src); string(after) != string(before) {
		t.Error("the source's record was changed")
	}
	spec, err := specOf(f.Container)
	if err != nil {
		t.Fatal(err)
	}
	checkNoID(t, f.Container)
	want := map[string]string{
		nerdctlName:         "web-2",
		nerdctlStateDir:     data + "/containers/default/" + forkID,
		nerdctlHostname:     forkID[:12],
		nerdctlLogURI:       src.Labels[nerdctlLogURI],
		"nerdctl/networks":  `["bridge"]`,
		"nerdctl/namespace": "default",
	}
	for k, v := range want {
		if f.Labels[k] != v || spec.Annotations[k] != v {
			t.Errorf("%s is %q in the labels, %q in the annotations; want %q", k, f.Labels[k], spec.Annotations[k], v)
		}
	}
	if f.Labels[LabelForkedFrom] != "web@1" || f.Labels["app"] != "x" {
		t.Errorf("labels are %v", f.Labels)
	}
	for _, k := range []string{nerdctlPIDFile, nerdctlAnonymous} {
		if f.Labels[k] != "" || spec.Annotations[k] != "" {
			t.Errorf("%s is kept", k)
		}
	}
	if f.ID != forkID || f.SnapshotKey != forkID || f.Snapshotter != src.Snapshotter || f.Runtime.Name != src.Runtime.Name {
		t.Errorf("record is %+v", f.Container)
	}
	checkWebSpec(t, spec)
	checkWebDropped(t, f)
}

func checkWebDropped(t *testing.T, f *forkRecord) {
	t.Helper()
	if f.Late["containerd.io/restart.status"] != "running" || f.Labels["containerd.io/restart.status"] != "" {
		t.Errorf("restart labels are early: %v, late: %v", f.Labels, f.Late)
	}
	if n := f.Labels["containerd.io/restart.count"] + f.Late["containerd.io/restart.count"]; n != "" {
		t.Errorf("the fork was restarted %s times", n)
	}
	var dropped []string
	for _, d := range f.Dropped {
		dropped = append(dropped, d.Kind+" "+d.Name)
	}
	if want := []string{"port 0.0.0.0:18080->80/tcp", "setting ownership of anonymous volumes", "setting pid file"}; !slices.Equal(dropped, want) {
		t.Errorf("dropped %q, want %q", dropped, want)
	}
}

// checkNoID looks for the source's id anywhere in the fork's record.
func checkNoID(t *testing.T, rec containers.Container) {
	t.Helper()
	all, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	text := string(all) + string(rec.Spec.GetValue())
	for _, id := range []string{webID, webID[:shortID]} {
		if i := strings.Index(text, id); i >= 0 {
			t.Errorf("the source's id is in the fork: …%s…", text[max(0, i-80):i+20])
		}
	}
}

func checkWebSpec(t *testing.T, spec *specs.Spec) {
	t.Helper()
	if spec.Hostname != forkID[:12] || !slices.Contains(spec.Process.Env, "HOSTNAME="+forkID[:12]) {
		t.Errorf("hostname is %q, env is %q", spec.Hostname, spec.Process.Env)
	}
	if got, want := spec.Linux.CgroupsPath, "/default/"+forkID; got != want {
		t.Errorf("cgroup is %q, want %q", got, want)
	}
	sources := map[string]string{}
	for _, m := range spec.Mounts {
		sources[m.Destination] = m.Source
	}
	for dest, want := range map[string]string{
		"/etc/resolv.conf": data + "/containers/default/" + forkID + "/resolv.conf",
		"/etc/hostname":    data + "/containers/default/" + forkID + "/hostname",
		"/etc/hosts":       data + "/etchosts/default/" + forkID + "/hosts",
		"/data":            data + "/volumes/default/vol1/_data",
		"/mnt":             "/srv/img",
		"/proc":            "proc",
	} {
		if sources[dest] != want {
			t.Errorf("source of %s is %q, want %q", dest, sources[dest], want)
		}
	}
}

func TestRewriteCtr(t *testing.T) {
	src := record(t, "ctr.json")
	f, err := rewrite(src, nil, nil, identity{ID: "job1-fork-1", From: "job1@1"})
	if err != nil {
		t.Fatal(err)
	}
	spec, err := specOf(f.Container)
	if err != nil {
		t.Fatal(err)
	}
	if spec.Linux.CgroupsPath != "/default/job1-fork-1" || spec.Hostname != "" || len(f.Dropped)+len(f.Late) != 0 {
		t.Errorf("cgroup %q, hostname %q, dropped %v, late %v", spec.Linux.CgroupsPath, spec.Hostname, f.Dropped, f.Late)
	}
	if len(f.Labels) != 2 || f.Labels[LabelForkedFrom] != "job1@1" {
		t.Errorf("labels are %v", f.Labels)
	}
	// All that is not rewritten is the same.
	old, _ := specOf(src)
	old.Linux.CgroupsPath = spec.Linux.CgroupsPath
	// Without it, nerdctl does not remove the fork.
	old.Annotations = map[string]string{"nerdctl/networks": `["none"]`}
	a, _ := json.Marshal(old)
	b, _ := json.Marshal(spec)
	if string(a) != string(b) {
		t.Errorf("spec is\n%s\nwant\n%s", b, a)
	}
}

func TestRewriteSpecialCases(t *testing.T) {
	st := store{root: data, ns: "default"}
	to := identity{ID: forkID, Name: "web-2", From: "web@1"}

	shared := record(t, "nerdctl.json")
	shared.Labels[nerdctlIPC] = `{"mode":"shareable","hostShmPath":"` + st.state(webID) + `/shm"}`
	if _, err := rewrite(shared, &st, nil, to); !errdefs.IsFailedPrecondition(err) || statefork.Hint(err) == "" {
		t.Errorf("rewrite with shareable ipc = %v", err)
	}

	named := edited(t, record(t, "nerdctl.json"), func(s *specs.Spec) { s.Hostname = "www" })
	f, err := rewrite(named, &st, nil, to)
	if err != nil {
		t.Fatal(err)
	}
	if spec, _ := specOf(f.Container); spec.Hostname != "www" || f.Hostname != "" {
		t.Errorf("a chosen hostname became %q, %q", spec.Hostname, f.Hostname)
	}

	cri := record(t, "ctr.json")
	cri.Labels["io.cri-containerd.kind"] = "container"
	cri.Extensions = map[string]typeurl.Any{"io.cri-containerd.container.metadata": &anypb.Any{}, "other": &anypb.Any{}}
	cri = edited(t, cri, func(s *specs.Spec) {
		s.Linux.CgroupsPath = "kubepods-pod1.slice:cri-containerd:job1"
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/run/netns/cni-1"})
	})
	if f, err = rewrite(cri, nil, nil, to); err != nil {
		t.Fatal(err)
	}
	if f.Labels["io.cri-containerd.kind"] != "" || len(f.Extensions) != 1 || len(cri.Extensions) != 2 {
		t.Errorf("labels %v, extensions %v of %v", f.Labels, f.Extensions, cri.Extensions)
	}
	spec, _ := specOf(f.Container)
	if got, want := spec.Linux.CgroupsPath, "kubepods-pod1.slice:cri-containerd:"+forkID; got != want {
		t.Errorf("cgroup is %q, want %q", got, want)
	}
	if ext := externalOf(f.Container); !slices.Contains(ext, statefork.External{Kind: "network", Name: "network namespace", Detail: "/run/netns/cni-1"}) {
		t.Errorf("external is %v", ext)
	}
	if _, err := rewrite(containers.Container{ID: "x"}, nil, nil, to); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("rewrite without a spec = %v", err)
	}
}

func TestRewriteCgroup(t *testing.T) {
	for _, tt := range []struct{ path, want string }{
		{"", ""},
		{"/default/old", "/default/new"},
		{"/old", "/new"},
		{"old", "new"},
		{"/kubepods/besteffort/pod1/old", "/kubepods/besteffort/pod1/new"},
		{"system.slice:nerdctl:old", "system.slice:nerdctl:new"},
		{":nerdctl:old", ":nerdctl:new"},
	} {
		if got := rewriteCgroup(tt.path, "new"); got != tt.want {
			t.Errorf("rewriteCgroup(%q) = %q, want %q", tt.path, got, tt.want)
		}
	}
}

func TestExternalOf(t *testing.T) {
	var got []string
	for _, e := range externalOf(record(t, "nerdctl.json")) {
		got = append(got, e.Kind+" "+e.Name)
	}
	// What nerdctl mounts from the container's own directories is not shared.
	if want := []string{"mount /data", "mount /mnt", "mount /anon"}; !slices.Equal(got, want) {
		t.Errorf("external is %q, want %q", got, want)
	}
}

func TestMoved(t *testing.T) {
	for _, tt := range []struct{ path, want string }{
		{"/a/b", "/x"}, {"/a/b/c", "/x/c"}, {"/a/bc", "/a/bc"}, {"/a", "/a"}, {"tmpfs", "tmpfs"},
	} {
		if got := moved(tt.path, "/a/b", "/x"); got != tt.want {
			t.Errorf("moved(%q) = %q, want %q", tt.path, got, tt.want)
		}
	}
}
