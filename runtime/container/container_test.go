package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// diary writes down what an observer is told, as "started e1".
type diary struct {
	mu    sync.Mutex
	lines []string
	exits []Exit
}

var _ Observer = (*diary)(nil)

func (d *diary) add(line string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, line)
}

func (d *diary) Created(int)              { d.add("created") }
func (d *diary) Started(id string, _ int) { d.add(strings.TrimSpace("started " + id)) }
func (d *diary) OOM()                     { d.add("oom") }
func (d *diary) Exited(e Exit) {
	d.add(strings.TrimSpace(fmt.Sprintf("exit %d %s", e.Status, e.ExecID)))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.exits = append(d.exits, e)
}

func (d *diary) read() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.lines)
}

// subject is a container under test that has been created and not started.
type subject struct {
	*Container
	t     *testing.T
	ctx   context.Context
	diary *diary
	out   string
	cfg   Config
}

// newSubject creates a container that runs script. It is removed at the end of
// the test, and the test fails if anything is left of it.
func newSubject(t *testing.T, script string, change func(*specs.Spec)) *subject {
	t.Helper()
	ch := newChain(t)
	id := fmt.Sprintf("sf-test-%d-%s", os.Getpid(), filepath.Base(ch.dir)+filepath.Base(filepath.Dir(ch.dir)))
	spec := specconv.Example()
	spec.Process.Terminal = false
	spec.Process.Args = []string{"/bin/sh", "-c", script}
	spec.Root.Readonly = false
	spec.Linux.CgroupsPath = "/" + id
	if change != nil {
		change(spec)
	}
	bundle := t.TempDir()
	b, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	s := &subject{t: t, ctx: ctx, diary: &diary{}, out: filepath.Join(bundle, "out")}
	s.cfg = Config{
		ID: id, Namespace: "test", Bundle: bundle, Mounts: ch.on(ch.lowers), Observer: s.diary,
		Stdio: Stdio{Stdout: "file://" + s.out, Stderr: "file://" + s.out, Terminal: spec.Process.Terminal},
	}
	if s.Container, err = Create(ctx, s.cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.end)
	return s
}

func (s *subject) end() {
	if _, err := Remove(context.Background(), RemoveConfig{ID: s.id, Bundle: s.bundle}); err != nil {
		s.t.Error(err)
	}
	s.checkGone()
}

// checkGone checks that nothing of the container is left on the host.
func (s *subject) checkGone() {
	s.t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		s.t.Fatal(err)
	}
	if strings.Contains(string(mounts), s.bundle) {
		s.t.Error("something is mounted in the bundle")
	}
	left, err := filepath.Glob("/sys/fs/cgroup/*/" + s.id)
	if err != nil {
		s.t.Fatal(err)
	}
	if own := "/sys/fs/cgroup/" + s.id; cgroups.PathExists(own) {
		left = append(left, own)
	}
	if len(left) > 0 {
		s.t.Errorf("cgroups are left: %v", left)
	}
	if _, err := os.Stat(s.stateDir()); !os.IsNotExist(err) {
		s.t.Errorf("state directory: %v", err)
	}
}

func (s *subject) start(execID string) {
	s.t.Helper()
	if pid, err := s.Start(s.ctx, execID); err != nil || pid == 0 {
		s.t.Fatalf("start %q: pid %d, %v", execID, pid, err)
	}
}

