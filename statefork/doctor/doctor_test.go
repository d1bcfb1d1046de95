package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// machine makes a root directory with some files of /proc and /sys.
func machine(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestMachine(t *testing.T) {
	file := func(name, text string) map[string]string { return map[string]string{name: text} }
	tests := []struct {
		name  string
		check func(root string) Finding
		files map[string]string
		want  Level
	}{
		{"new kernel", kernel, file("proc/sys/kernel/osrelease", "6.18.4-cloud\n"), OK},
		{"least kernel", kernel, file("proc/sys/kernel/osrelease", "5.10.0\n"), OK},
		{"old kernel", kernel, file("proc/sys/kernel/osrelease", "5.4.300\n"), Fail},
		{"no proc", kernel, nil, Fail},
		{"overlay", overlay, file("proc/filesystems", "nodev\tsysfs\n\text4\nnodev\toverlay\n"), OK},
		{"no overlay", overlay, file("proc/filesystems", "nodev\toverlayx\n\text4\n"), Fail},
		{"overlay without proc", overlay, nil, Fail},
		{"cgroup v2", cgroup, file("sys/fs/cgroup/cgroup.controllers", "cpu"), OK},
		{"cgroup v1", cgroup, file("sys/fs/cgroup/freezer/tasks", ""), OK},
		{"no freezer", cgroup, file("sys/fs/cgroup/cpu/tasks", ""), Fail},
		{"cni", cni, file("usr/lib/cni/bridge", ""), OK},
		{"cni elsewhere", cni, file("srv/cni/bridge", ""), OK},
		{"no cni", cni, file("usr/lib/cni/loopback", ""), Warn},
	}
	t.Setenv("CNI_PATH", "/srv/cni")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.check(machine(t, tt.files))
			if got.Level != tt.want || (got.Fix == "") != (tt.want == OK) || got.Check == "" || got.Detail == "" {
				t.Errorf("found %+v, want %s", got, tt.want)
			}
		})
	}
}

func TestUser(t *testing.T) {
	if f := root(0); f.Level != OK {
		t.Errorf("root: %+v", f)
	}
	if f := root(1000); f.Level != Fail {
		t.Errorf("a user: %+v", f)
	}
}

func TestUnreachable(t *testing.T) {
	found := daemon(t.Context(), Config{Address: filepath.Join(t.TempDir(), "none")})
	if len(found) != 1 || found[0].Level != Fail || !Failed(found) {
		t.Errorf("found %+v", found)
	}
	if Failed([]Finding{{Level: OK}, {Level: Warn}}) {
		t.Error("a warning is a failure")
	}
}

func TestAtLeast(t *testing.T) {
	for _, tt := range []struct {
		have, want string
		ok         bool
	}{
		{"4.1", "4.1", true}, {"4.1.1", "4.1", true}, {"4.10", "4.2", true}, {"5.0", "4.9", true},
		{"4.0.9", "4.1", false}, {"3.17", "4.1", false}, {"v2.4.2", "2.0", true}, {"none", "1.0", false},
	} {
		if got := atLeast(tt.have, tt.want); got != tt.ok {
			t.Errorf("atLeast(%q, %q) = %v", tt.have, tt.want, got)
		}
	}
}

func TestLastLine(t *testing.T) {
	for _, tt := range []struct {
		out  string
		err  error
		want string
	}{
		{"one\ntwo\n\n", nil, "two"}, {"", errors.New("a\nb"), "a; b"}, {" \n", nil, "it says nothing"},
	} {
		if got := lastLine([]byte(tt.out), tt.err); got != tt.want {
			t.Errorf("lastLine(%q) = %q, want %q", tt.out, got, tt.want)
		}
	}
}
