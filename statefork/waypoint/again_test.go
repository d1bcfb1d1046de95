package waypoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/api/services/tasks/v1"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/statefork/statefork/layer"
	"github.com/statefork/statefork/shim/api"
)

func TestLookAgain(t *testing.T) {
	moved := overtaken(fmt.Errorf("prepare: %w", errdefs.ErrAlreadyExists))
	other := errors.New("other")
	for _, tt := range []struct {
		name  string
		errs  []error // of the calls, in their order
		want  error
		calls int
	}{
		{name: "fine", errs: []error{nil}, calls: 1},
		{name: "overtaken", errs: []error{fmt.Errorf("start: %w", moved), errors.Join(other, moved), nil}, calls: 3},
		{name: "fails in the end", errs: []error{moved, other}, want: other, calls: 2},
		{name: "of no such kind", errs: []error{overtaken(other), nil}, want: other, calls: 1},
		{name: "unmarked", errs: []error{errdefs.ErrAlreadyExists, nil}, want: errdefs.ErrAlreadyExists, calls: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			calls := 0
			err := lookAgain(t.Context(), func() error {
				calls++
				return tt.errs[calls-1]
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("lookAgain = %v after %d calls; want %v after %d", err, calls, tt.want, tt.calls)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := lookAgain(ctx, func() error { cancel(); return moved })
	if !errors.Is(err, context.Canceled) || !errdefs.IsAlreadyExists(err) {
		t.Errorf("lookAgain = %v; want both what went wrong and that it was cancelled", err)
	}
}

// late is a snapshotter at which a dead shim's call comes in just before one of
// ours on the same key.
type late struct {
	snapshots.Snapshotter
	key    string
	before string // our call
	call   func(snapshots.Snapshotter)
}

func (l *late) comes(before, key string) {
	if call := l.call; call != nil && key == l.key && before == l.before {
		l.call = nil
		call(l.Snapshotter)
	}
}

func (l *late) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	l.comes("Prepare", key)
	return l.Snapshotter.Prepare(ctx, key, parent, opts...)
}

func (l *late) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	l.comes("Commit", key)
	return l.Snapshotter.Commit(ctx, name, key, opts...)
}

func (l *late) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	l.comes("Mounts", key)
	return l.Snapshotter.Mounts(ctx, key)
}

// listed is a task service that still lists a dead task, for one call.
type listed struct {
	tasks.TasksClient
	once bool
}

func (l *listed) Create(ctx context.Context, r *tasks.CreateTaskRequest, opts ...grpc.CallOption) (*tasks.CreateTaskResponse, error) {
	if l.once {
		l.once = false
		return nil, errgrpc.ToGRPC(fmt.Errorf("task %s: %w", r.ContainerID, errdefs.ErrAlreadyExists))
	}
	return l.TasksClient.Create(ctx, r, opts...)
}

// TestOvertaken starts a container again while containerd still carries out
// what its dead shim had asked for.
func TestOvertaken(t *testing.T) {
	d := startDaemon(t)
	need(t, exec.Command(program(t, "criu"), "check").Run() == nil, "a criu that works on this kernel")
	ctx := scoped(t)
	d.base(t)
	src := d.create(t, "job1", counter, nil, oci.WithHostNamespace(specs.NetworkNamespace))
	d.dump(t, d.run(t, src), "job1")
	info, err := d.sn.Stat(ctx, api.SnapshotName("job1", nodeA))
	if err != nil {
		t.Fatal(err)
	}
	prepare := func(sn snapshots.Snapshotter) {
		if err := prepareAt(ctx, sn, "job1", info, "job1"); err != nil {
			t.Error(err)
		}
	}
	commit := func(node string) func(snapshots.Snapshotter) {
		return func(sn snapshots.Snapshotter) { commitLike(t, sn, info, node) }
	}
	restore := func(c *Client) (*Result, error) { return c.Restore(ctx, "job1", "first") }
	recovery := func(c *Client) (*Result, error) { return c.Recover(ctx, "job1") }
	for _, tt := range []struct {
		name    string
		missing bool // the key, as between Commit and Prepare
		before  string
		call    func(snapshots.Snapshotter)
		listed  bool
		do      func(*Client) (*Result, error)
		node    string
	}{
		{name: "restore at a late prepare", missing: true, before: "Prepare", call: prepare, do: restore, node: nodeA},
		{name: "recover at a late prepare", missing: true, before: "Prepare", call: prepare, do: recovery, node: nodeA},
		{name: "restore at a late commit", before: "Commit", call: commit(nodeB), do: restore, node: nodeA},
		{name: "recover at a late commit", before: "Mounts", call: commit(nodeC), do: recovery, node: nodeC},
		{name: "restore with the task listed", listed: true, do: restore, node: nodeA},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.missing {
				if err := d.sn.Remove(ctx, "job1"); err != nil {
					t.Fatal(err)
				}
			}
			sn := &late{Snapshotter: d.sn, key: "job1", before: tt.before, call: tt.call}
			list := &listed{TasksClient: d.ctrd.TaskService(), once: tt.listed}
			res, err := tt.do(d.through(t, sn, list))
			if err != nil || res.Node.ID != tt.node || !res.Started {
				t.Fatalf("got %+v, %v; want a start at node %s", res, err, tt.node)
			}
			if sn.call != nil || list.once {
				t.Error("nothing has come in between")
			}
			d.countsOn(t, "job1")
		})
	}
}