func (s *subject) exec(id, script string) {
	s.t.Helper()
	p := *s.spec.Process
	p.Terminal = false
	p.Args = []string{"/bin/sh", "-c", script}
	if err := s.Exec(s.ctx, ExecConfig{ID: id, Spec: &p, Stdio: Stdio{Stdout: "file://" + s.out}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *subject) wait(execID string, status int) {
	s.t.Helper()
	e, err := s.Wait(s.ctx, execID)
	if err != nil || e.Status != status {
		s.t.Errorf("exit of %q: %+v, %v; want status %d", execID, e, err, status)
	}
}

func (s *subject) kill(sig unix.Signal) {
	s.t.Helper()
	if err := s.Kill(s.ctx, "", sig, false); err != nil {
		s.t.Fatal(err)
	}
}

func (s *subject) remove(execID string) {
	s.t.Helper()
	if _, err := s.Delete(s.ctx, execID); err != nil {
		s.t.Fatal(err)
	}
}

// says waits until the container has written a line.
func (s *subject) says(line string) {
	s.t.Helper()
	b := &box{t: s.t}
	b.eventually(fmt.Sprintf("line %q", line), func() bool {
		out, _ := os.ReadFile(s.out)
		return slices.Contains(strings.Split(strings.ReplaceAll(string(out), "\r", ""), "\n"), line)
	})
}

func (s *subject) checkDiary(want ...string) {
	s.t.Helper()
	if got := s.diary.read(); !reflect.DeepEqual(got, want) {
		s.t.Errorf("the observer was told %q, want %q", got, want)
	}
}

func (s *subject) checkStatus(execID string, want Status) {
	s.t.Helper()
	if st, err := s.State(execID); err != nil || st.Status != want {
		s.t.Errorf("status of %q is %q, %v; want %q", execID, st.Status, err, want)
	}
}

func TestLife(t *testing.T) {
	s := newSubject(t, "echo hello; exit 42", nil)
	s.checkStatus("", StatusCreated)
	if pids, err := s.Pids(); err != nil || len(pids) != 1 || pids[0].Pid != s.Pid() {
		t.Errorf("pids are %v, %v; want init's", pids, err)
	}
	s.start("")
	s.wait("", 42)
	s.checkStatus("", StatusStopped)
	s.says("hello")
	if err := s.Kill(s.ctx, "", unix.SIGTERM, false); !errdefs.IsNotFound(err) {
		t.Errorf("kill after the end: got %v, want not found", err)
	}
	if _, err := s.Start(s.ctx, ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("start after the end: got %v, want a failed precondition", err)
	}
	s.remove("")
	s.checkGone()
	s.checkDiary("created", "started", "exit 42")
}

// TestShortLives has processes that are gone before the call that started them
// returns.
func TestShortLives(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	want := []string{"created", "started"}
	for i := range 20 {
		id := fmt.Sprintf("e%d", i)
		s.exec(id, fmt.Sprintf("exit %d", i))
		s.start(id)
		s.wait(id, i)
		s.remove(id)
		want = append(want, "started "+id, fmt.Sprintf("exit %d %s", i, id))
	}
	s.checkDiary(want...)
}

// TestExecsEndBeforeInit has init's exit told last.
func TestExecsEndBeforeInit(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*specs.Spec)
	}{
		{"own pid namespace", nil},
		{"host's pid namespace", func(s *specs.Spec) {
			s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.PIDNamespace })
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSubject(t, "sleep 1000 & exec sleep 1000", tc.change)
			s.start("")
			for _, id := range []string{"e1", "e2"} {
				s.exec(id, "exec sleep 1000")
				s.start(id)
			}
			s.kill(unix.SIGKILL)
			s.wait("", 137)
			got := s.diary.read()
			if len(got) != 7 || got[6] != "exit 137" {
				t.Errorf("the observer was told %q, want init's exit last", got)
			}
			if pids, err := s.lc().Processes(); err != nil || len(pids) != 0 {
				t.Errorf("processes are left: %v, %v", pids, err)
			}
			for _, id := range []string{"e1", "e2", ""} {
				s.remove(id)
			}
			s.checkGone()
		})
	}
}

