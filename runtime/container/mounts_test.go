package container

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A container as nerdctl makes it, on cgroup v1, with a volume below which
// another file system is mounted.
const sampleMounts = `100 90 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/l/1,upperdir=/l/2,workdir=/m/2/work
101 100 0:51 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
102 100 0:52 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
103 102 0:53 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
104 102 0:54 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k,inode64
105 102 0:55 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
106 100 0:56 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
107 106 0:57 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=755,inode64
108 107 0:30 /default/c1 /sys/fs/cgroup/memory ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,memory
109 100 8:1 /var/lib/x/hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
110 100 8:1 /data /data rw,relatime - ext4 /dev/sda1 rw
111 110 0:60 / /data/sub rw,relatime - tmpfs tmpfs rw
112 101 0:52 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755,inode64
113 101 0:51 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
114 102 0:53 /0 /dev/console rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
115 100 0:50 /opt /mnt rw,relatime - overlay overlay rw,lowerdir=/l/1,upperdir=/l/2,workdir=/m/2/work
`

func parseMounts(t *testing.T, table string) []*mountinfo.Info {
	t.Helper()
	infos, err := mountinfo.GetMountsFromReader(strings.NewReader(table), nil)
	if err != nil {
		t.Fatal(err)
	}
	return infos
}

func TestClassify(t *testing.T) {
	ext, err := classify(parseMounts(t, sampleMounts), []string{"/etc/hosts", "/data"})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range ext {
		got[m.Mountpoint] = m.Kind
	}
	want := map[string]string{
		"/dev":                  mountTmpfs,
		"/dev/shm":              mountTmpfs,
		"/sys/fs/cgroup":        mountTmpfs,
		"/sys/fs/cgroup/memory": mountCgroup,
		"/etc/hosts":            mountBind,
		"/data":                 mountBind,
		"/data/sub":             mountBind, // came with the volume
		"/proc/kcore":           mountTmpfs,
	}
	for p, k := range want {
		if got[p] != k {
			t.Errorf("%s: got kind %q, want %q", p, got[p], k)
		}
		delete(got, p)
	}
	for p, k := range got {
		t.Errorf("%s: got kind %q, want it left to CRIU", p, k)
	}
	bases := tmpfsBases(ext)
	if b := bases["0:52"]; b.Mountpoint != "/dev" {
		t.Errorf("base of the instance behind /dev and /proc/kcore: got %q", b.Mountpoint)
	}
}

func TestClassifyRefuses(t *testing.T) {
	for name, table := range map[string]string{
		"fuse":    "1 0 0:50 / / rw - overlay overlay rw\n2 1 0:61 / /mnt/f rw - fuse.sshfs s rw\n",
		"bracket": "1 0 0:50 / / rw - overlay overlay rw\n2 1 0:61 / /mnt/a]b rw - tmpfs t rw\n",
	} {
		_, err := classify(parseMounts(t, table), nil)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "/mnt/") {
			t.Errorf("%s: got %v, want a refusal that names the mountpoint", name, err)
		}
	}
}

func TestExternalNames(t *testing.T) {
	ext, err := classify(parseMounts(t, sampleMounts), []string{"/etc/hosts", "/data"})
	if err != nil {
		t.Fatal(err)
	}
	d := &Description{Mounts: ext}
	got := strings.Join(d.externalNames(), " ")
	if want := "/data /data/sub"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAround(t *testing.T) {
	dir := t.TempDir() // below /tmp, unless told otherwise
	real := filepath.Join(dir, "criu.d", "criu")
	if err := os.MkdirAll(filepath.Dir(real), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(real, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "criu")
	if err := os.Symlink("criu.d/criu", link); err != nil {
		t.Fatal(err)
	}
	for program, want := range map[string]string{
		"/usr/sbin/none":   "",
		"/tmpx/criu":       "",
		"/tmp/criu-none":   "/tmp/criu-none",
		"/tmp/a/b/../criu": "/tmp/a",
	} {
		if got := strings.Join(around(program), " "); got != want {
			t.Errorf("%s: got %q, want %q", program, got, want)
		}
	}
	if !strings.HasPrefix(dir, hiddenDir+"/") {
		t.Skip("temporary files are not in " + hiddenDir)
	}
	if got := around(link); len(got) != 1 || !strings.HasPrefix(dir, got[0]) {
		t.Errorf("%s: got %q", link, got)
	}
}

// TestTmpfsRoundTrip saves a tmpfs and fills a new one from it.
func TestTmpfsRoundTrip(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	ctx := context.Background()
	const options = "rw,size=4096k,mode=755"
	src, err := mountTmpfsDetached("shm", options)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	top := procPath(src)
	for name, content := range map[string]string{"a": "alpha", "d/b": "beta", "d/.hidden": ""} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(top, name)), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(top, name), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(top, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(top, "a"), filepath.Join(top, "hard")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(top, "a"), 7, 8); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(top, 0o1777); err != nil {
		t.Fatal(err)
	}
	ext := []ExternalMount{{Key: "m0", Mountpoint: "/dev/shm", Kind: mountTmpfs, Options: options, Dev: "0:99", Root: "/", Dir: true}}
	live := &staging{mounts: []staged{{name: "m0", dir: true, file: src}}}
	if err := describeTmpfs(ext, live); err != nil {
		t.Fatal(err)
	}
	images := t.TempDir()
	if err := saveTmpfs(ctx, images, ext, live); err != nil {
		t.Fatal(err)
	}
	dst, err := newTmpfs(ctx, ext[0], filepath.Join(images, archiveName("0:99")))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	got := procPath(dst)
	for name, want := range map[string]string{"a": "alpha", "hard": "alpha", "d/b": "beta", "d/.hidden": ""} {
		b, err := os.ReadFile(filepath.Join(got, name))
		if err != nil || string(b) != want {
			t.Errorf("%s: got %q, %v; want %q", name, b, err, want)
		}
	}
	if l, err := os.Readlink(filepath.Join(got, "link")); l != "/etc/passwd" {
		t.Errorf("link: got %q, %v", l, err)
	}
	a, err := os.Stat(filepath.Join(got, "a"))
	if err != nil {
		t.Fatal(err)
	}
	hard, err := os.Stat(filepath.Join(got, "hard"))
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(a, hard) {
		t.Error("hard link became a second file")
	}
	if fi, err := os.Stat(got); err != nil || fi.Mode()&os.ModeSticky == 0 {
		t.Errorf("mode of the root directory: got %v, %v", fi.Mode(), err)
	}
}
