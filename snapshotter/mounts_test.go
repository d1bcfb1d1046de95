package snapshotter

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

func testStack(kind snapshots.Kind, lowers ...lowerdir) stack {
	return stack{
		kind: kind, upper: "/r/l/9", work: "/r/m/9/work", lowers: lowers,
		options: []string{"index=off", "redirect_dir=on"}, roOptions: []string{"index=off"},
	}
}

func TestMounts(t *testing.T) {
	full := func(n string) lowerdir { return lowerdir{path: "/r/l/" + n} }
	empty := func(n string) lowerdir { return lowerdir{path: "/r/l/" + n, empty: true} }
	writable := func(lowers string) []mount.Mount {
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{
			"workdir=/r/m/9/work", "upperdir=/r/l/9", "index=off", "redirect_dir=on", "lowerdir=" + lowers,
		}}}
	}
	readonly := func(lowers string) []mount.Mount {
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"index=off", "lowerdir=" + lowers}}}
	}
	bound := func(source, mode string) []mount.Mount {
		return []mount.Mount{{Type: "bind", Source: source, Options: []string{mode, "rbind"}}}
	}
	const active, view = snapshots.KindActive, snapshots.KindView
	for _, tt := range []struct {
		name   string
		kind   snapshots.Kind
		lowers []lowerdir
		want   []mount.Mount
	}{
		{"active alone", active, nil, bound("/r/l/9", "rw")},
		{"active on one", active, []lowerdir{full("1")}, writable("/r/l/1")},
		{"active on several", active, []lowerdir{full("3"), full("2"), full("1")}, writable("/r/l/3:/r/l/2:/r/l/1")},
		{"active on empty layers", active, []lowerdir{empty("4"), full("3"), empty("2"), full("1")}, writable("/r/l/3:/r/l/1")},
		{"active on nothing but empty layers", active, []lowerdir{empty("2"), empty("1")}, writable("/r/l/1")},
		{"view of nothing", view, nil, bound("/r/l/9", "ro")},
		{"view of one", view, []lowerdir{full("1")}, bound("/r/l/1", "ro")},
		{"view of several", view, []lowerdir{full("2"), full("1")}, readonly("/r/l/2:/r/l/1")},
		{"view keeps the root's attributes", view, []lowerdir{empty("3"), empty("2"), full("1")}, readonly("/r/l/3:/r/l/1")},
		{"view of empty layers", view, []lowerdir{empty("2"), empty("1")}, bound("/r/l/2", "ro")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := testStack(tt.kind, tt.lowers...).mounts()
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %v\nwant %v", got, tt.want)
			}
		})
	}
}

func TestMountLimits(t *testing.T) {
	many := func(n int, root string) []lowerdir {
		var l []lowerdir
		for i := range n {
			l = append(l, lowerdir{path: fmt.Sprintf("%s/l/%03x", root, i)})
		}
		return l
	}
	long := "/" + strings.Repeat("r", 1700)
	for _, tt := range []struct {
		name  string
		stack stack
		fits  bool
	}{
		{"active on 499", testStack(snapshots.KindActive, many(499, "/r")...), true},
		{"active on 500", testStack(snapshots.KindActive, many(500, "/r")...), false},
		{"view of 500", testStack(snapshots.KindView, many(500, "/r")...), true},
		{"view of 501", testStack(snapshots.KindView, many(501, "/r")...), false},
		{"long root, relative names", stack{kind: snapshots.KindActive, upper: long + "/l/9", work: "/w", lowers: many(400, long)}, true},
		{"long root, names do not fit", stack{kind: snapshots.KindActive, upper: long + "/l/9", work: long + "/m/9/work", lowers: many(400, long)}, false},
		{"one lower is never relative", stack{kind: snapshots.KindActive, upper: long + "/l/9", work: long, lowers: many(1, long)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := tt.stack.mounts()
			if tt.fits && err != nil {
				t.Error(err)
			}
			if !tt.fits && !errdefs.IsResourceExhausted(err) {
				t.Errorf("got %v, want the class resource exhausted", err)
			}
		})
	}
}

// The options given to one mount must not be those of another.
func TestMountsShareNoOptions(t *testing.T) {
	options := make([]string, 1, 8)
	options[0] = "index=off"
	a, err := overlay(options, []string{"/r/l/1", "/r/l/2"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := overlay(options, []string{"/r/l/3", "/r/l/4"}); err != nil {
		t.Fatal(err)
	}
	if got := a[0].Options[1]; got != "lowerdir=/r/l/1:/r/l/2" {
		t.Errorf("first mount now has %q", got)
	}
}
