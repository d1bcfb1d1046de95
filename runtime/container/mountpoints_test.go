package container

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
)

// TestMakeMountpoints makes what is missing and nothing else, and follows no
// link out of the root.
func TestMakeMountpoints(t *testing.T) {
	root, outside := filepath.Join(t.TempDir(), "root"), t.TempDir()
	for _, dir := range []string{root, filepath.Join(root, "there"), filepath.Join(root, "real")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"out": outside, "in": "/real", "up": "../../.."} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	desc := &Description{Mounts: []ExternalMount{
		{Mountpoint: "/there", Dir: true},
		{Mountpoint: "/a/b/dir", Dir: true},
		{Mountpoint: "/a/b/dir/inner", Dir: true},
		{Mountpoint: "/etc/hosts"},
		{Mountpoint: "/in/file"},
	}}
	cfg := &libConfig{Mounts: []*configs.Mount{{Destination: "/proc", Device: "proc"}, {Destination: "/bound", Device: "bind"}}}
	for range 2 { // the second time all is there
		if err := makeMountpoints(root, desc, cfg); err != nil {
			t.Fatal(err)
		}
	}
	for name, dir := range map[string]bool{"proc": true, "a/b/dir": true, "etc/hosts": false, "real/file": false} {
		if st, err := os.Lstat(filepath.Join(root, name)); err != nil || st.IsDir() != dir {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	for _, name := range []string{"bound", "a/b/dir/inner"} {
		if _, err := os.Lstat(filepath.Join(root, name)); err == nil {
			t.Errorf("%s was made", name)
		}
	}
	if st, err := os.Stat(filepath.Join(root, "there")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("what was there: %v, %v", st, err)
	}
	for _, link := range []string{"/out/dir", "/up/etc/dir"} {
		_ = makeMountpoints(root, &Description{Mounts: []ExternalMount{{Mountpoint: link, Dir: true}}}, &libConfig{})
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("outside of the root there is %v, %v", entries, err)
	}
}
