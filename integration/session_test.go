package integration_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork/waypoint"
)

// sessions is a client of one container's sessions.
type sessions struct {
	e *env
	c *api.Client
	// box is the container, name the session that run and sh use: main if empty.
	box, name string
}

func (e *env) sessions(id string) *sessions {
	e.Helper()
	c, err := api.Dial(e.ctx, api.Config{State: e.ns.State(), Namespace: e.ns.NS, ContainerID: id})
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { c.Close() })
	return &sessions{e: e, c: c, box: id}
}

// in is the same container's session of that name.
func (s *sessions) in(session string) *sessions {
	other := *s
	other.name = session
	return &other
}

// open opens the session with a shell.
func (s *sessions) open(shell string) *api.Session {
	s.e.Helper()
	info, err := s.c.OpenSession(s.e.ctx, &api.OpenSessionRequest{Session: s.name, Shell: shell})
	if err != nil {
		s.e.Fatal(err)
	}
	return info
}

// info is what the list says of the session.
func (s *sessions) info() *api.Session {
	s.e.Helper()
	list, err := s.c.ListSessions(s.e.ctx)
	if err != nil {
		s.e.Fatal(err)
	}
	for _, i := range list {
		if i.Name == s.name || s.name == "" && i.Name == "main" {
			return i
		}
	}
	s.e.Fatalf("no session %q in %v", s.name, list)
	return nil
}

// result is a step that has ended, with all of its output.
type result struct {
	*api.StepResponse
	out string
}

// start begins a step and does not wait for it.
func (s *sessions) start(command string) *api.StepResponse {
	s.e.Helper()
	r, err := s.c.StartStep(s.e.ctx, &api.StartStepRequest{Session: s.name, Command: []byte(command)})
	if err != nil {
		s.e.Fatal(err)
	}
	return r
}

// run runs a step to its end.
func (s *sessions) run(req *api.StartStepRequest) result {
	s.e.Helper()
	if req.Session == "" {
		req.Session = s.name
	}
	req.WaitMs = 1000
	r, err := s.c.StartStep(s.e.ctx, req)
	if err != nil {
		s.e.Fatal(err)
	}
	return s.wait(r)
}

// wait waits for the end of a step, of which r is the first answer.
func (s *sessions) wait(r *api.StepResponse) result {
	s.e.Helper()
	var out strings.Builder
	out.Write(r.Output)
	end := time.Now().Add(waitTimeout)
	for !r.Ended || r.Offset+uint64(len(r.Output)) < r.OutputBytes {
		if time.Now().After(end) {
			s.e.Fatalf("step has not ended: %v, output %q", r, out.String())
		}
		var err error
		r, err = s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{
			Session: r.Session, Step: r.Step, Generation: r.Generation,
			Offset: r.Offset + uint64(len(r.Output)), WaitMs: 1000,
		})
		if err != nil {
			s.e.Fatal(err)
		}
		out.Write(r.Output)
	}
	return result{r, out.String()}
}

// until waits until a running step has printed a text, and returns its output up
// to now.
func (s *sessions) until(r *api.StepResponse, text string) string {
	s.e.Helper()
	var out string
	s.e.eventually(func() error {
		got, err := s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{
			Session: r.Session, Step: r.Step, Generation: r.Generation, Offset: uint64(len(out)), WaitMs: 200,
		})
		if err != nil {
			return testbed.Permanent(err)
		}
		if out += string(got.Output); !strings.Contains(out, text) {
			return fmt.Errorf("step %d has not printed %q but %q (%v)", r.Step, text, out, got)
		}
		return nil
	})
	return out
}

// untilInput waits until a running step waits for input.
func (s *sessions) untilInput(r *api.StepResponse) {
	s.e.Helper()
	s.e.eventually(func() error {
		got, err := s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{
			Session: r.Session, Step: r.Step, Generation: r.Generation, NoOutput: true, WaitMs: 200,
		})
		if err == nil && !got.WaitingForInput {
			err = fmt.Errorf("step does not wait for input: %v", got)
		}
		return err
	})
}

// sh runs a command in the session.
func (s *sessions) sh(command string) result {
	s.e.Helper()
	return s.run(&api.StartStepRequest{Command: []byte(command)})
}

// want runs a command, which must end with a code and print exactly a text.
func (s *sessions) want(command string, code int, out string) result {
	s.e.Helper()
	r := s.sh(command)
	if !r.ExitKnown || int(r.ExitCode) != code || r.out != out {
		s.e.Errorf("%q ends with %d and prints %q, want %d and %q (%v)", command, r.ExitCode, r.out, code, out, r)
	}
	return r
}

// says runs a command, which must end with a code and print a text among others,
// and must not name anything of ours.
func (s *sessions) says(command string, code int, text string) result {
	s.e.Helper()
	r := s.sh(command)
	if !r.ExitKnown || int(r.ExitCode) != code || !strings.Contains(strings.ToLower(r.out), text) {
		s.e.Errorf("%q ends with %d and prints %q, want %d and %q in it (%v)", command, r.ExitCode, r.out, code, text, r)
	}
	if strings.Contains(r.out, "PIPESTATUS") || strings.Contains(r.out, "printf") {
		s.e.Errorf("%q prints text of ours: %q", command, r.out)
	}
	return r
}

