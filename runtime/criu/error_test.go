package criu

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestSummarize reads logs of CRIU 4.1.1, the first two of them with times, as
// they are from log level 3 on.
func TestSummarize(t *testing.T) {
	const rlimit = "Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
	for _, tc := range []struct {
		name, log, want string
		refused         bool
	}{
		{
			name: "nested namespace, with times",
			log: "(00.000120) " + rlimit +
				"(00.062089) Add pid ns 9 pid 13113\n" +
				"(00.062283) Error (criu/namespaces.c:460): Can't dump nested user namespace for 13114\n" +
				"(00.062287) Error (criu/namespaces.c:754): Can't make userns id\n" +
				"(00.062311) net: Unlock network\n" +
				"(00.062367) Error (criu/cr-dump.c:2111): Dumping FAILED.\n",
			want:    "Can't dump nested user namespace for 13114",
			refused: true,
		},
		{
			name: "error of a task, with times",
			log: "(120.10291)      1: Advanced iov 0 bytes, 1->1 iovs, 0 tail\n" +
				"(120.10292)      1: Error (criu/pagemap.c:557): Can't read async pr bytes (-1 / 12288 read, 0 off, 2 iovs)\n",
			want: "Can't read async pr bytes (-1 / 12288 read, 0 off, 2 iovs)",
		},
		{
			name: "error inside the task",
			log: rlimit +
				"pie: 1: Error (criu/pie/parasite.c:588): send_fds failed (-22)\n" +
				"pie: 1: Close the control socket for writing\n" +
				"Error (criu/parasite-syscall.c:280): Can't retrieve FDs from socket\n" +
				"Error (compel/src/lib/infect-rpc.c:44): Message reply from daemon is trimmed (12/0)\n" +
				"Error (criu/cr-dump.c:1681): Dump files (pid: 4868) failed with -1\n" +
				"Error (criu/cr-dump.c:2111): Dumping FAILED.\n",
			want:    "an open file cannot be passed on, as an io_uring cannot: send_fds failed (-22)",
			refused: true,
		},
		{
			name: "refusal after a warning",
			log: rlimit +
				"Error (criu/sk-inet.c:130): inet: Unsupported proto 262 for socket 20a27\n" +
				"Error (criu/cr-dump.c:1681): Dump files (pid: 10369) failed with -1\n",
			want:    "an MPTCP socket is open (net.mptcp.enabled=0 prevents it): inet: Unsupported proto 262 for socket 20a27",
			refused: true,
		},
		{
			name: "failed restore",
			log: rlimit +
				"Warn  (criu/cr-restore.c:1043): Set CLONE_PARENT | CLONE_NEWPID but it might cause restore problem,because not all kernels support such clone flags combinations!\n" +
				"     1: Error (criu/pagemap.c:557): Can't read async pr bytes (-1 / 12288 read, 0 off, 2 iovs)\n" +
				"Error (criu/cr-restore.c:2320): Restoring FAILED.\n",
			want: "Can't read async pr bytes (-1 / 12288 read, 0 off, 2 iovs)",
		},
		{
			name: "several errors",
			log: rlimit +
				"Error (compel/src/lib/infect.c:418): Unable to detach from 10418: No such process\n" +
				"Error (criu/protobuf.c:72): Unexpected EOF on (empty-image)\n",
			want: "Unable to detach from 10418: No such process; Unexpected EOF on (empty-image)",
		},
		{
			name: "nothing but the end",
			log:  rlimit + "Error (criu/cr-dump.c:2111): Dumping FAILED.\n",
			want: "Dumping FAILED.",
		},
		{name: "only what is harmless", log: rlimit},
		{name: "empty"},
		{
			name: "long",
			log:  "Error (criu/x.c:1): " + strings.Repeat("ä", 400) + "\n",
			want: strings.Repeat("ä", 148) + "...",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, refused := summarize(strings.NewReader(tc.log))
			if got != tc.want || refused != tc.refused {
				t.Errorf("got %q, %v; want %q, %v", got, refused, tc.want, tc.refused)
			}
		})
	}
}

