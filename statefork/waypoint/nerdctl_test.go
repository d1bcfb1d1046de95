package waypoint

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// fill makes the files that nerdctl has for a container.
func fill(t *testing.T, s store, id, name string) {
	t.Helper()
	for path, text := range map[string]string{
		filepath.Join(s.state(id), "hostname"):              id[:12] + "\n",
		filepath.Join(s.state(id), "resolv.conf"):           "nameserver 192.0.2.1\n",
		filepath.Join(s.state(id), "log-config.json"):       `{"driver":"json-file","opts":{"log-path":"/srv/web.log","max-size":"1m"}}`,
		filepath.Join(s.state(id), "network-config.json"):   `{"portMappings":[{"HostPort":18080,"ContainerPort":80,"Protocol":"tcp","HostIP":"0.0.0.0"}]}`,
		filepath.Join(s.state(id), "lifecycle.json"):        `{}`,
		filepath.Join(s.state(id), id+"-json.log"):          "a line",
		filepath.Join(s.state(id), "oci-hook.postStop.log"): "",
		filepath.Join(s.hosts(id), "hosts"):                 "10.4.0.2 web\n",
		filepath.Join(s.hosts(id), "meta.json"):             `{"ID":"` + id + `","Networks":{"bridge":{}},"Hostname":"` + id[:12] + `","ExtraHosts":{"a":"b"},"Name":"` + name + `"}`,
		s.name(name):                                        id,
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, path ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// files lists all files below a directory.
func files(t *testing.T, root string) string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil {
			list = append(list, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(list, "\n")
}

func TestStoreAdd(t *testing.T) {
	s := store{root: t.TempDir(), ns: "default"}
	fill(t, s, webID, "web")
	before := files(t, s.root)
	to := identity{ID: forkID, Name: "web-2"}
	if err := s.add(webID, to, forkID[:12]); err != nil {
		t.Fatal(err)
	}
	dir := s.state(forkID)
	for _, tt := range []struct{ name, got, want string }{
		{"name", read(t, s.name("web-2")), forkID},
		{"hostname", read(t, dir, "hostname"), forkID[:12] + "\n"},
		{"resolv.conf", read(t, dir, "resolv.conf"), "nameserver 192.0.2.1\n"},
		{"log", read(t, dir, "log-config.json"), `{"driver":"json-file","opts":{"max-size":"1m"}}`},
		{"log file", read(t, dir, forkID+"-json.log"), ""},
		{"ports", read(t, dir, "network-config.json"), "{}"},
		{"hosts", read(t, s.hosts(forkID), "hosts"), "10.4.0.2 web\n"},
	} {
		if tt.got != tt.want {
			t.Errorf("%s is %q, want %q", tt.name, tt.got, tt.want)
		}
	}
	var meta map[string]any
	if err := json.Unmarshal([]byte(read(t, s.hosts(forkID), "meta.json")), &meta); err != nil {
		t.Fatal(err)
	}
	if meta["ID"] != forkID || meta["Name"] != "web-2" || meta["Hostname"] != forkID[:12] || meta["Networks"] != nil || meta["ExtraHosts"] == nil {
		t.Errorf("meta is %v", meta)
	}
	for _, name := range []string{"lifecycle.json", "oci-hook.postStop.log", webID + "-json.log"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s is copied", name)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "hostname")); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode of hostname: %v, %v", info, err)
	}
	if err := s.remove(to); err != nil {
		t.Fatal(err)
	}
	if after := files(t, s.root); after != before {
		t.Errorf("left behind:\n%s\nwant\n%s", after, before)
	}
}

func TestStoreAddUndoes(t *testing.T) {
	s := store{root: t.TempDir(), ns: "default"}
	fill(t, s, webID, "web")
	if err := os.WriteFile(filepath.Join(s.hosts(webID), "meta.json"), []byte("no json"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := files(t, s.root)
	if err := s.add(webID, identity{ID: forkID, Name: "web-2"}, ""); err == nil {
		t.Error("add copied what it cannot read")
	}
	if err := s.add(webID, identity{ID: forkID, Name: "web"}, ""); !errdefs.IsAlreadyExists(err) {
		t.Errorf("add with the source's name = %v", err)
	}
	if after := files(t, s.root); after != before {
		t.Errorf("left behind:\n%s\nwant\n%s", after, before)
	}
	if got := read(t, s.name("web")); got != webID {
		t.Errorf("the name web is now that of %q", got)
	}
}

func TestStoreOf(t *testing.T) {
	s, err := storeOf(data+"/containers/default/"+webID, "default", webID)
	if err != nil || s.root != data {
		t.Errorf("storeOf = %v, %v", s, err)
	}
	for _, dir := range []string{"", "containers/default/" + webID, "/x/containers/other/" + webID, "/x/containers/default/other", "/x/states/default/" + webID} {
		if s, err := storeOf(dir, "default", webID); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("storeOf(%q) = %v, %v", dir, s, err)
		}
	}
}

func TestStorePorts(t *testing.T) {
	s := store{root: t.TempDir(), ns: "default"}
	if ports, err := s.ports(webID); len(ports) != 0 || err != nil {
		t.Errorf("ports of nothing = %v, %v", ports, err)
	}
	fill(t, s, webID, "web")
	ports, err := s.ports(webID)
	if err != nil || len(ports) != 1 || portName(ports[0]) != "0.0.0.0:18080->80/tcp" {
		t.Errorf("ports = %v, %v", ports, err)
	}
}
