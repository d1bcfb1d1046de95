package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// bounded is a context for what must come soon.
func bounded() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	time.AfterFunc(patience, cancel)
	return ctx
}

func execveat(fd int, argv, envv []*byte) error {
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(new(byte))),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envv[0])), unix.AT_EMPTY_PATH, 0)
	return os.NewSyscallError("execveat", errno)
}

// TestEmptyRoot runs the launcher where there is nothing at all but the command:
// no /proc, no library.
func TestEmptyRoot(t *testing.T) {
	f := needProgram(t)
	root := t.TempDir()
	copyFile(t, needBusybox(t), filepath.Join(root, "echo")) // an applet by its name
	n, err := NewNotify("echo")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	args, err := Args(Spec{Mode: Monitor, Program: 3, Notify: 4, Path: "echo", Args: []string{"echo", "a b", "c"}})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = []string{helperVariable + "=execveat", "ROOT=" + root}
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	cmd.ExtraFiles = []*os.File{f, n.File()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := n.Wait(bounded())
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if got := stat(t, p.Pid)(statParent); got != cmd.Process.Pid {
		t.Errorf("parent is %d, not the monitor %d", got, cmd.Process.Pid)
	}
	if err := n.Release(bounded()); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if out.String() != "a b c\n" {
		t.Errorf("output is %q", out.String())
	}
}

// start is one start in a box.
type start struct {
	mode Mode
	argv []string
	// path is argv[0] if empty.
	path string
	// files are the command's; those that are nil are not.
	files    map[int]*os.File
	terminal bool
	// attr is the launcher's.
	attr *syscall.SysProcAttr
	// wrap executes the launcher by another command.
	wrap []string
	// oldKernel does without pidfds in messages.
	oldKernel bool
}

// started is a launcher that was started in a box.
type started struct {
	*Notify
	t   testing.TB
	cmd *exec.Cmd
}

// start starts a launcher with some files that nobody has asked for.
func (b *box) start(s start) *started {
	b.t.Helper()
	path := s.path
	if path == "" {
		path = s.argv[0]
	}
	n, err := newNotify(path, !s.oldKernel)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { n.Close() })
	extra := []*os.File{needProgram(b.t), n.File(), os.Stderr}
	files := map[int]int{}
	for to, f := range s.files {
		files[to] = 3 + len(extra)
		extra = append(extra, f)
	}
	if s.files == nil {
		files = nil
	}
	args, err := Args(Spec{Mode: s.mode, Program: 3, Notify: 4, Path: path, Args: s.argv, Files: files, Terminal: s.terminal})
	if err != nil {
		b.t.Fatal(err)
	}
	args = append(s.wrap[:len(s.wrap):len(s.wrap)], args...)
	cmd := &exec.Cmd{
		Path: args[0], Args: args, Env: []string{"PATH=:bin:/none:/bin"}, SysProcAttr: s.attr,
		Stdin: os.Stderr, Stdout: os.Stderr, Stderr: os.Stderr, ExtraFiles: extra,
	}
	if err := b.inside(cmd.Start); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &started{Notify: n, t: b.t, cmd: cmd}
}

// wait waits for the command, which has not begun.
func (s *started) wait() *Process {
	s.t.Helper()
	p, err := s.Wait(bounded())
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = p.close() })
	return p
}

// command waits until the command has begun.
func (s *started) command() *Process {
	s.t.Helper()
	p := s.wait()
	if err := s.Release(bounded()); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// end returns how the launcher has ended.
func (s *started) end() syscall.WaitStatus {
	s.t.Helper()
	_ = s.cmd.Wait()
	if s.cmd.ProcessState == nil {
		s.t.Fatal("launcher has no state")
	}
	return s.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

// pipe makes a pipe whose ends are closed after the test.
func pipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.Close()
		_ = w.Close()
	})
	return r, w
}

func TestOrphan(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprintf("oldKernel=%v", old), func(t *testing.T) {
			b := newBox(t)
			inR, inW := pipe(t)
			outR, outW := pipe(t)
			s := b.start(start{
				mode: Orphan, path: "busybox", argv: []string{"cat", "-"}, oldKernel: old,
				// 1 and 4 are what the launcher's own 1 and notification are.
				files: map[int]*os.File{0: inR, 1: outW, 4: outW, 200: inR},
			})
			p := s.wait()
			if state := s.end(); state != 0 {
				t.Errorf("launcher ends with %#x", state)
			}
			if err := s.Release(bounded()); err != nil {
				t.Fatal(err)
			}
			checkOrphan(t, b, p)
			want := map[int]string{0: link(t, inR), 1: link(t, outW), 4: link(t, outW), 200: link(t, inR)}
			if got := openFiles(t, p.Pid); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("open are %v, not %v", got, want)
			}
			for _, f := range []*os.File{inR, outW} {
				if err := f.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := io.WriteString(inW, "through"); err != nil {
				t.Fatal(err)
			}
			if err := inW.Close(); err != nil {
				t.Fatal(err)
			}
			if out, err := io.ReadAll(outR); err != nil || string(out) != "through" {
				t.Errorf("output is %q: %v", out, err)
			}
			awaitEnd(t, p)
			eventually(t, "init reaps the command", func() bool { return unix.Kill(p.Pid, 0) != nil })
		})
	}
}

