package waypoint

import (
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
)

func TestSplitRef(t *testing.T) {
	for _, tt := range []struct{ ref, container, node string }{
		{"web", "web", ""}, {"web@base", "web", "base"}, {"web@", "web", ""}, {"@x", "", "x"}, {"", "", ""},
	} {
		if c, n := SplitRef(tt.ref); c != tt.container || n != tt.node {
			t.Errorf("SplitRef(%q) = %q, %q", tt.ref, c, n)
		}
	}
}

func TestMatch(t *testing.T) {
	named := func(id, name string) containers.Container {
		return containers.Container{ID: id, Labels: map[string]string{nerdctlName: name}}
	}
	all := []containers.Container{named("abc", "one"), named("abcd", "abc"), named("xyz", "ab"), {ID: "plain"}, named("twin1", "twin"), named("twin2", "twin")}
	for _, tt := range []struct{ ref, want string }{
		{"abc", "abc"}, // the id goes before another's name
		{"ab", "xyz"},  // a name goes before a prefix
		{"abcd", "abcd"}, {"one", "abc"}, {"pl", "plain"}, {"x", "xyz"},
		{"twin", "twin1 or twin2"}, {"a", "abc or abcd"}, {"q", ""},
	} {
		if got := joinIDs(match(all, tt.ref)); got != tt.want {
			t.Errorf("match(%q) = %q, want %q", tt.ref, got, tt.want)
		}
	}
}

func TestNewIdentity(t *testing.T) {
	plain := containers.Container{ID: "job1"}
	long := containers.Container{ID: strings.Repeat("a", 63) + "-" + strings.Repeat("b", 12)}
	web := containers.Container{ID: webID, Labels: map[string]string{nerdctlName: "web", nerdctlStateDir: "/x"}}
	tests := []struct {
		src      containers.Container
		o        ForkOptions
		i        int
		id, name string // prefixes
		ok       bool
	}{
		{plain, ForkOptions{Count: 1}, 0, "job1-fork-", "", true},
		{plain, ForkOptions{Count: 1, Name: "mine"}, 0, "mine", "", true},
		{plain, ForkOptions{Count: 3, Name: "mine"}, 2, "mine-3", "", true},
		{plain, ForkOptions{Count: 1, Name: "-bad"}, 0, "", "", false},
		{plain, ForkOptions{Count: 1, Name: "a/b"}, 0, "", "", false},
		{long, ForkOptions{Count: 1}, 0, strings.Repeat("a", 63) + "-fork-", "", true},
		{web, ForkOptions{Count: 1}, 0, "", "web-fork-", true},
		{web, ForkOptions{Count: 2, Name: "try"}, 0, "", "try-1", true},
		{web, ForkOptions{Count: 1, Name: "x"}, 0, "", "", false}, // nerdctl wants two
	}
	for _, tt := range tests {
		got, err := newIdentity(tt.src, tt.o, tt.i)
		if (err == nil) != tt.ok || (err != nil && !errdefs.IsInvalidArgument(err)) {
			t.Errorf("newIdentity(%q, %+v) = %v, %v", tt.src.ID, tt.o, got, err)
		}
		if !strings.HasPrefix(got.ID, tt.id) || !strings.HasPrefix(got.Name, tt.name) || len(got.ID) > maxIDLength {
			t.Errorf("newIdentity(%q, %+v) = %+v", tt.src.ID, tt.o, got)
		}
		if tt.ok && tt.src.ID == webID && len(got.ID) != 64 {
			t.Errorf("nerdctl's id %q has not 64 digits", got.ID)
		}
	}
}
