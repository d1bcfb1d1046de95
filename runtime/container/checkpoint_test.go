package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// chain is an overlay root that can be sealed without a snapshotter.
type chain struct {
	t      *testing.T
	dir    string
	lowers []string
	layers int
}

func newChain(t *testing.T) *chain {
	t.Helper()
	requireRoot(t)
	const busybox = "/bin/busybox"
	bin, err := os.ReadFile(busybox)
	if err != nil {
		need(t, "busybox-static at "+busybox)
	}
	c := &chain{t: t, dir: t.TempDir()}
	base := filepath.Join(c.dir, "base")
	for _, d := range []string{"bin", "etc", "proc", "dev", "sys", "tmp", "run", "data"} {
		if err := os.MkdirAll(filepath.Join(base, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(base, "bin/busybox"), bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"sh", "sleep", "cat", "echo", "rm", "mkdir", "unshare", "hostname", "mv", "date"} {
		if err := os.Symlink("busybox", filepath.Join(base, "bin", a)); err != nil {
			t.Fatal(err)
		}
	}
	c.lowers = []string{base}
	return c
}

// on makes a writable layer on the given lower ones.
func (c *chain) on(lowers []string) []mount.Mount {
	c.layers++
	upper := filepath.Join(c.dir, fmt.Sprintf("u%d", c.layers))
	work := filepath.Join(c.dir, fmt.Sprintf("w%d", c.layers), "work")
	for _, d := range []string{upper, work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			c.t.Fatal(err)
		}
	}
	c.lowers = append([]string{upper}, lowers...)
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{
		"index=off", "redirect_dir=on",
		"lowerdir=" + strings.Join(lowers, ":"), "upperdir=" + upper, "workdir=" + work,
	}}}
}

// branch is one finished checkpoint of a test.
type branch struct {
	images string
	lowers []string
}

// recorder is told of a container's life.
type recorder struct {
	deaf
	mu    sync.Mutex
	exits []Exit
}

func (r *recorder) Exited(e Exit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exits = append(r.exits, e)
}

func (r *recorder) all() []Exit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Exit(nil), r.exits...)
}

// box is a container of a test.
type box struct {
	*Container
	t     *testing.T
	chain *chain
	rec   *recorder
}

func newBox(t *testing.T, ch *chain, mounts []mount.Mount, images, script string, change func(*specs.Spec)) *box {
	t.Helper()
	ctx := context.Background()
	spec := specconv.Example()
	id := fmt.Sprintf("sf-%d-%d", os.Getpid(), ch.layers)
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
	if err := os.Mkdir(filepath.Join(bundle, "rootfs"), 0o711); err != nil {
		t.Fatal(err)
	}
	rec := &recorder{}
	c, err := Create(ctx, Config{ID: id, Bundle: bundle, Mounts: mounts, Checkpoint: images, Observer: rec, Stdio: Stdio{Stdout: "file://" + filepath.Join(bundle, "out")}})
	if err != nil {
		t.Fatal(err)
	}
	x := &box{Container: c, t: t, chain: ch, rec: rec}
	t.Cleanup(x.end)
	if _, err := c.Start(ctx, ""); err != nil {
		t.Fatal(err)
	}
	return x
}

func (b *box) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := b.Kill(ctx, "", unix.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		b.t.Error(err)
	}
	if _, err := b.Wait(ctx, ""); err != nil {
		b.t.Error(err)
	}
	if _, err := b.Delete(ctx, ""); err != nil {
		b.t.Error(err)
	}
}

func quietPhase(string) error { return nil }

