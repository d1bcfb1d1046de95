package integration_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
)

// TestEndedShells has shells end whose container's init reaps nobody, and what
// they started live on, on the terminal that they have left. All of that goes
// through checkpoints and restores: zombies in the session of a zombie, and
// terminals without a shell.
func TestEndedShells(t *testing.T) {
	e := setup(t, common(t))
	id := e.run("shells", testbed.Busybox, "sleep", "100000")
	s := e.sessions(id)
	// In the group of the shell, and in groups of their own.
	for _, step := range []string{"sleep 0.1 & sleep 0.1 & exit 3", "set -m; sleep 0.1 & exit 3", "(setsid sleep 0.1 &)", "exit"} {
		s.sh(step)
	}
	s.sh("(trap '' HUP; cd /tmp; echo 0 >n; while :; do echo on it; echo $(($(cat n) + 1)) >n; sleep 0.05; done) & until [ -s /tmp/n ]; do :; done; exit 7")
	e.eventually(func() error {
		zombies := e.sh(id, "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '")
		if zombies < "8" && len(zombies) == 1 {
			return fmt.Errorf("%s zombies", zombies)
		}
		return nil
	})
	counts := func(in string) {
		t.Helper()
		before := ""
		e.eventually(func() error {
			out, err := e.ns.ExecIn(e.ctx, in, "cat", "/tmp/n")
			if n := out.Stdout; err == nil && (n == "" || before == "" || n == before) {
				err = fmt.Errorf("the count in %s stays at %q", in, n)
				before = n
			}
			return err
		})
	}
	counts(id)
	for i := range 3 {
		node := fmt.Sprint("n", i)
		e.checkpoint(id, node)
		counts(id)
		e.restore(id, node)
		counts(id)
		r := s.sh("echo new; [ -t 0 ] && tty -s; echo $?")
		if !strings.HasPrefix(r.out, "new\n") || r.ExitCode != 0 {
			t.Errorf("a new shell: %v %q", r, r.out)
		}
	}
	for _, sibling := range e.fork(id+"@n1", "-n", "2") {
		counts(sibling.ID)
	}
	// A session that is closed leaves its terminal as well.
	s.in("other").sh("(trap '' HUP; while :; do echo still; sleep 0.05; done) & sleep 0.2; echo started")
	if err := s.c.CloseSession(e.ctx, "other"); err != nil {
		t.Fatal(err)
	}
	e.checkpoint(id, "closed")
	e.restore(id, "closed")
	counts(id)
}
