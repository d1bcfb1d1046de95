package integration_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
)

// screen waits until the session's terminal has shown a text since an offset.
func (s *sessions) screen(offset uint64, text string) string {
	s.e.Helper()
	var out string
	s.e.eventually(func() error {
		r, err := s.c.ReadScreen(s.e.ctx, &api.ReadScreenRequest{Session: s.name, Offset: offset + uint64(len(out)), WaitMs: 200})
		if err != nil {
			return testbed.Permanent(err)
		}
		if out += string(r.Output); !strings.Contains(out, text) {
			return fmt.Errorf("the terminal has not shown %q but %q", text, out)
		}
		return nil
	})
	return out
}

// end is where the session's screen ends now.
func (s *sessions) end() uint64 {
	s.e.Helper()
	r, err := s.c.ReadScreen(s.e.ctx, &api.ReadScreenRequest{Session: s.name, Offset: api.EndOffset})
	if err != nil {
		s.e.Fatal(err)
	}
	return r.Offset
}

// TestB126BackgroundServer starts servers and other holders of the terminal in
// the background. The step ends when the shell is ready; what comes later is in
// the session's log; and a server answers after a restore and in a fork.
func TestB126BackgroundServer(t *testing.T) {
	onShells(t, func(s *shelled) {
		begun := time.Now()
		s.says("cd /tmp; mkfifo go; sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 &", 0, "")
		s.says("setsid sleep 1000 &", 0, "")
		s.says("sh -c 'trap \"\" HUP; exec sleep 1000' & echo started", 0, "started\n")
		s.says("(cat go; echo late) &", 0, "")
		offset := s.end()
		// Which step has it is a matter of luck; the log has it always.
		s.says("echo now >go", 0, "")
		s.screen(offset, "now\nlate\n")
		s.want("echo of the server >index.html", 0, "")
		server := s.pick("python3 -m http.server 8000", "python3 -m http.server 8000", "httpd -f -p 8000")
		s.says(server+" >server.log 2>&1 &", 0, "")
		s.quick("everything in the background", begun)
		get := "until " + s.pick(pythonGet, pythonGet, "wget -q -O - http://127.0.0.1:8000/index.html") + " 2>/dev/null; do :; done"
		s.want(get, 0, "of the server\n")
		s.cycle("served")
		s.want(get, 0, "of the server\n")
		for _, f := range s.e.fork(s.box + "@served") {
			s.e.sessions(f.ID).want(get, 0, "of the server\n")
		}
		s.want(get, 0, "of the server\n")
	})
}

const pythonGet = `python3 -c 'import urllib.request as r; print(end=r.urlopen("http://127.0.0.1:8000/index.html").read().decode())'`

// TestB128Services starts a service and keeps its handle, and its log, through
// a restore and in a fork.
func TestB128Services(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("cd /tmp; mkfifo in; export WORD=said", 0, "")
		const loop = `exec 9<>in; echo up; while read -r x <&9; do echo "$WORD $x"; test "$x" = end && exit 6; done`
		r, err := s.c.StartStep(s.e.ctx, &api.StartStepRequest{Command: []byte(loop), Background: true})
		if err != nil {
			s.e.Fatal(err)
		}
		if r.Session == "main" || r.Session == "" || r.Ended {
			s.e.Fatalf("service %v", r)
		}
		service := s.in(r.Session)
		if info := service.info(); string(info.Service) != loop || !info.Running || info.Cwd != "/tmp" {
			s.e.Errorf("session of the service: %v", info)
		}
		service.until(r, "up\n")
		s.want("echo one >in", 0, "")
		service.until(r, "up\nsaid one\n")
		s.e.checkpoint(s.box, "n")
		s.want("echo two >in", 0, "")
		service.until(r, "up\nsaid one\nsaid two\n")
		s.e.restore(s.box, "n")
		stale(s.sessions, r)
		for _, f := range append(s.e.fork(s.box+"@n", "-n", "2")[:2:2], forkOf(s.box)) {
			in := s.e.sessions(f.ID)
			now := &api.StepResponse{Session: r.Session, Step: r.Step, Generation: in.in(r.Session).info().Generation}
			in.in(r.Session).until(now, "up\nsaid one\n")
			in.want("echo "+f.ID+" >in; echo end >in", 0, "")
			got := in.wait(now)
			if got.out != "up\nsaid one\nsaid "+f.ID+"\nsaid end\n"+s.pick("exit\n", "", "") || got.ExitCode != 6 || !got.ShellExited {
				s.e.Errorf("service in %s: %v %q", f.ID, got, got.out)
			}
		}
		// The number is not used again.
		again, err := s.c.StartStep(s.e.ctx, &api.StartStepRequest{Command: []byte("sleep 1000"), Background: true})
		if err != nil || again.Session == r.Session {
			s.e.Errorf("the next service: %v, %v", again, err)
		}
		if err := s.c.CloseSession(s.e.ctx, again.Session); err != nil {
			s.e.Error(err)
		}
	})
}

