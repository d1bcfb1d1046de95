package launch

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	patience = 10 * time.Second
	busybox  = "/bin/busybox"
)

// missing ends a test that lacks something: in CI, where all must be there, as
// failed.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

// needBusybox returns the path of a busybox that needs no libraries.
func needBusybox(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	path, err := exec.LookPath("busybox")
	if err != nil {
		missing(t, "busybox")
	}
	if interp, err := hasInterpreter(path); err != nil || interp {
		missing(t, "a static busybox")
	}
	return path
}

// needProgram returns the launcher, which not every build has.
func needProgram(t testing.TB) *os.File {
	t.Helper()
	f, err := File()
	if err != nil {
		missing(t, "a launcher: "+err.Error())
	}
	return f
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

// eventually polls until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !condition(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

// box is a pid and mount namespace with a busybox and nothing else. Its init is a
// shell that has no file open and reaps what it inherits: ash waits for any child.
type box struct {
	t    testing.TB
	root string
	pid  int
}

const boxScript = `set -e
$B mount --make-rprivate /
$B mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
$B pivot_root . old
cd /
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts
$B umount -l /old
echo ready
exec $B sh -c 'while :; do /bin/busybox sleep 86400; done' <&- >&- 2>&-
`

func newBox(t testing.TB) *box {
	t.Helper()
	needProgram(t)
	host := needBusybox(t)
	b := &box{t: t, root: t.TempDir()}
	// The whole way down to it must be open to users other than root.
	for dir := b.root; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	copyFile(t, host, filepath.Join(b.root, busybox))
	for _, dir := range []string{"proc", "dev/pts", "old"} {
		if err := os.MkdirAll(filepath.Join(b.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(host, "sh", "-c", boxScript)
	cmd.Env = []string{"ROOT=" + b.root, "B=" + host}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID, Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		missing(t, "namespaces: "+err.Error())
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("box says %q: %v", line, err)
	}
	b.pid = cmd.Process.Pid
	eventually(t, "init of the box", func() bool {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.pid))
		return err == nil && len(open) == 0
	})
	return b
}

// in returns the box for a subtest.
func (b *box) in(t testing.TB) *box { return &box{t: t, root: b.root, pid: b.pid} }

// inside calls f on a thread that is in the box, as a child of which a process is
// in its pid namespace too, and throws the thread away.
func (b *box) inside(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			fd, err := unix.PidfdOpen(b.pid, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Setns(fd, unix.CLONE_NEWNS|unix.CLONE_NEWPID); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-done
}

// openPTY opens a terminal of the box.
func (b *box) openPTY() (master, slave *os.File) {
	b.t.Helper()
	err := b.inside(func() (err error) {
		master, err = os.OpenFile("/dev/pts/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			return err
		}
		if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		number, err := unix.IoctlGetUint32(int(master.Fd()), unix.TIOCGPTN)
		if err != nil {
			return err
		}
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = master.Close()
		_ = slave.Close()
	})
	return master, slave
}

// openFiles returns the targets of a process' descriptors.
func openFiles(t testing.TB, pid int) map[int]string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[int]string{}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if files[fd], err = os.Readlink(filepath.Join(dir, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// arguments returns a process' arguments that are not empty.
func arguments(t testing.TB, pid int) []string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.FieldsFunc(string(data), func(r rune) bool { return r == 0 })
}

// stat are the fields of /proc/PID/stat from the state on, by proc(5)'s numbers.
func stat(t testing.TB, pid int) func(field int) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	return func(field int) int {
		n, err := strconv.Atoi(fields[field-3])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// Fields of stat.
const (
	statParent, statGroup, statSession, statTTY, statForeground = 4, 5, 6, 7, 8
)

// status returns one line of /proc/PID/status.
func status(t testing.TB, pid int, key string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut("\n"+string(data), "\n"+key+":")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

// awaitEnd waits until the process has ended.
func awaitEnd(t testing.TB, p *Process) {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.Pidfd.Fd()), Events: unix.POLLIN}}, int(patience/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			t.Fatalf("process %d has not ended: %v", p.Pid, err)
		}
		return
	}
}
