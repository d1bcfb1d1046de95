package launch

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

func TestArgs(t *testing.T) {
	sh := []string{"-sh", "", "a b"}
	many := map[int]int{}
	for i := range maxFiles + 1 {
		many[i] = i
	}
	for _, test := range []struct {
		spec Spec
		want []string // nil: refused
	}{
		{
			Spec{Mode: Orphan, Program: 3, Notify: 4, Path: "sh", Args: sh},
			[]string{"/proc/self/fd/3", "o-4,0=0,1=1,2=2", "sh", "-sh", "", "a b"},
		},
		{
			Spec{Mode: Monitor, Program: 9, Notify: 10, Path: "/bin/sh", Args: sh, Terminal: true, Files: map[int]int{200: 7, 2: 5, 12: 0}},
			[]string{"/proc/self/fd/9", "mt10,2=5,12=0,200=7", "/bin/sh", "-sh", "", "a b"},
		},
		{
			Spec{Mode: Monitor, Path: "sh", Args: sh, Files: map[int]int{}},
			[]string{"/proc/self/fd/0", "m-0", "sh", "-sh", "", "a b"},
		},
		{Spec{Program: 3, Notify: 4, Path: "sh", Args: sh}, nil},
		{Spec{Mode: Orphan, Args: sh}, nil},
		{Spec{Mode: Orphan, Path: "sh"}, nil},
		{Spec{Mode: Orphan, Path: "s\x00h", Args: sh}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: []string{"sh", "\x00"}}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Notify: -1}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Program: maxFD}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Files: map[int]int{-1: 0}}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Files: map[int]int{0: -1}}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Files: map[int]int{0: 0, 1: 0}, Terminal: true}, nil},
		{Spec{Mode: Orphan, Path: "sh", Args: sh, Files: many}, nil},
	} {
		got, err := Args(test.spec)
		if test.want == nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%+v gives %q, %v", test.spec, got, err)
			}
			continue
		}
		if err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%+v gives %q, %v", test.spec, got, err)
		}
	}
}

// TestNobody waits for a launcher that ends without a word, or says nothing.
func TestNobody(t *testing.T) {
	n, err := NewNotify("sh")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	silent, err := unix.FcntlInt(n.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	if p, err := n.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("wait for nothing gives %v, %v", p, err)
	}
	if err := unix.Close(silent); err != nil {
		t.Fatal(err)
	}
	if p, err := n.Wait(bounded()); !errdefs.IsAborted(err) || err.Error() != `start "sh": launcher ended too early: aborted` {
		t.Errorf("wait for nobody gives %v, %v", p, err)
	}
}
