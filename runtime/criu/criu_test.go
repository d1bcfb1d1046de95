package criu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// programDir holds the program of testdata, once a test has needed it.
var programDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if programDir != "" {
		os.RemoveAll(programDir)
	}
	os.Exit(code)
}

// program compiles the program that tests dump.
var program = sync.OnceValues(func() (string, error) {
	var err error
	if programDir, err = os.MkdirTemp("", "criu-test-"); err != nil {
		return "", err
	}
	path := filepath.Join(programDir, "tree")
	out, err := exec.Command("gcc", "-O1", "-Wall", "-Werror", "-o", path, "testdata/tree.c").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// missing ends a test that lacks something: in CI, where all must be there, as
// failed.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

// needCRIU returns the repository's CRIU, or the host's.
func needCRIU(t testing.TB) *Binary {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	find := Find
	if path := builtCRIU(); path != "" && os.Getenv(pathVariable) == "" {
		find = func(ctx context.Context) (*Binary, error) { return inspect(ctx, path) }
	}
	b, err := find(t.Context())
	if err != nil {
		missing(t, "criu: "+err.Error())
	}
	return b
}

// builtCRIU returns bin/criu of the repository, if it was built.
func builtCRIU() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
			continue
		}
		path := filepath.Join(dir, "bin", "criu")
		if _, err := os.Stat(path); err != nil {
			return ""
		}
		return path
	}
	return ""
}

// tree is a running process tree of testdata/tree.c in a pid namespace of its
// own.
type tree struct {
	t   testing.TB
	pid int
	// stdin and stdout are our ends; inside are the tree's, which a restored
	// tree inherits.
	stdin, stdout *os.File
	inside        [2]*os.File
	answers       *bufio.Reader
}

// startTree starts a tree that is ready to be dumped.
func startTree(t testing.TB, kind string, mib int, env ...string) *tree {
	t.Helper()
	path, err := program()
	if err != nil {
		missing(t, "gcc: "+err.Error())
	}
	p := &tree{t: t}
	p.inside[0], p.stdin = pipe(t)
	p.stdout, p.inside[1] = pipe(t)
	p.answers = bufio.NewReader(p.stdout)
	cmd := exec.Command(path, kind, fmt.Sprint(mib))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.inside[0], p.inside[1], p.inside[1]
	cmd.Dir = t.TempDir()
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWPID}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.pid = cmd.Process.Pid
	_ = cmd.Process.Release() // wait reaps it, as it does after a restore
	t.Cleanup(p.kill)
	if got, err := p.read(); err != nil || got != "ready" {
		t.Fatalf("tree is not ready: %q, %v", got, err)
	}
	return p
}

func pipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// ask sends the tree a line and returns its answer.
func (p *tree) ask(line string) string {
	p.t.Helper()
	answer, err := p.query(line)
	if err != nil {
		p.t.Fatal(err)
	}
	return answer
}

// query is ask, for any goroutine.
func (p *tree) query(line string) (string, error) {
	if _, err := fmt.Fprintln(p.stdin, line); err != nil {
		return "", err
	}
	return p.read()
}

func (p *tree) read() (string, error) {
	_ = p.stdout.SetReadDeadline(time.Now().Add(20 * time.Second))
	line, err := p.answers.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("tree does not answer: %w", err)
	}
	return strings.TrimSuffix(line, "\n"), nil
}

// wait reaps the root, which must be about to die.
func (p *tree) wait() {
	p.t.Helper()
	for {
		_, err := unix.Wait4(p.pid, nil, 0, nil)
		if err == nil {
			p.pid = 0
			return
		}
		if err != unix.EINTR {
			p.t.Errorf("root %d is no child of the test's: %v", p.pid, err)
			return
		}
	}
}

// kill ends the tree if it still runs.
func (p *tree) kill() {
	if p.pid != 0 {
		_ = unix.Kill(p.pid, unix.SIGKILL)
		p.wait()
	}
}

// dump dumps the tree with a worker of its own.
func (p *tree) dump(b *Binary, o DumpOptions) error {
	p.t.Helper()
	w, err := b.Spawn(p.t.Context(), SpawnOptions{})
	if err != nil {
		return err
	}
	defer closeWorker(p.t, w)
	o.Pid = p.pid
	_, err = w.Dump(p.t.Context(), o)
	return err
}

// inherit names the tree's pipes for a worker that was given p.inside.
func (p *tree) inherit() ([]InheritFD, error) {
	var fds []InheritFD
	for i, f := range p.inside {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return nil, err
		}
		fds = append(fds, InheritFD{Key: fmt.Sprintf("pipe:[%d]", st.Ino), FD: FirstFile + i})
	}
	return fds, nil
}

// restore restores the tree from images with a worker of its own.
func (p *tree) restore(b *Binary, o RestoreOptions) (*Restored, error) {
	p.t.Helper()
	w, err := b.Spawn(p.t.Context(), SpawnOptions{Files: p.inside[:]})
	if err != nil {
		return nil, err
	}
	defer closeWorker(p.t, w)
	if o.InheritFDs, err = p.inherit(); err != nil {
		return nil, err
	}
	r, err := w.Restore(p.t.Context(), o)
	if err == nil {
		p.pid = r.Pid
	}
	return r, err
}

func closeWorker(t testing.TB, w *Worker) {
	t.Helper()
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// asError returns err as the package's Error.
func asError(t testing.TB, err error) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want an *Error", err)
	}
	return e
}
