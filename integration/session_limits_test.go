package integration_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
)

// TestSessionRestrictions runs sessions in containers that may do less than
// others: a session may not do more, and goes through a restore all the same.
func TestSessionRestrictions(t *testing.T) {
	const who = "id -u; grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status | tr -d '\\t'"
	tests := []struct {
		name string
		args []string
		want string // what who shows of a session
	}{
		{"no-new-privileges", []string{"--security-opt", "no-new-privileges"}, "0\nCapEff:00000000a80425fb\nNoNewPrivs:1\nSeccomp:2\n"},
		{"drop", []string{"--cap-drop", "ALL"}, "0\nCapEff:0000000000000000\nNoNewPrivs:0\nSeccomp:2\n"},
		{"read-only", []string{"--read-only", "--tmpfs", "/tmp"}, "0\nCapEff:00000000a80425fb\nNoNewPrivs:0\nSeccomp:2\n"},
		{"pids", []string{"--pids-limit", "20"}, "0\nCapEff:00000000a80425fb\nNoNewPrivs:0\nSeccomp:2\n"},
	}
	t.Parallel()
	e := setup(t, common(t))
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := e.with(t)
			id := e.run(tt.name, append(tt.args, testbed.Busybox, "sleep", "100000")...)
			s := e.sessions(id)
			s.want(who, 0, tt.want)
			e.equal("init", e.sh(id, who), strings.TrimSuffix(tt.want, "\n"))
			// Not even a mount of its own.
			if r := s.sh("unshare -m true"); r.ExitCode == 0 {
				t.Errorf("a session may unshare: %v", r)
			}
			s.want("cd /tmp; X=5; echo a >/tmp/a; { echo b >/b; } 2>/dev/null; test -e /b", map[bool]int{true: 1}[tt.name == "read-only"], "")
			s.cycle("n")
			s.want("cat a; echo $X; "+who, 0, "a\n5\n"+tt.want)
		})
	}
}

// TestSessionOfUser runs each shell as a user other than root: the container's
// own, and one that the session asks for.
func TestSessionOfUser(t *testing.T) {
	e := withDebian(t)
	for _, sub := range subjects {
		t.Run(sub.shell, func(t *testing.T) {
			e := e.with(t)
			id := e.run(e.name(), "--user", "1000:1000", sub.image, "sleep", "100000")
			s := e.sessions(id)
			s.open(sub.shell)
			const look = "id -u; id -g; echo $X; stat -L -c %u /proc/self/fd/0"
			s.want("X=5", 0, "")
			s.want(look, 0, "1000\n1000\n5\n1000\n")
			if !mayReadLimits(t) {
				t.Log("not through a checkpoint: CRIU needs CAP_SYS_RESOURCE to read another user's limits")
				return
			}
			s.cycle("n")
			s.want(look, 0, "1000\n1000\n5\n1000\n")
		})
		t.Run(sub.shell+" asked for", func(t *testing.T) {
			e := e.with(t)
			s := e.sessions(e.run(e.name(), sub.image, "sleep", "100000"))
			if _, err := s.c.OpenSession(e.ctx, &api.OpenSessionRequest{Shell: sub.shell, User: "1000:1000"}); err != nil {
				t.Fatal(err)
			}
			s.want("id -u; id -g; grep CapEff /proc/self/status", 0, "1000\n1000\nCapEff:\t0000000000000000\n")
		})
	}
}

// mayReadLimits says whether we have the capability for prlimit of others.
func mayReadLimits(t *testing.T) bool {
	t.Helper()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective>>unix.CAP_SYS_RESOURCE&1 == 1
}

// TestSessionPidsLimit fills a container up to its number of processes. The
// session says so, and works when there is room.
func TestSessionPidsLimit(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", "--pids-limit", "20", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	// ash gives up a list that it cannot fork for; builtins go on.
	s.says("i=0; while [ $i -lt 30 ]; do sleep 1000 & i=$((i + 1)); done", 2, "can't fork")
	s.want("echo builtin", 0, "builtin\n")
	for range 2 {
		_, err := s.c.OpenSession(e.ctx, &api.OpenSessionRequest{Session: "more"})
		if err == nil {
			t.Error("a session begins in a full container")
		}
	}
	s.says("jobs -p >/tmp/pids; while read -r p; do kill $p; done </tmp/pids; wait; echo room", 0, "room\n")
	s.in("more").want("echo more", 0, "more\n")
}