func FuzzSummarize(f *testing.F) {
	f.Add("(00.062283) Error (criu/namespaces.c:460): Can't dump nested user namespace for 13114\n")
	f.Add("     1: Error (criu/pagemap.c:557): Can't read\n\x00\xff")
	f.Fuzz(func(t *testing.T, log string) {
		s, _ := summarize(strings.NewReader(log))
		if len(s) > maxSummary || strings.Contains(s, "\n") {
			t.Errorf("summary %q of %d bytes", s, len(s))
		}
	})
}

// TestRefusals dumps trees of which CRIU refuses something: they run on, and the
// error says what.
func TestRefusals(t *testing.T) {
	b := needCRIU(t)
	socket := listen(t)
	for kind, want := range map[string]string{
		"user":         "nested user namespace",
		"pid":          "nested pid namespace",
		"uts":          "nested uts namespace",
		"ipc":          "nested ipc namespace",
		"cgroup":       "nested cgroup namespace",
		"uring":        "io_uring",
		"mapped-uring": "io_uring",
		"mptcp":        "MPTCP",
		"socket":       "process outside",
		"ghost":        "ghost file",
		"sysv":         "SysV shared memory",
	} {
		t.Run(kind, func(t *testing.T) {
			needKind(t, kind)
			p := startTree(t, kind, 1, "SOCKET="+socket)
			images := t.TempDir()
			e := asError(t, p.dump(b, DumpOptions{Images: images, GhostLimit: 1 << 20}))
			if !errdefs.IsFailedPrecondition(e) || !strings.Contains(e.Summary, want) {
				t.Errorf("got %v, want a refusal of the %s", e, want)
			}
			if e.Op != "dump" || e.Log != filepath.Join(images, dumpLog) {
				t.Errorf("error of %q with log %q", e.Op, e.Log)
			}
			if got := p.ask("sum"); !strings.HasSuffix(got, " 1 98") {
				t.Errorf("tree says %q", got)
			}
		})
	}
}

// needKind ends a test of something that this kernel does not have.
func needKind(t *testing.T, kind string) {
	t.Helper()
	file := map[string]string{"mptcp": "/proc/sys/net/mptcp", "uring": "/proc/sys/kernel/io_uring_disabled", "mapped-uring": "/proc/sys/kernel/io_uring_disabled"}[kind]
	if file == "" {
		return
	}
	if _, err := os.Stat(file); err != nil {
		t.Skipf("kernel has no %s", file)
	}
}

// listen returns the path of a socket that greets who connects.
func listen(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close() // the connection lasts as long as the test
			_, _ = c.Write([]byte("x"))
		}
	}()
	return path
}

// TestGone asks for the dump of a process that is not there.
func TestGone(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 0)
	pid := p.pid
	p.kill()
	w, err := b.Spawn(t.Context(), SpawnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer closeWorker(t, w)
	_, err = w.Dump(t.Context(), DumpOptions{Pid: pid, Images: t.TempDir()})
	if e := asError(t, err); !errdefs.IsNotFound(e) {
		t.Errorf("got %v, want not found", e)
	}
}

// TestFailedRestore leaves neither a process nor the log of another request.
func TestFailedRestore(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 1)
	images, work := t.TempDir(), t.TempDir()
	if err := p.dump(b, DumpOptions{Images: images}); err != nil {
		t.Fatal(err)
	}
	p.wait()
	if err := os.Remove(filepath.Join(images, "pages-1.img")); err != nil {
		t.Fatal(err)
	}
	_, err := p.restore(b, RestoreOptions{Images: images, Work: work})
	if e := asError(t, err); !errdefs.IsInternal(e) || e.Log == "" || !strings.Contains(e.Error(), "criu restore: ") {
		t.Errorf("got %v, want an internal error", e)
	}
	noChildren(t)
	if err := os.Remove(filepath.Join(images, "inventory.img")); err != nil {
		t.Fatal(err)
	}
	_, err = p.restore(b, RestoreOptions{Images: images, Work: work})
	if e := asError(t, err); strings.Contains(e.Summary, "async") {
		t.Errorf("got the reason of the first restore: %v", e)
	}
}

// noChildren fails the test if this process has children, dead ones included.
func noChildren(t *testing.T) {
	t.Helper()
	var status unix.WaitStatus
	if pid, err := unix.Wait4(-1, &status, unix.WNOHANG|unix.WALL, nil); err != unix.ECHILD {
		t.Errorf("a child is left: wait4 gives %d, %v", pid, err)
	}
}