func TestExec(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	s.exec("e", "echo from exec; kill -9 $$")
	if err := s.Exec(s.ctx, ExecConfig{ID: "e", Spec: s.spec.Process}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the same id again: got %v", err)
	}
	if err := s.Kill(s.ctx, "e", unix.SIGTERM, false); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("kill before the start: got %v", err)
	}
	s.start("e")
	s.wait("e", 137)
	s.says("from exec")
	if _, err := s.Start(s.ctx, "e"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("start again: got %v", err)
	}
	s.remove("e")
	if _, err := s.State("e"); !errdefs.IsNotFound(err) {
		t.Errorf("state after the deletion: got %v", err)
	}
	p := *s.spec.Process
	p.Args = []string{"/no/such/file"}
	if err := s.Exec(s.ctx, ExecConfig{ID: "none", Spec: &p}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(s.ctx, "none"); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("start of a missing file: got %v", err)
	}
	s.checkStatus("none", StatusStopped)
	s.remove("none")
	s.exec("never", "true")
	s.remove("never")
}

// TestExecPids finds the exec id in the list of processes.
func TestExecPids(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	s.exec("e", "exec sleep 1000")
	pid, err := s.Start(s.ctx, "e")
	if err != nil {
		t.Fatal(err)
	}
	pids, err := s.Pids()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []ProcessInfo{{Pid: s.Pid()}, {Pid: pid, ExecID: "e"}} {
		if !slices.Contains(pids, want) {
			t.Errorf("%+v is not in %+v", want, pids)
		}
	}
}

