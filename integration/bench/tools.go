package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/statefork/statefork/integration/testbed"
)

// runc is a container of runc without containerd: dumped and killed, and then
// restored, by its own commands.
type runc struct {
	ns      *testbed.Namespace
	variant string
	// criu is a line of CRIU's configuration, or empty.
	criu string

	dir    string
	stdin  *os.File // the end that keeps the container's input open
	stdio  *os.File // the other, which is its stdio
	exists bool
}

func (r *runc) name() string { return r.variant }

// id is the container's.
func (r *runc) id() string { return "bare-" + r.variant }

func (r *runc) path(name string) string { return filepath.Join(r.dir, name) }

func (r *runc) start(ctx context.Context) error {
	r.dir = filepath.Join(r.ns.Dir, r.variant)
	if err := r.rootfs(ctx); err != nil {
		return err
	}
	if _, err := r.ns.Exec(ctx, "runc", "spec", "--bundle", r.dir); err != nil {
		return err
	}
	if err := r.configure(); err != nil {
		return err
	}
	var err error
	// runc finds pipes again at a restore, but no file of the host.
	if r.stdio, r.stdin, err = os.Pipe(); err != nil {
		return err
	}
	r.exists = true
	if err := r.runc(ctx, "run", "--detach", "--pid-file", r.path("pid"), "--bundle", r.dir, r.id()); err != nil {
		return err
	}
	pid, err := r.pid()
	if err != nil {
		return err
	}
	_, err = askFirst(ctx, pid)
	return err
}

// pid is what runc has written down at the latest start.
func (r *runc) pid() (int, error) {
	b, err := os.ReadFile(r.path("pid"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// rootfs makes a root directory with busybox in it.
func (r *runc) rootfs(ctx context.Context) error {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("find busybox: %w", err)
	}
	bin := r.path("rootfs/bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	_, err = r.ns.Exec(ctx, "sh", "-c", `cp "$1" "$2/busybox" && ln -s busybox "$2/sh" && ln -s busybox "$2/mkfifo"`, "-", path, bin)
	return err
}

// configure changes what "runc spec" proposes: no terminal, a writable root,
// and a cgroup that shows whose it is.
func (r *runc) configure() error {
	name := r.path("config.json")
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		return fmt.Errorf("parse %q: %w", name, err)
	}
	process := spec["process"].(map[string]any)
	process["terminal"], process["args"], process["env"] = false, []string{"sh", "-c", counter}, []string{"PATH=/bin"}
	spec["root"].(map[string]any)["readonly"] = false
	spec["linux"].(map[string]any)["cgroupsPath"] = "/" + r.ns.NS + "/" + r.id()
	if r.criu != "" {
		conf := r.path("criu.conf")
		if err := os.WriteFile(conf, []byte(r.criu+"\n"), 0o600); err != nil {
			return err
		}
		spec["annotations"] = map[string]string{"org.criu.config": conf}
	}
	if b, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(name, b, 0o600)
}

// runc runs a command whose stdio becomes the container's.
func (r *runc) runc(ctx context.Context, args ...string) error {
	cmd := r.ns.Command(ctx, "runc", append([]string{"--root", r.path("state"), "--log", r.path("log")}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r.stdio, r.stdin, r.stdin
	if err := cmd.Run(); err != nil {
		log, _ := os.ReadFile(r.path("log"))
		return fmt.Errorf("runc %s: %w\n%s", args[0], err, log)
	}
	return nil
}

func (r *runc) round(ctx context.Context, n int) ([]sample, error) {
	images := r.path("images-" + strconv.Itoa(n))
	pid, err := r.pid()
	if err != nil {
		return nil, err
	}
	count, err := ask(pid)
	if err != nil {
		return nil, err
	}
	made, err := timed(opDump, func() error {
		return r.runc(ctx, "checkpoint", "--image-path", images, "--work-path", r.dir, r.id())
	})
	if err != nil {
		return nil, err
	}
	back, err := timed(opRestore, func() error {
		err := r.runc(ctx, "restore", "--detach", "--pid-file", r.path("pid"), "--bundle", r.dir,
			"--image-path", images, "--work-path", r.dir, r.id())
		if err != nil {
			return err
		}
		if pid, err = r.pid(); err != nil {
			return err
		}
		return answers(pid, count+1)
	})
	return []sample{made, back, {opCheckpoint, made.took + back.took}}, err
}

func (r *runc) stop(ctx context.Context) error {
	if !r.exists {
		return nil
	}
	err := r.runc(ctx, "delete", "--force", r.id())
	return errors.Join(err, r.stdio.Close(), r.stdin.Close())
}

// waitForPID bounds how long the kernel may take to free a process id.
const waitForPID = 5 * time.Second

// bare is a process of the host, dumped and restored by the criu command. It is
// what the kernel and CRIU need at least.
type bare struct {
	ns  *testbed.Namespace
	dir string
	cmd *exec.Cmd // until the first dump, which reaps it
	pid int
}

func (b *bare) name() string { return "criu" }

func (b *bare) start(ctx context.Context) error {
	b.dir = filepath.Join(b.ns.Dir, "criu")
	if err := os.Mkdir(b.dir, 0o700); err != nil {
		return err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("find busybox: %w", err)
	}
	b.cmd = exec.Command(busybox, "sh", "-c", counter)
	b.cmd.Dir = b.dir
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := b.cmd.Start(); err != nil {
		return err
	}
	b.pid = b.cmd.Process.Pid
	_, err = askFirst(ctx, b.pid)
	return err
}

func (b *bare) round(ctx context.Context, n int) ([]sample, error) {
	images := filepath.Join(b.dir, strconv.Itoa(n))
	if err := os.Mkdir(images, 0o700); err != nil {
		return nil, err
	}
	count, err := ask(b.pid)
	if err != nil {
		return nil, err
	}
	made, err := timed(opDump, func() error {
		_, err := b.ns.Exec(ctx, "criu", "dump", "--tree", strconv.Itoa(b.pid), "--images-dir", images, "--log-file", "dump.log")
		return err
	})
	if err != nil {
		return nil, b.explain(err, images, "dump.log")
	}
	if b.cmd != nil {
		_ = b.cmd.Wait() // it was killed
		b.cmd = nil
	}
	// The restored process has its old pid, which must have become free.
	err = testbed.Poll(ctx, waitForPID, func(context.Context) error {
		if err := syscall.Kill(b.pid, 0); !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("process %d is still there: %v", b.pid, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	back, err := timed(opRestore, func() error {
		_, err := b.ns.Exec(ctx, "criu", "restore", "--restore-detached", "--images-dir", images, "--log-file", "restore.log")
		if err != nil {
			return b.explain(err, images, "restore.log")
		}
		return answers(b.pid, count+1)
	})
	return []sample{made, back, {opCheckpoint, made.took + back.took}}, err
}

func (b *bare) explain(err error, images, log string) error {
	if err == nil {
		return nil
	}
	f, oerr := os.Open(filepath.Join(images, log))
	if oerr != nil {
		return err
	}
	defer f.Close()
	text, _ := io.ReadAll(f)
	lines := strings.Split(string(text), "\n")
	return fmt.Errorf("%w\n%s", err, strings.Join(lines[max(0, len(lines)-10):], "\n"))
}

func (b *bare) stop(context.Context) error {
	if b.pid == 0 {
		return nil
	}
	err := syscall.Kill(b.pid, syscall.SIGKILL)
	if b.cmd != nil {
		_ = b.cmd.Wait()
	}
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}