// persist sets everything that a shell has, and look shows it.
const (
	persist = `mkdir -p /x/y; cd /x/y; export A=1; B="two
lines"; f() { echo "f $1"; }; alias hi='echo hello'; ulimit -n 999; umask 027; trap 'echo usr1' USR1; set -f
sleep 1000 & PATH=/venv/bin:$PATH; export VIRTUAL_ENV=/venv; (exit 42)`
	look = `echo $?; pwd; echo "$A" "$B"; env | grep -c '^A=1$'; f 3; ulimit -n; umask; trap; echo *; echo ${PATH%%:*}
jobs; kill -0 $! && echo alive; kill -USR1 $$; test -t 0 && echo tty; echo $PPID $$`
)

// TestB130EnvironmentPersists sets what belongs to a shell, and sees it in the
// next step, after a restore, and in each fork.
func TestB130EnvironmentPersists(t *testing.T) {
	onShells(t, func(s *shelled) {
		r := s.sh(persist)
		if r.ExitCode != 42 || r.Cwd != "/x/y" {
			s.e.Errorf("%v", r)
		}
		before := s.sh(look).out
		for _, part := range []string{"42\n/x/y\n1 two\nlines\n1\nf 3\n999\n0027\n", "usr1", "\n*\n/venv/bin\n", "Running", "alive\nusr1\ntty\n1 "} {
			if !strings.Contains(before, part) {
				s.e.Errorf("%q lacks %q", before, part)
			}
		}
		s.want("hi", 0, "hello\n")
		s.sh("(exit 42)")
		s.e.checkpoint(s.box, "n")
		s.e.equal("after the checkpoint", s.sh(look).out, before)
		s.want("cd /; unset A B; unset -f f; unalias -a; umask 0; trap - USR1; kill $!", 0, "")
		s.e.restore(s.box, "n")
		all := append(s.e.fork(s.box+"@n", "-n", "2"), forkOf(s.box))
		for _, f := range all {
			in := s.e.sessions(f.ID)
			s.e.equal("in "+f.ID, in.sh(look).out, before)
			in.want("hi; A="+f.ID, 0, "hello\n")
		}
		for _, f := range all {
			s.e.sessions(f.ID).want("echo $A", 0, f.ID+"\n")
		}
	})
}

// TestB130LowLimit has a shell lower the number of its own descriptors below
// what a driver may have given it.
func TestB130LowLimit(t *testing.T) {
	onShells(t, func(s *shelled) {
		s.want("ulimit -n 64", 0, "")
		s.want("ulimit -n; (exit 3)", 3, "64\n")
		s.want("ulimit -n; cat /etc/passwd >/dev/null; echo $(echo a)", 0, "64\na\n")
	})
}

// TestB131LongOutput prints more than a terminal's memory holds. Every byte is
// there up to the limit, and beyond it the head, the tail and how much is not.
func TestB131LongOutput(t *testing.T) {
	onShells(t, func(s *shelled) {
		var all strings.Builder
		for i := 1; i <= 50_000; i++ {
			fmt.Fprintln(&all, i)
		}
		want := all.String()
		r := s.sh("seq 50000")
		if r.out != want || r.ExitCode != 0 || r.DroppedBytes != 0 {
			s.e.Errorf("%d bytes of %d, %d dropped, code %d", len(r.out), len(want), r.DroppedBytes, r.ExitCode)
		}
		const limit = 10_000
		r = s.run(&api.StartStepRequest{Command: []byte("seq 50000; exit 3"), OutputLimit: limit})
		r.out = s.wait(&api.StepResponse{Session: r.Session, Step: r.Step, Generation: r.Generation}).out
		tail := want[len(want)-limit/2:]
		if s.bash() {
			tail = (want + "exit\n")[len(want)+5-limit/2:]
		}
		if r.ExitCode != 3 || r.OutputBytes-r.DroppedBytes != limit || r.out != want[:limit/2]+tail {
			s.e.Errorf("%d bytes, %d dropped, code %d: %q", r.OutputBytes, r.DroppedBytes, r.ExitCode, r.out)
		}
		// The session's log has the middle.
		const offset = 150_000
		screen, err := s.c.ReadScreen(s.e.ctx, &api.ReadScreenRequest{Session: s.name, Offset: offset})
		if err != nil || !strings.Contains(string(screen.Output), "\n40000\n40001\n") {
			s.e.Errorf("the log has %.100q, %v", screen.GetOutput(), err)
		}
	})
}