// commitLike makes another node of job1's active snapshot, with the process
// images of the node info.
func commitLike(t *testing.T, sn snapshots.Snapshotter, info snapshots.Info, node string) {
	t.Helper()
	labels := map[string]string{
		api.LabelNode: node, api.LabelContainer: "job1", api.LabelParent: nodeA, api.LabelHeadOf: "job1",
		api.LabelCreated: time.Now().UTC().Format(time.RFC3339Nano),
		api.LabelImages:  info.Labels[api.LabelImages], api.LabelGCContainer: "job1",
	}
	if err := sn.Commit(scoped(t), api.SnapshotName("job1", node), "job1", snapshots.WithLabels(labels)); err != nil {
		t.Error(err)
	}
}

// TestForgotten takes a container whose active snapshot only containerd knows to
// a node; what it did since cannot be recovered.
func TestForgotten(t *testing.T) {
	d := startDaemonOn(t, "statefork")
	need(t, exec.Command(program(t, "criu"), "check").Run() == nil, "a criu that works on this kernel")
	ctx := scoped(t)
	d.base(t)
	src := d.create(t, "job1", counter, nil, oci.WithHostNamespace(specs.NetworkNamespace))
	d.dump(t, d.run(t, src), "job1")
	conn, err := grpc.NewClient("unix://"+filepath.Join(d.dir, "sn.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	backend := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), d.name)
	infos, err := walk(ctx, backend, "kind==active")
	if err != nil || len(infos) != 1 {
		t.Fatalf("active snapshots are %v, %v; want one", infos, err)
	}
	if err := backend.Remove(ctx, infos[0].Name); err != nil {
		t.Fatal(err)
	}
	_, err = d.Recover(ctx, "job1")
	wantError(t, "Recover of what is forgotten", err, errdefs.IsFailedPrecondition, true)
	res, err := d.Restore(ctx, "job1", "first")
	if err != nil || res.Node.ID != nodeA || !res.Started {
		t.Fatalf("Restore = %+v, %v", res, err)
	}
	d.countsOn(t, "job1")
}

// TestCancelledCommit has the caller of Commit go away at any moment of it.
// containerd may then have taken the commit back: the active snapshot must be
// there with all its files, and the commit can be repeated. A garbage collection
// at that moment changes nothing.
func TestCancelledCommit(t *testing.T) {
	d := startDaemonOn(t, "statefork")
	ctx := scoped(t)
	d.base(t)
	back := 0
	for i := range 80 {
		key, node := fmt.Sprint("key-", i), fmt.Sprintf("%012x", i+1)
		m, err := d.sn.Prepare(ctx, key, "base", keep())
		if err != nil {
			t.Fatal(err)
		}
		w, err := layer.FromMounts(m)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(filepath.Dir(w.Images()), "file")
		if err := os.WriteFile(file, []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
		labels := snapshots.WithLabels(map[string]string{api.LabelNode: node, "containerd.io/gc.root": "x"})
		short, cancel := context.WithTimeout(ctx, time.Duration(i)*250*time.Microsecond)
		err = d.sn.Commit(short, api.SnapshotName(key, node), key, labels)
		cancel()
		// The daemon may still be at it: a change of something else comes after.
		if err := d.ctrd.NamespaceService().SetLabel(ctx, namespaces.Default, "number", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		if i%4 == 0 {
			d.collect(t)
		}
		if _, serr := d.sn.Stat(ctx, key); serr == nil {
			back++
			if err == nil {
				t.Errorf("%s: committed, and still active", key)
			}
			if got, err := d.sn.Mounts(ctx, key); err != nil || !reflect.DeepEqual(got, m) {
				t.Fatalf("%s: mounts are %v, %v; were %v", key, got, err, m)
			}
			if err := d.sn.Commit(ctx, api.SnapshotName(key, node), key, labels); err != nil {
				t.Fatal(err)
			}
		} else if !errdefs.IsNotFound(serr) {
			t.Fatal(serr)
		}
		if _, err := d.sn.Prepare(ctx, key, "base", keep(), snapshots.WithLabels(map[string]string{layer.LabelFrom: node})); err != nil {
			t.Fatalf("%s: go on from the node: %v", key, err)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != key {
			t.Fatalf("%s: the file: %q, %v", key, b, err)
		}
	}
	if back == 0 || back == 80 {
		t.Errorf("%d of 80 commits were taken back: the deadlines test nothing", back)
	}
}

// collect has containerd collect its garbage.
func (d *daemon) collect(t *testing.T) {
	t.Helper()
	l, err := d.ctrd.LeasesService().Create(scoped(t), leases.WithRandomID())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.ctrd.LeasesService().Delete(scoped(t), l, leases.SynchronousDelete); err != nil {
		t.Fatal(err)
	}
}

// through returns a client that uses other services than the daemon's own.
func (d *daemon) through(t *testing.T, sn snapshots.Snapshotter, list tasks.TasksClient) *Client {
	t.Helper()
	ctrd, err := containerd.New(filepath.Join(d.dir, "sock"), containerd.WithServices(
		containerd.WithSnapshotters(map[string]snapshots.Snapshotter{d.name: sn}), containerd.WithTaskClient(list)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ctrd.Close() })
	return New(ctrd, Options{State: filepath.Join(d.dir, "state")})
}

// countsOn checks that a container counts on, and ends its task.
func (d *daemon) countsOn(t *testing.T, id string) {
	t.Helper()
	ctx := scoped(t)
	first := d.count(t, id)
	eventually(t, id+" counts on", func() error {
		if n := d.count(t, id); n <= first {
			return fmt.Errorf("count is %d, was %d", n, first)
		}
		return nil
	})
	cont, err := d.ctrd.LoadContainer(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	task, err := cont.Task(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := task.Delete(ctx, containerd.WithProcessKill); err != nil {
		t.Fatal(err)
	}
}