func checkOrphan(t *testing.T, b *box, p *Process) {
	t.Helper()
	eventually(t, "init is the parent", func() bool { return stat(t, p.Pid)(statParent) == b.pid })
	field := stat(t, p.Pid)
	if field(statSession) != p.Pid || field(statGroup) != p.Pid {
		t.Errorf("%d is in session %d and group %d", p.Pid, field(statSession), field(statGroup))
	}
	outside, inside, _ := strings.Cut(status(t, p.Pid, "NSpid"), "\t")
	if outside != fmt.Sprint(p.Pid) || inside == "" || inside == outside {
		t.Errorf("pid %d is %q outside, %q inside", p.Pid, outside, inside)
	}
	for _, key := range []string{"SigBlk", "SigIgn"} {
		if got := status(t, p.Pid, key); strings.Trim(got, "0") != "" {
			t.Errorf("%s is %s", key, got)
		}
	}
	if got := arguments(t, p.Pid); !slices.Equal(got, []string{"cat", "-"}) {
		t.Errorf("arguments are %q", got)
	}
}

func link(t testing.TB, f *os.File) string {
	t.Helper()
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestMonitor(t *testing.T) {
	b := newBox(t)
	for script, want := range map[string]syscall.WaitStatus{
		"exit 0":        0,
		"exit 42":       42 << 8,
		"exit 255":      255 << 8,
		"kill -KILL $$": syscall.WaitStatus(unix.SIGKILL),
		"kill -TERM $$": syscall.WaitStatus(unix.SIGTERM),
		// These would dump core, the bit for which is 0x80.
		"ulimit -c unlimited; kill -SEGV $$": syscall.WaitStatus(unix.SIGSEGV),
		"kill -ABRT $$":                      syscall.WaitStatus(unix.SIGABRT),
		// A real-time signal, the last one that there is.
		"kill -64 $$": 64,
	} {
		t.Run(script, func(t *testing.T) {
			s := b.in(t).start(start{mode: Monitor, argv: []string{"busybox", "sh", "-c", script}})
			s.command()
			if got := s.end(); got != want {
				t.Errorf("ends with %#x, not %#x", got, want)
			}
		})
	}
}

// TestMonitorLives has a monitor stand what others do to it.
func TestMonitorLives(t *testing.T) {
	b := newBox(t)
	inR, inW := pipe(t)
	outR, outW := pipe(t)
	s := b.start(start{mode: Monitor, argv: []string{"busybox", "cat"}, files: map[int]*os.File{0: inR, 1: outW}})
	p := s.command()
	monitor := s.cmd.Process.Pid
	if got := stat(t, p.Pid)(statParent); got != monitor {
		t.Errorf("parent is %d, not the monitor", got)
	}
	eventually(t, "monitor has no file", func() bool {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", monitor))
		return err == nil && len(open) == 0
	})
	eventually(t, "monitor hides", func() bool { return status(t, monitor, "Name") == "statefork" })
	eventually(t, "arguments are gone", func() bool { return len(arguments(t, monitor)) == 1 })
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGTSTP, unix.SIGTERM, unix.SIGUSR1} {
		if err := unix.Kill(monitor, sig); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []*os.File{inR, outW, inW} {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := io.ReadAll(outR); err != nil || len(out) != 0 {
		t.Errorf("output is %q: %v", out, err)
	}
	if got := s.end(); got != 0 {
		t.Errorf("ends with %#x", got)
	}
}

func TestMonitorKilled(t *testing.T) {
	b := newBox(t)
	inR, inW := pipe(t)
	_, outW := pipe(t)
	s := b.start(start{mode: Monitor, path: "busybox", argv: []string{"cat", "-"}, files: map[int]*os.File{0: inR, 1: outW}})
	p := s.command()
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := s.end(); got != syscall.WaitStatus(unix.SIGKILL) {
		t.Errorf("monitor ends with %#x", got)
	}
	checkOrphan(t, b, p)
	for _, f := range []*os.File{inR, inW} {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	awaitEnd(t, p) // by the end of its input
}

func TestErrors(t *testing.T) {
	b := newBox(t)
	for name, mode := range map[string]os.FileMode{"bin/forbidden": 0o644, "bin/text": 0o755} {
		if err := os.WriteFile(filepath.Join(b.root, name), []byte("no program\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	r, _ := pipe(t)
	for _, test := range []struct {
		start
		want  string
		class error
		code  int
	}{
		{start{path: "bash"}, `start "bash": no such file or directory`, errdefs.ErrNotFound, 127},
		{start{path: "/bin/bash"}, `start "/bin/bash": no such file or directory`, errdefs.ErrNotFound, 127},
		{start{path: "/bin/text/bash"}, `start "/bin/text/bash": not a directory`, errdefs.ErrNotFound, 126},
		{start{path: "forbidden"}, `start "forbidden": permission denied`, errdefs.ErrPermissionDenied, 126},
		{start{path: "/bin"}, `start "/bin": permission denied`, errdefs.ErrPermissionDenied, 126},
		{start{path: "text"}, `start "text": exec format error`, errdefs.ErrInvalidArgument, 126},
		{start{path: strings.Repeat("n", 5000)}, "", errdefs.ErrNotFound, 127},
		{start{path: "busybox", terminal: true, files: map[int]*os.File{0: r, 2: r}},
			`start "busybox": take terminal: inappropriate ioctl for device`, errdefs.ErrInvalidArgument, 126},
		{start{path: "busybox", files: map[int]*os.File{0: nil}},
			`start "busybox": arrange files: bad file descriptor`, errdefs.ErrInvalidArgument, 126},
		{start{path: "busybox", files: map[int]*os.File{1 << 29: r}},
			`start "busybox": arrange files: invalid argument`, errdefs.ErrInvalidArgument, 126},
	} {
		for _, mode := range []Mode{Orphan, Monitor} {
			t.Run(fmt.Sprintf("%.20s %c", test.path, mode), func(t *testing.T) {
				test.mode, test.argv = mode, []string{"name"}
				s := b.in(t).start(test.start)
				s.wait()
				err := s.Release(bounded())
				if err == nil || test.want != "" && err.Error() != test.want || !errors.Is(err, test.class) {
					t.Errorf("error is %v", err)
				}
				code := test.code
				if mode == Orphan {
					code = 0 // what has become of the command it does not know
				}
				if got := s.end(); got.ExitStatus() != code {
					t.Errorf("ends with %#x", got)
				}
			})
		}
	}
}

func TestLimit(t *testing.T) {
	b := newBox(t)
	// The limit is that of one user, which nobody else is. It is for processes
	// before fork, so the shell that sets it is the last one.
	const user = 2147483000
	s := b.start(start{
		mode: Orphan, argv: []string{"busybox", "true"},
		attr: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}},
		wrap: []string{busybox, "sh", "-c", `ulimit -u 1 && exec "$0" "$@"`},
	})
	_, err := s.Wait(bounded())
	if err == nil || err.Error() != `start "busybox": fork: resource temporarily unavailable` || !errdefs.IsResourceExhausted(err) {
		t.Errorf("error is %v", err)
	}
	if got := s.end(); got.ExitStatus() != 126 {
		t.Errorf("ends with %#x", got)
	}
}

// TestKilled kills the command before it is let go.
func TestKilled(t *testing.T) {
	b := newBox(t)
	s := b.start(start{mode: Monitor, argv: []string{"busybox", "true"}})
	p := s.wait()
	if err := unix.PidfdSendSignal(int(p.Pidfd.Fd()), unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, p)
	if err := s.Release(bounded()); !errdefs.IsAborted(err) {
		t.Errorf("error is %v", err)
	}
	if got := s.end(); got != syscall.WaitStatus(unix.SIGKILL) {
		t.Errorf("ends with %#x", got)
	}
}

// TestGivenUp closes the notification before the command is let go.
func TestGivenUp(t *testing.T) {
	b := newBox(t)
	s := b.start(start{mode: Monitor, argv: []string{"busybox", "true"}})
	p := s.wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, p)
	if got := s.end(); got.ExitStatus() != 126 {
		t.Errorf("ends with %#x", got)
	}
}

// BenchmarkStart measures from before the launcher is executed.
func BenchmarkStart(b *testing.B) {
	box := newBox(b)
	var told, begun time.Duration
	for b.Loop() {
		n, err := NewNotify("true")
		if err != nil {
			b.Fatal(err)
		}
		args, err := Args(Spec{Mode: Monitor, Program: 3, Notify: 4, Path: busybox, Args: []string{"true"}})
		if err != nil {
			b.Fatal(err)
		}
		cmd := &exec.Cmd{
			Path: args[0], Args: args, Stdin: os.Stderr, Stdout: os.Stderr, Stderr: os.Stderr,
			ExtraFiles: []*os.File{needProgram(b), n.File()},
		}
		if err := box.inside(cmd.Start); err != nil {
			b.Fatal(err)
		}
		// Start returns with execve.
		executed := time.Now()
		p, err := n.Wait(bounded())
		if err != nil {
			b.Fatal(err)
		}
		told += time.Since(executed)
		if err := n.Release(bounded()); err != nil {
			b.Fatal(err)
		}
		begun += time.Since(executed)
		if err := cmd.Wait(); err != nil {
			b.Fatal(err)
		}
		if err := p.close(); err != nil {
			b.Fatal(err)
		}
		if err := n.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(told.Microseconds())/float64(b.N), "us-to-told")
	b.ReportMetric(float64(begun.Microseconds())/float64(b.N), "us-to-begun")
}