// send types on the session's terminal.
func (s *sessions) send(text string) {
	s.e.Helper()
	if err := s.c.SendInput(s.e.ctx, s.name, []byte(text)); err != nil {
		s.e.Fatal(err)
	}
}

// cycle checkpoints the container and restores it to that node.
func (s *sessions) cycle(node string) {
	s.e.Helper()
	s.e.checkpoint(s.box, node)
	s.e.restore(s.box, node)
}

// subject is a shell that sessions run on, with the image that has it.
type subject struct{ shell, image string }

var subjects = []subject{{"bash", testbed.Debian}, {"dash", testbed.Debian}, {"ash", testbed.Busybox}}

// shelled is a session of one of the subjects in a container of its own.
type shelled struct {
	*sessions
	subject
}

// bash says whether the shell has what POSIX shells lack.
func (s *shelled) bash() bool { return s.subject.shell == "bash" }

// pick returns what is right for the shell.
func (s *shelled) pick(bash, dash, ash string) string {
	return map[string]string{"bash": bash, "dash": dash, "ash": ash}[s.subject.shell]
}

// debian is a namespace with both images that many tests use: the larger one
// takes seconds to unpack.
var debian struct {
	mu    sync.Mutex
	users int                // that have not ended
	ns    *testbed.Namespace // nil without users that have begun
}

// withDebian is setup for tests that need the large image and run in parallel.
// What is left in the namespace fails the last of them.
func withDebian(t *testing.T) *env {
	t.Helper()
	tb := common(t)
	debian.mu.Lock()
	debian.users++
	debian.mu.Unlock()
	// Only now: all tests that are to run in parallel have been counted then.
	t.Parallel()
	debian.mu.Lock()
	defer debian.mu.Unlock()
	ns := debian.ns
	if ns == nil {
		ns = tb.Namespace(fmt.Sprintf("%s-%d-debian", tb.Name, nsNumber.Add(1)))
	}
	e := &env{T: t, ns: ns, ctx: namespaces.WithNamespace(t.Context(), ns.NS), snapshotter: testbed.Snapshotter}
	t.Cleanup(e.leaveDebian)
	if debian.ns == nil {
		if err := errors.Join(ns.ImportBusybox(e.ctx), ns.ImportDebian(e.ctx)); err != nil {
			t.Fatal(err)
		}
		debian.ns = ns
	}
	return e
}

func (e *env) leaveDebian() {
	debian.mu.Lock()
	defer debian.mu.Unlock()
	if debian.users--; debian.users > 0 {
		return
	}
	debian.ns = nil
	e.finish()
}

// onShells runs a test on each of the shells, each in a container of its own.
// Init is a program that neither reaps nor forwards anything.
func onShells(t *testing.T, f func(s *shelled)) {
	e := withDebian(t)
	for _, sub := range subjects {
		t.Run(sub.shell, func(t *testing.T) { f(e.with(t).shelled(sub)) })
	}
}

// with is the same environment for a subtest.
func (e *env) with(t *testing.T) *env {
	leaveOut(t)
	sub := *e
	sub.T = t
	return &sub
}

// name is one for a container that no other test has.
func (e *env) name() string { return notInNames.ReplaceAllString(strings.ToLower(e.Name()), "-") }

func (e *env) shelled(sub subject, args ...string) *shelled {
	e.Helper()
	id := e.run(e.name(), append(args, sub.image, "sleep", "100000")...)
	s := &shelled{e.sessions(id), sub}
	if info := s.open(sub.shell); !strings.HasSuffix(info.Shell, "/"+sub.shell) {
		e.Fatalf("session %v, want one of %s", info, sub.shell)
	}
	return s
}

// TestSessionGoesOn takes a shell's state through a checkpoint, back to it and
// into a fork.
func TestSessionGoesOn(t *testing.T) {
	e := setup(t, common(t))
	id := e.run("shell", testbed.Busybox, "sleep", "1000")
	s := e.sessions(id)
	s.sh("cd /tmp; X=5; f() { echo f $1; }; umask 027; sleep 1000 &")
	const look = "echo $X; f 3; pwd; umask; jobs; X=6; test -t 0"
	const want = "5\nf 3\n/tmp\n0027\n[1]+  Running                    \n"
	check := func(what string, s *sessions, generation uint64) {
		t.Helper()
		r := s.sh(look)
		e.equal(what, r.out, want)
		if r.ExitCode != 0 || r.Cwd != "/tmp" || r.Generation != generation || r.NewShell {
			t.Errorf("%s: %v", what, r)
		}
	}
	e.checkpoint(id, "a")
	check("after the checkpoint", s, 0)
	e.restore(id, "a")
	check("after the restore", s, 1)
	for _, sibling := range e.fork(id + "@a") {
		check("in the fork", e.sessions(sibling.ID), 0)
	}
}

// forkOf is the container itself, for lists of its forks.
func forkOf(id string) waypoint.Sibling { return waypoint.Sibling{ID: id} }

// stale wants that nobody can wait for a step that a restore has left behind.
func stale(s *sessions, r *api.StepResponse) {
	s.e.Helper()
	got, err := s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{Session: r.Session, Step: r.Step, Generation: r.Generation, WaitMs: 10_000})
	if !errors.Is(err, api.ErrStale) {
		s.e.Errorf("wait for a step of generation %d: %v, %v, want %v", r.Generation, got, err, api.ErrStale)
	}
}