func TestPauseAndUpdate(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	if err := s.Pause(s.ctx); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("pause before the start: got %v", err)
	}
	s.start("")
	s.exec("early", "true")
	if err := s.Pause(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.checkStatus("", StatusPaused)
	if _, err := s.Start(s.ctx, "early"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("start of an exec while paused: got %v", err)
	}
	if err := s.Pause(s.ctx); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("pause twice: got %v", err)
	}
	limit := int64(64 << 20)
	if err := s.Update(s.ctx, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}}); err != nil {
		t.Fatal(err)
	}
	cg, err := s.cgroup()
	if err != nil {
		t.Fatal(err)
	}
	if st, err := cg.GetStats(); err != nil || st.MemoryStats.Usage.Limit != uint64(limit) {
		t.Errorf("limit is %d, %v", st.MemoryStats.Usage.Limit, err)
	}
	if err := s.Resume(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.checkStatus("", StatusRunning)
	// An update must not keep the next exec from starting.
	s.exec("late", "exit 3")
	s.start("late")
	s.wait("late", 3)
	if m, err := s.Stats(); err != nil || m == nil {
		t.Errorf("metrics are %v, %v", m, err)
	}
	// SIGKILL ends a paused container, too.
	if err := s.Pause(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.kill(unix.SIGKILL)
	s.wait("", 137)
	s.remove("")
}

func TestDeleteCreated(t *testing.T) {
	s := newSubject(t, "echo never", nil)
	s.remove("")
	s.checkGone()
	s.checkDiary("created", "exit 137")
}

// TestDeleteNeverRestored has nobody wait for the output of processes that were
// never there.
func TestDeleteNeverRestored(t *testing.T) {
	s := newSubject(t, "true", nil)
	s.remove("")
	s.cfg.Checkpoint, s.cfg.Observer = t.TempDir(), &diary{}
	c, err := Create(s.ctx, s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Start(s.ctx, ""); !errdefs.IsNotFound(err) {
		t.Errorf("start without images: got %v, want not found", err)
	}
	begin := time.Now()
	if _, err := c.Delete(s.ctx, ""); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took >= drainTimeout {
		t.Errorf("the deletion took %v", took)
	}
	s.checkGone()
}

func TestDeleteRunning(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	if _, err := s.Delete(s.ctx, ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("got %v, want a failed precondition", err)
	}
	s.checkStatus("", StatusRunning)
}

func TestTerminal(t *testing.T) {
	s := newSubject(t, "[ -t 0 ] && echo terminal; read line; echo got $line", func(s *specs.Spec) { s.Process.Terminal = true })
	if err := s.ResizePty("", 91, 17); err != nil {
		t.Fatal(err)
	}
	s.start("")
	s.says("terminal")
	if _, err := s.initStdio().console.Write([]byte("typed\n")); err != nil {
		t.Fatal(err)
	}
	s.wait("", 0)
	s.says("got typed")
	s.remove("")
}

// TestCreateFails has nothing left of a container that could not be created.
func TestCreateFails(t *testing.T) {
	s := newSubject(t, "true", nil)
	s.remove("")
	spec := *s.spec
	p := *spec.Process
	p.Args = []string{"/no/such/file"}
	spec.Process = &p
	b, err := json.Marshal(&spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.bundle, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(s.ctx, s.cfg); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("got %v, want that there is no such file", err)
	}
	s.checkGone()
}

// TestSwapUntold has init's death in a swap told only if nothing follows.
func TestSwapUntold(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	sw := s.beginSwap()
	if err := unix.Kill(s.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-sw.reaped
	s.checkStatus("", StatusRunning)
	if pids, err := s.Pids(); err != nil || len(pids) != 1 || pids[0].Pid != s.Pid() {
		t.Errorf("pids in a swap are %v, %v; want the init that was there last", pids, err)
	}
	s.checkDiary("created", "started")
	sw.lost()
	s.wait("", 137)
	sw.lost()
	s.remove("")
	s.checkDiary("created", "started", "exit 137")
}

// TestSwapCancelled has the true exit told when init ends by itself while an
// operation was about to kill it, and also after such an operation was given up.
func TestSwapCancelled(t *testing.T) {
	for _, during := range []bool{true, false} {
		s := newSubject(t, "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done", nil)
		s.start("")
		s.says("ready")
		sw := s.beginSwap()
		if !during {
			sw.cancel()
		}
		if err := unix.Kill(s.Pid(), unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-sw.reaped
		if during {
			sw.cancel()
		}
		s.wait("", 9)
		s.remove("")
		s.checkDiary("created", "started", "exit 9")
	}
}

// TestAdopt has the exit of an adopted init be the container's.
func TestAdopt(t *testing.T) {
	s := newSubject(t, "exec sleep 1000", nil)
	s.start("")
	sw := s.beginSwap()
	if err := unix.Kill(s.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-sw.reaped
	// Any child of ours will do.
	child, err := os.StartProcess("/bin/busybox", []string{"sh", "-c", "exit 6"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	s.adoptInit(child.Pid)
	if err := child.Release(); err != nil {
		t.Fatal(err)
	}
	s.wait("", 6)
	if got := s.Generation(); got != 2 {
		t.Errorf("generation is %d", got)
	}
	sw.cancel()
	s.remove("")
	s.checkDiary("created", "started", "exit 6")
}

func TestAcquire(t *testing.T) {
	c := &Container{operation: make(chan struct{}, 1)}
	release, err := c.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := c.Acquire(ctx); err == nil {
		t.Error("the lock was given twice")
	}
	release()
	release()
	again, err := c.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	again()
}

// TestRemove clears up after a shim that was killed, at several moments.
func TestRemove(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(*subject)
	}{
		{"created", func(*subject) {}},
		{"running", func(s *subject) { s.start("") }},
		{"paused", func(s *subject) {
			s.start("")
			if err := s.Pause(s.ctx); err != nil {
				s.t.Fatal(err)
			}
		}},
		{"stopped", func(s *subject) {
			s.start("")
			s.kill(unix.SIGKILL)
			s.wait("", 137)
		}},
		{"without state", func(s *subject) {
			if err := os.Remove(filepath.Join(s.stateDir(), "state.json")); err != nil {
				s.t.Fatal(err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSubject(t, "sleep 1000 & exec sleep 1000", nil)
			tc.do(s)
			want := s.Pid()
			if tc.name == "without state" {
				want = 0
			}
			for range 2 {
				pid, err := Remove(s.ctx, RemoveConfig{ID: s.id, Bundle: s.bundle})
				if err != nil || pid != want {
					t.Errorf("got pid %d, %v; want %d", pid, err, want)
				}
				s.checkGone()
				want = 0
			}
			s.wait("", 137)
		})
	}
}
