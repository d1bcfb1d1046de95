package integration_test

import (
	"testing"
	"time"

	"github.com/statefork/statefork/integration/testbed"
	"github.com/statefork/statefork/shim/api"
)

// sessions is a client of one container's sessions.
type sessions struct {
	e *env
	c *api.Client
}

func (e *env) sessions(id string) *sessions {
	e.Helper()
	c, err := api.Dial(e.ctx, api.Config{State: e.ns.State(), Namespace: e.ns.NS, ContainerID: id})
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { c.Close() })
	return &sessions{e: e, c: c}
}

// result is a step that has ended, with all of its output.
type result struct {
	*api.StepResponse
	out string
}

// run runs a step to its end.
func (s *sessions) run(req *api.StartStepRequest) result {
	s.e.Helper()
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
	out := string(r.Output)
	end := time.Now().Add(waitTimeout)
	for !r.Ended || uint64(len(out))+r.DroppedBytes < r.OutputBytes {
		if time.Now().After(end) {
			s.e.Fatalf("step has not ended: %v, output %q", r, out)
		}
		var err error
		r, err = s.c.WaitStep(s.e.ctx, &api.WaitStepRequest{Session: r.Session, Step: r.Step, Generation: r.Generation, Offset: r.Offset + uint64(len(r.Output)), WaitMs: 1000})
		if err != nil {
			s.e.Fatal(err)
		}
		out += string(r.Output)
	}
	return result{r, out}
}

// sh runs a command in the main session.
func (s *sessions) sh(command string) result {
	s.e.Helper()
	return s.run(&api.StartStepRequest{Command: []byte(command)})
}

// TestSessionGoesOn takes a shell's state through a checkpoint, back to it and
// into a fork.
func TestSessionGoesOn(t *testing.T) {
	e := setup(t, common(t))
	id := e.run("shell", testbed.Busybox, "sleep", "1000")
	s := e.sessions(id)
	s.sh("cd /tmp; X=5; f() { echo f $1; }; umask 027; sleep 1000 &")
	const look = "echo $X; f 3; pwd; umask; jobs; X=6; tty"
	const want = "5\nf 3\n/tmp\n0027\n[1]+  Running                    sleep 1000\n/dev/pts/0\n"
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
