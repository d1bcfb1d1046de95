package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/statefork/statefork/layer"
)

// asDaemon in the environment makes the test binary the daemon itself.
const asDaemon = "STATEFORK_TEST_AS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		main()
	}
	os.Exit(m.Run())
}

// process is a daemon that the test started.
type process struct {
	*exec.Cmd
	stderr bytes.Buffer
	done   chan struct{} // closed when err is known
	err    error
}

func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(os.Args[0], args...), done: make(chan struct{})}
	p.Env = append(append(os.Environ(), asDaemon+"=1"), env...)
	p.Stderr = &p.stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		p.err = p.Wait()
	}()
	t.Cleanup(func() {
		// no more than an error if it ended by itself
		_ = p.Process.Kill()
		<-p.done
	})
	return p
}

// end waits for the daemon and returns how it ended.
func (p *process) end(t *testing.T) error {
	t.Helper()
	select {
	case <-p.done:
		return p.err
	case <-time.After(20 * time.Second):
		t.Fatal("the daemon does not end")
		return nil
	}
}

// paths returns a root and a socket for a test. The names of sockets must be
// short.
func paths(t *testing.T) (root, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "sfd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "root"), filepath.Join(dir, "run", "s.sock")
}

// dial returns a client that waits for the daemon.
func dial(t *testing.T, socket string) snapshots.Snapshotter {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "statefork")
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestServe(t *testing.T) {
	root, socket := paths(t)
	state, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Dir(root) + "/notify", Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	if err := state.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	told := func() string {
		t.Helper()
		b := make([]byte, 100)
		n, err := state.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	d := start(t, []string{"NOTIFY_SOCKET=" + state.LocalAddr().String()}, "--root", root, "--address", socket)
	if got := told(); got != "READY=1" {
		t.Errorf("systemd was told %q", got)
	}
	for path, want := range map[string]fs.FileMode{
		socket:               fs.ModeSocket | 0o600,
		filepath.Dir(socket): fs.ModeDir | 0o700,
		root:                 fs.ModeDir | 0o700,
	} {
		if fi, err := os.Stat(path); err != nil || fi.Mode() != want {
			t.Errorf("%q has mode %v (%v), want %v", path, fi.Mode(), err, want)
		}
	}
	s := dial(t, socket)
	if _, err := s.Prepare(soon(t), "key", ""); err != nil {
		t.Fatal(err)
	}
	if err := s.(snapshots.Cleaner).Cleanup(soon(t)); err != nil {
		t.Error(err)
	}
	if err := d.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := d.end(t); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	if got := told(); got != "STOPPING=1" {
		t.Errorf("systemd was told %q", got)
	}
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if n := strings.Count(d.stderr.String(), "msg=ready"); n != 1 {
		t.Errorf("%d ready messages in:\n%s", n, &d.stderr)
	}
}

// A daemon that was killed leaves its socket; the next takes over, with all
// nodes.
func TestRestartAfterKill(t *testing.T) {
	root, socket := paths(t)
	d := start(t, nil, "--root", root, "--address", socket)
	s := dial(t, socket)
	if _, err := s.Prepare(soon(t), "key", ""); err != nil {
		t.Fatal(err)
	}
	node := snapshots.WithLabels(map[string]string{layer.LabelNode: "0123456789ab"})
	if err := s.Commit(soon(t), "node", "key", node); err != nil {
		t.Fatal(err)
	}
	if err := d.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := d.end(t); err == nil {
		t.Fatal("the daemon was not killed")
	}
	if _, err := os.Lstat(socket); err != nil {
		t.Fatalf("no socket is left, the test does not test: %v", err)
	}
	start(t, nil, "--root", root, "--address", socket)
	from := snapshots.WithLabels(map[string]string{layer.LabelFrom: "0123456789ab"})
	if _, err := dial(t, socket).Prepare(soon(t), "key", "", from); err != nil {
		t.Error(err)
	}
}

func TestSecondDaemonIsRefused(t *testing.T) {
	root, socket := paths(t)
	start(t, nil, "--root", root, "--address", socket)
	s := dial(t, socket)
	if _, err := s.Prepare(soon(t), "key", ""); err != nil {
		t.Fatal(err)
	}
	for says, args := range map[string][]string{
		"another snapshotter uses this root": {"--root", root, "--address", socket + "2"},
		"another daemon answers there":       {"--root", root + "2", "--address", socket},
		"no socket":                          {"--root", root + "3", "--address", filepath.Join(root, "layout")},
		"not an absolute path":               {"--root", "relative", "--address", socket + "3"},
	} {
		d := start(t, nil, args...)
		var exit *exec.ExitError
		if err := d.end(t); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("%q: ended with %v", args, err)
		}
		if !strings.Contains(d.stderr.String(), says) {
			t.Errorf("%q: does not say %q:\n%s", args, says, &d.stderr)
		}
	}
	if _, err := s.Stat(soon(t), "key"); err != nil {
		t.Errorf("the first daemon was disturbed: %v", err)
	}
}

func TestCommandLine(t *testing.T) {
	for _, tt := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{[]string{"--help"}, 0, "[proxy_plugins.statefork]", ""},
		{[]string{"--version"}, 0, "containerd-statefork-grpc ", ""},
		{[]string{"--none"}, 2, "", "--help"},
		{[]string{"more"}, 2, "", `"more"`},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), tt.args, &stdout, &stderr); code != tt.code {
			t.Errorf("%q: exit code %d, want %d", tt.args, code, tt.code)
		}
		for _, o := range []struct{ got, want string }{{stdout.String(), tt.stdout}, {stderr.String(), tt.stderr}} {
			if !strings.Contains(o.got, o.want) || o.want == "" && o.got != "" {
				t.Errorf("%q: wrote %q, want %q in it", tt.args, o.got, o.want)
			}
		}
	}
}