// TestSessionNames: what is wrong with a call is told by its class.
func TestSessionNames(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	s.in("taken").open("ash")
	long := strings.Repeat("x", 64)
	tests := []struct {
		req  *api.OpenSessionRequest
		want func(error) bool
	}{
		{&api.OpenSessionRequest{Session: "../x"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a/b"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "."}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: ".."}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "-x"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a b"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a\x00"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "ä"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: long + "x"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "taken", Shell: "ash"}, errdefs.IsAlreadyExists},
		{&api.OpenSessionRequest{Session: "a", Shell: "zsh"}, errdefs.IsNotFound},
		{&api.OpenSessionRequest{Session: "a", Shell: "/etc/passwd"}, errdefs.IsNotFound},
		{&api.OpenSessionRequest{Session: "a", Shell: "bin/sh"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a", User: "nobody-there"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a", Cwd: "tmp"}, errdefs.IsInvalidArgument},
		{&api.OpenSessionRequest{Session: "a", Columns: 1 << 16, Rows: 1}, errdefs.IsInvalidArgument},
	}
	for _, tt := range tests {
		got, err := s.c.OpenSession(e.ctx, tt.req)
		if !tt.want(err) {
			t.Errorf("open %v: %v, %v", tt.req, got, err)
		}
	}
	s.in(long).want("echo long", 0, "long\n")
	s.want("pwd", 0, "/\n") // an empty name is main
	list, err := s.c.ListSessions(e.ctx)
	if err != nil || len(list) != 3 {
		t.Errorf("sessions %v, %v, want the three that are good", list, err)
	}
	nobody := s.in("nobody")
	_, werr := s.c.WaitStep(e.ctx, &api.WaitStepRequest{Session: "nobody"})
	_, serr := s.c.WaitStep(e.ctx, &api.WaitStepRequest{Session: "main", Step: 7})
	for _, err := range []error{
		werr, serr, s.c.SendInput(e.ctx, nobody.name, nil), s.c.CloseSession(e.ctx, nobody.name),
		s.c.SignalSession(e.ctx, nobody.name, 2), s.c.ResizeSession(e.ctx, nobody.name, 1, 1),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%v, want not found", err)
		}
	}
	if _, err := s.c.StartStep(e.ctx, &api.StartStepRequest{Command: []byte("echo a\x00b")}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a command with a NUL: %v", err)
	}
	r := s.start("sleep 1000")
	if _, err := s.c.StartStep(e.ctx, &api.StartStepRequest{Command: []byte("echo")}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a step while another runs: %v", err)
	}
	// Until the command has the foreground the shell gets the signal.
	e.eventually(func() error {
		if err := s.c.SignalSession(e.ctx, "", 15); err != nil {
			return err
		}
		got, err := s.c.WaitStep(e.ctx, &api.WaitStepRequest{WaitMs: 100, NoOutput: true})
		if err == nil && !got.Ended {
			err = fmt.Errorf("a step that was signalled goes on: %v", got)
		}
		return err
	})
	if got := s.wait(r); got.ExitCode != 143 {
		t.Errorf("a step that was signalled: %v", got)
	}
}

// TestSessionsAreCounted opens as many sessions as are allowed.
func TestSessionsAreCounted(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	const most = 128
	for i := range most {
		s.in(fmt.Sprintf("s%d", i)).open("")
	}
	if _, err := s.c.OpenSession(e.ctx, &api.OpenSessionRequest{Session: "one-more"}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("session %d: %v, want that there are too many", most+1, err)
	}
	s.in("s127").want("test -t 0", 0, "")
	if err := s.c.CloseSession(e.ctx, "s5"); err != nil {
		t.Error(err)
	}
	s.in("one-more").want("test -t 0", 0, "")
	pids := map[string]bool{}
	for _, pid := range e.pids(id) {
		pids[pid] = true
	}
	if n := len(pids); n != most+1 {
		t.Errorf("the container has %d processes, want %d", n, most+1)
	}
}

// TestSessionRefused asks for sessions in containers that can have none.
func TestSessionRefused(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	open := func(what, id string, want func(error) bool, text string) {
		t.Helper()
		for range 2 {
			c, err := api.Dial(e.ctx, api.Config{State: e.ns.State(), Namespace: e.ns.NS, ContainerID: id})
			if err == nil {
				_, err = c.OpenSession(e.ctx, &api.OpenSessionRequest{})
				c.Close()
			}
			if !want(err) || !strings.Contains(err.Error(), text) {
				t.Errorf("session in a container %s: %v", what, err)
			}
		}
	}
	id := e.run("no-shell", "-v", sleeper(t)+":/opt/sleep:ro", testbed.Busybox, "/opt/sleep", "100000")
	e.sh("no-shell", "rm /bin/sh /bin/ash")
	open("without a shell", id, errdefs.IsNotFound, "shell")
	id = e.run("host-pids", "--pid", "host", testbed.Busybox, "sleep", "100000")
	open("in the host's pid namespace", id, errdefs.IsNotImplemented, "pid namespace")
	id = e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	s.want("X=5", 0, "")
	e.nerdctl("pause", "box")
	_, err := s.c.OpenSession(e.ctx, &api.OpenSessionRequest{Session: "second"})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "paused") {
		t.Errorf("session in a paused container: %v", err)
	}
	// A step of a session that is there waits with the container.
	r := s.start("echo $X")
	if r.Ended {
		t.Errorf("a step has ended in a paused container: %v", r)
	}
	e.nerdctl("unpause", "box")
	if got := s.wait(r); got.out != "5\n" {
		t.Errorf("the step after the pause: %v", got)
	}
	e.nerdctl("stop", "-t", "0", "box")
	// Its shim may be there until the task is deleted.
	ended := func(err error) bool { return errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) }
	open("that was stopped", id, ended, id)
	open("that is not there", "nobody", errdefs.IsNotFound, "nobody")
}

// sleeper is a program that needs nothing of the image.
func sleeper(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		skip(t, "needs busybox")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "sleep")
	if err := os.WriteFile(out, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestContainerEndsUnderStep ends a container while a step is waited for.
func TestContainerEndsUnderStep(t *testing.T) {
	t.Parallel()
	e := setup(t, common(t))
	id := e.run("box", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	r := s.start("echo begin; sleep 1000")
	s.until(r, "begin\n")
	waiting := s.waitAside(r)
	e.nerdctl("kill", "box")
	// The step ends with the container; the shim may be gone before it says so.
	if err := <-waiting; err != nil && !errdefs.IsUnavailable(err) && !errdefs.IsNotFound(err) {
		t.Errorf("the waiter: %v", err)
	}
	e.equal("exit code", e.nerdctl("wait", "box"), "137")
	e.eventually(func() error {
		ctx, cancel := context.WithTimeout(e.ctx, waitTimeout)
		defer cancel()
		_, err := s.c.StartStep(ctx, &api.StartStepRequest{Command: []byte("echo")})
		if err == nil {
			return fmt.Errorf("a step begins in a container that has ended")
		}
		return nil
	})
}
