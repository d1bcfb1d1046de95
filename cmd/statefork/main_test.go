package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"statefork": main})
}

// TestScripts runs testdata/*.txt, which need neither root nor a daemon.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:  "testdata",
		Cmds: commands(),
		Setup: func(e *testscript.Env) error {
			// Where the programs under test are, for a PATH with nothing else.
			self, _, _ := strings.Cut(e.Getenv("PATH"), ":")
			e.Setenv("SELF", self)
			return nil
		},
	})
}

// TestDaemonScripts runs testdata/daemon/*.txt against a private containerd.
func TestDaemonScripts(t *testing.T) {
	dir := startContainerd(t)
	testscript.Run(t, testscript.Params{
		Dir:  "testdata/daemon",
		Cmds: commands(),
		Setup: func(e *testscript.Env) error {
			e.Setenv("CONTAINERD_ADDRESS", filepath.Join(dir, "sock"))
			e.Setenv("STATE", filepath.Join(dir, "state"))
			e.Setenv("PATH", filepath.Join(repo(t), "bin")+":"+e.Getenv("PATH"))
			return nil
		},
	})
}

// commands adds "exits CODE PROGRAM ARGS...", which checks the exit code; the
// output can be looked at by stdout and stderr as usual.
func commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		"exits": func(ts *testscript.TestScript, neg bool, args []string) {
			if neg || len(args) < 2 {
				ts.Fatalf("usage: exits CODE PROGRAM ARGS...")
			}
			want, err := strconv.Atoi(args[0])
			ts.Check(err)
			got := 0
			if err := ts.Exec(args[1], args[2:]...); err != nil {
				var exit *exec.ExitError
				if !errors.As(err, &exit) {
					ts.Fatalf("run %s: %v", args[1], err)
				}
				got = exit.ExitCode()
			}
			if got != want {
				ts.Fatalf("exit code %d, want %d", got, want)
			}
		},
	}
}

func repo(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// startContainerd runs a containerd with its own root, state and sockets until
// the end of the test, and returns their directory.
func startContainerd(t *testing.T) string {
	t.Helper()
	path := filepath.Join(repo(t), "bin", "containerd")
	_, err := os.Stat(path)
	if err != nil {
		path, err = exec.LookPath("containerd")
	}
	if err != nil || os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root and containerd")
		}
		t.Skip("needs root and containerd")
	}
	// A socket's path may have 107 bytes.
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := fmt.Sprintf("version = 3\nroot = '%[1]s/root'\nstate = '%[1]s/state'\n"+
		"disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime']\n"+
		"[grpc]\naddress = '%[1]s/sock'\n[ttrpc]\naddress = '%[1]s/sock.ttrpc'\n", dir)
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "-c", filepath.Join(dir, "config.toml"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		ctrd, err := waypoint.Connect(t.Context(), filepath.Join(dir, "sock"))
		if err == nil {
			_, err = ctrd.Version(t.Context())
			ctrd.Close()
		}
		if err == nil {
			return dir
		}
		select {
		case <-deadline:
			t.Fatalf("containerd does not answer: %v", err)
		case <-tick.C:
		}
	}
}

func TestMessage(t *testing.T) {
	wrap := func(class error) error { return fmt.Errorf("do it: %w", class) }
	tests := []struct {
		err  error
		code int
		text string
	}{
		{usagef("no command %q", "x"), exitUsage, `no command "x": see "statefork --help"`},
		{wrap(errdefs.ErrInvalidArgument), exitUsage, `do it: invalid argument: see "statefork --help"`},
		{wrap(errdefs.ErrNotFound), exitNotFound, "do it: not found"},
		{statefork.WithHint(wrap(errdefs.ErrNotFound), "look"), exitNotFound, "do it: not found: look"},
		{wrap(errdefs.ErrFailedPrecondition), exitRefused, "do it: failed precondition"},
		{wrap(errdefs.ErrAlreadyExists), exitRefused, "do it: already exists"},
		{wrap(errdefs.ErrNotImplemented), exitRefused, "do it: not implemented"},
		{wrap(errdefs.ErrUnavailable), exitUnavailable, `do it: unavailable: see whether containerd runs at /s, or "statefork doctor"`},
		{wrap(context.DeadlineExceeded), exitEnded, "do it: context deadline exceeded: the container runs on; give more --timeout"},
		{wrap(os.ErrPermission), exitFailed, "do it: permission denied: run as root"},
		{errors.Join(errors.New("one"), errors.New("two")), exitFailed, "one; two"},
	}
	for _, tt := range tests {
		if code, text := exitCode(tt.err), message(tt.err, "/s"); code != tt.code || text != tt.text {
			t.Errorf("%v: exit code %d, message %q; want %d, %q", tt.err, code, text, tt.code, tt.text)
		}
	}
}