func (b *box) checkpoint() branch {
	b.t.Helper()
	images := filepath.Join(b.chain.dir, fmt.Sprintf("images%d", b.chain.layers))
	br := branch{images: images}
	release, err := b.Acquire(context.Background())
	if err != nil {
		b.t.Fatal(err)
	}
	defer release()
	tm, _, err := b.Checkpoint(context.Background(), CheckpointOptions{
		Images: images,
		Phase:  quietPhase,
		Seal: func(context.Context, Sealed) ([]mount.Mount, error) {
			br.lowers = b.chain.lowers
			return b.chain.on(br.lowers), nil
		},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Logf("checkpoint: frozen %v, dump %v, seal %v, restore %v", tm.Frozen, tm.Dump, tm.Seal, tm.Restore)
	return br
}

func (b *box) restore(br branch) {
	b.t.Helper()
	release, err := b.Acquire(context.Background())
	if err != nil {
		b.t.Fatal(err)
	}
	defer release()
	res, err := b.Restore(context.Background(), RestoreOptions{
		Images: br.images,
		Phase:  quietPhase,
		Switch: func(context.Context) ([]mount.Mount, error) { return b.chain.on(br.lowers), nil },
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Logf("restore: frozen %v, restore %v", res.Timings.Frozen, res.Timings.Restore)
}

// read returns a file as the container sees it.
func (b *box) read(name string) string {
	b.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/%s", b.Pid(), name))
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

func (b *box) write(name, content string) {
	b.t.Helper()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/%s", b.Pid(), name), []byte(content), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// eventually waits until the condition holds.
func (b *box) eventually(what string, cond func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: not within 10 s", what)
		}
		<-tick.C
	}
}

// counting answers in /tmp/n with a number that lives in the shell's memory,
// and tells what it finds at /tmp/ask.
const counting = `n=0; trap 'exit 7' TERM
while :; do n=$((n+1)); echo $n >/tmp/n.new && mv /tmp/n.new /tmp/n; echo $n; sleep 0.02; done`

func (b *box) count() int {
	n := 0
	b.eventually("the counter", func() bool {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/tmp/n", b.Pid()))
		if err != nil {
			return false
		}
		_, err = fmt.Sscan(string(data), &n)
		return err == nil
	})
	return n
}

func TestCheckpointInPlace(t *testing.T) {
	ch := newChain(t)
	b := newBox(t, ch, ch.on(ch.lowers), "", counting, nil)
	b.count()
	var branches []branch
	var counts []int
	for i := range 4 {
		b.write("data/f", fmt.Sprint(i))
		b.write("dev/shm/f", fmt.Sprint(i))
		branches = append(branches, b.checkpoint())
		counts = append(counts, b.count())
		if got := b.read("data/f"); got != fmt.Sprint(i) {
			t.Errorf("checkpoint %d: file has %q", i, got)
		}
	}
	for _, i := range []int{1, 3, 0, 2} {
		b.write("data/f", "later")
		b.write("data/new", "later")
		b.restore(branches[i])
		if got := b.read("data/f"); got != fmt.Sprint(i) {
			t.Errorf("restore %d: file has %q", i, got)
		}
		if got := b.read("dev/shm/f"); got != fmt.Sprint(i) {
			t.Errorf("restore %d: /dev/shm has %q", i, got)
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/data/new", b.Pid())); err == nil {
			t.Errorf("restore %d: a later file is there", i)
		}
		if got := b.count(); got > counts[i]+50 {
			t.Errorf("restore %d: counter is %d, was %d", i, got, counts[i])
		}
	}
	if got := b.rec.all(); len(got) != 0 {
		t.Fatalf("exits were told: %v", got)
	}
	ctx := context.Background()
	if err := b.Kill(ctx, "", unix.SIGTERM, false); err != nil {
		t.Fatal(err)
	}
	if e, err := b.Wait(ctx, ""); err != nil || e.Status != 7 {
		t.Errorf("exit: got %+v, %v; want status 7", e, err)
	}
	if got := b.rec.all(); len(got) != 1 || got[0].Status != 7 {
		t.Errorf("exits told: %v, want one with status 7", got)
	}
}

func TestFork(t *testing.T) {
	ch := newChain(t)
	a := newBox(t, ch, ch.on(ch.lowers), "", counting, nil)
	a.count()
	br := a.checkpoint()
	f := newBox(t, ch, ch.on(br.lowers), br.images, "", func(s *specs.Spec) { s.Hostname = "forked" })
	f.write("data/f", "fork")
	a.write("data/f", "source")
	if got := f.read("data/f"); got != "fork" {
		t.Errorf("fork has %q", got)
	}
	if got := f.read("proc/sys/kernel/hostname"); got == "" {
		t.Error("fork has no host name")
	}
	n := f.count()
	f.eventually("the fork's counter", func() bool { return f.count() > n })
	fbr := f.checkpoint()
	g := newBox(t, ch, ch.on(fbr.lowers), fbr.images, "", nil)
	if got := g.read("data/f"); got != "fork" {
		t.Errorf("fork of fork has %q", got)
	}
	n = g.count()
	g.eventually("the counter of the fork's fork", func() bool { return g.count() > n })
}

// goServer is a Go program with a listener, which by default is a multipath TCP
// one, and a connection to itself.
const goServer = `package main

import (
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	l, err := net.Listen("tcp", "127.0.0.1:7000")
	if err != nil {
		panic(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				panic(err)
			}
			go func() {
				b := make([]byte, 1)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					c.Write(b)
				}
			}()
		}
	}()
	c, err := net.Dial("tcp", "127.0.0.1:7000")
	if err != nil {
		panic(err)
	}
	b := []byte{0}
	for n := 1; ; n++ {
		if _, err := c.Write(b); err != nil {
			panic(err)
		}
		if _, err := c.Read(b); err != nil {
			panic(err)
		}
		os.WriteFile("/tmp/n", []byte(fmt.Sprintln(n)), 0o644)
		time.Sleep(10 * time.Millisecond)
	}
}
`

func TestGoServer(t *testing.T) {
	ch := newChain(t)
	dir := t.TempDir()
	src := filepath.Join(dir, "main.go")
	if err := os.WriteFile(src, []byte(goServer), 0o644); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", filepath.Join(ch.lowers[0], "bin/server"), src)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := newBox(t, ch, ch.on(ch.lowers), "", "exec /bin/server", nil)
	b.count()
	br := b.checkpoint()
	n := b.count()
	b.eventually("the connection", func() bool { return b.count() > n })
	b.restore(br)
	f := newBox(t, ch, ch.on(br.lowers), br.images, "", nil)
	for _, x := range []*box{b, f} {
		n := x.count()
		x.eventually("the restored connection", func() bool { return x.count() > n })
	}
}

// TestRefused has a tree that cannot be dumped run on as if nothing had been.
func TestRefused(t *testing.T) {
	ch := newChain(t)
	b := newBox(t, ch, ch.on(ch.lowers), "", "unshare -U sleep 1000 & "+counting, nil)
	b.count()
	release, err := b.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	images := filepath.Join(ch.dir, "images")
	for range 3 {
		_, _, err := b.Checkpoint(context.Background(), CheckpointOptions{Images: images, Phase: quietPhase,
			Seal: func(context.Context, Sealed) ([]mount.Mount, error) {
				t.Error("a refused checkpoint was sealed")
				return nil, errdefs.ErrInternal
			}})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "user namespace") {
			t.Fatalf("got %v, want a refusal that names the user namespace", err)
		}
		if _, err := os.Stat(images); !os.IsNotExist(err) {
			t.Errorf("images are left: %v", err)
		}
		n := b.count()
		b.eventually("the counter", func() bool { return b.count() > n })
	}
}

// TestSealFails has the container go on with its old root.
func TestSealFails(t *testing.T) {
	ch := newChain(t)
	b := newBox(t, ch, ch.on(ch.lowers), "", counting, nil)
	b.count()
	b.write("data/f", "kept")
	release, err := b.Acquire(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	images := filepath.Join(ch.dir, "images")
	_, _, err = b.Checkpoint(context.Background(), CheckpointOptions{Images: images, Phase: quietPhase,
		Seal: func(context.Context, Sealed) ([]mount.Mount, error) { return nil, errdefs.ErrUnavailable }})
	release()
	if !errdefs.IsUnavailable(err) || errdefs.IsAborted(err) {
		t.Fatalf("got %v, want what the sealing said", err)
	}
	if _, err := os.Stat(images); !os.IsNotExist(err) {
		t.Errorf("images are left: %v", err)
	}
	n := b.count()
	b.eventually("the counter", func() bool { return b.count() > n })
	if got := b.read("data/f"); got != "kept" {
		t.Errorf("file has %q", got)
	}
	b.checkpoint()
	if got := b.rec.all(); len(got) != 0 {
		t.Errorf("exits were told: %v", got)
	}
}

// TestPaused has a paused container stay paused over a checkpoint and a restore.
func TestPaused(t *testing.T) {
	ctx := context.Background()
	ch := newChain(t)
	b := newBox(t, ch, ch.on(ch.lowers), "", counting, nil)
	b.count()
	if err := b.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	br := b.checkpoint()
	b.restore(br)
	if s, err := b.State(""); err != nil || s.Status != StatusPaused {
		t.Errorf("got status %q, %v", s.Status, err)
	}
	n := b.count()
	if again := b.count(); again != n {
		t.Errorf("counter went from %d to %d in a paused container", n, again)
	}
	if err := b.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.eventually("the counter", func() bool { return b.count() > n })
}

// TestExecRefuses has an exec'd process that would be lost refused by name, and
// one that has put itself below init kept.
func TestExecRefuses(t *testing.T) {
	ctx := context.Background()
	ch := newChain(t)
	b := newBox(t, ch, ch.on(ch.lowers), "", counting, nil)
	b.count()
	run := func(id, script string) {
		t.Helper()
		p := *b.spec.Process
		p.Args = []string{"/bin/sh", "-c", script}
		if err := b.Exec(ctx, ExecConfig{ID: id, Spec: &p}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Start(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	run("stays", "exec sleep 1000")
	release, err := b.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = b.Checkpoint(ctx, CheckpointOptions{Images: filepath.Join(ch.dir, "images"), Phase: quietPhase})
	release()
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `"stays"`) {
		t.Fatalf("got %v, want a refusal that names the process", err)
	}
	if err := b.Kill(ctx, "stays", unix.SIGKILL, false); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Wait(ctx, "stays"); err != nil {
		t.Fatal(err)
	}
	// One generation on, init has a time namespace of its own.
	b.checkpoint()
	run("leaves", "(echo $$ >/tmp/left; while :; do date +%s%N >/tmp/beat; sleep 0.02; done) &")
	if _, err := b.Wait(ctx, "leaves"); err != nil {
		t.Fatal(err)
	}
	b.checkpoint()
	beat := b.read("tmp/beat")
	b.eventually("the daemon", func() bool { return b.read("tmp/beat") != beat })
}

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		need(t, "root")
	}
	// What the set-up installs is not in PATH unless make runs the test.
	if own, err := filepath.Abs("../../bin/criu"); err == nil && os.Getenv("STATEFORK_CRIU") == "" {
		if _, err := os.Stat(own); err == nil {
			t.Setenv("STATEFORK_CRIU", own)
		}
	}
	if _, err := findCRIU(context.Background()); err != nil {
		need(t, "criu: "+err.Error())
	}
}

// need skips a test that this host cannot run; where everything is promised to
// be there, that is a failure.
func need(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("needs " + what)
	}
	t.Skip("needs " + what)
}
