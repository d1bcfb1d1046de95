package criu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestParseVersion(t *testing.T) {
	for out, want := range map[string]int{
		"Version: 4.1.1\n":                              40101,
		"Version: 4.1\nGitID: v4.1\n":                   40100,
		"Version: 3.17.1":                               31701,
		"Warn  (criu/x.c:1): something\nVersion: 4.2\n": 40200,
		"Version: 4.3-rc1\n":                            40300,
		"Version: 4.x\n":                                0,
		"Version: 4.1000\n":                             0,
		"Version:\n":                                    0,
		"criu 4.1\n":                                    0,
		"":                                              0,
	} {
		got, err := parseVersion(out)
		if got != want || (err == nil) != (want != 0) {
			t.Errorf("%q: got %d, %v; want %d", out, got, err, want)
		}
	}
}

// fakeCRIU writes a program that answers like a CRIU of a version.
func fakeCRIU(t *testing.T, version string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho 'Version: "+version+"'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFind(t *testing.T) {
	old, good, better := fakeCRIU(t, "3.17.1"), fakeCRIU(t, "4.2"), fakeCRIU(t, "4.2.1")
	for _, tc := range []struct {
		name, variable string
		path           []string
		want           *Binary
		err            string
	}{
		{name: "variable", variable: better, path: []string{good}, want: &Binary{better, 40201}},
		{name: "search path", path: []string{good, better}, want: &Binary{good, 40200}},
		{name: "old variable", variable: old, path: []string{good}, err: "criu 3.17.1 at"},
		{name: "missing variable", variable: "/nowhere/criu", path: []string{good}, err: "/nowhere/criu"},
		{name: "old search path", path: []string{old}, err: "criu 3.17.1 at"},
		{name: "none", err: advice()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var dirs []string
			for _, p := range tc.path {
				dirs = append(dirs, filepath.Dir(p))
			}
			t.Setenv("PATH", strings.Join(dirs, ":"))
			t.Setenv(pathVariable, tc.variable)
			got, err := Find(t.Context())
			if tc.want != nil {
				if err != nil || *got != *tc.want {
					t.Fatalf("got %+v, %v; want %+v", got, err, tc.want)
				}
				return
			}
			if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("got %v, want unavailable with %q", err, tc.err)
			}
			if !strings.Contains(err.Error(), advice()) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q is not one line that says what to do", err)
			}
		})
	}
}

func TestFindCancelled(t *testing.T) {
	t.Setenv(pathVariable, fakeCRIU(t, "4.1"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Find(ctx); !errdefs.IsCanceled(err) {
		t.Errorf("got %v, want cancelled", err)
	}
}

func TestCheck(t *testing.T) {
	b := needCRIU(t)
	if b.Version < required() || b.String()[0] < '4' {
		t.Errorf("found version %v", b)
	}
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
	bad := &Binary{Path: filepath.Join(t.TempDir(), "criu")}
	script := "#!/bin/sh\necho 'Error (criu/cr-check.c:1): no such kernel' >&2\nexit 1\n"
	if err := os.WriteFile(bad.Path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	if e := asError(t, bad.Check(t.Context())); !errdefs.IsUnavailable(e) || e.Error() != "criu check: no such kernel" {
		t.Errorf("got %v", e)
	}
}

func TestRequiredOn(t *testing.T) {
	for release, want := range map[string]int{
		"5.15.0-91-generic": 40100,
		"6.15.9":            40100,
		"6.16.0":            40200,
		"6.18.44-cloud":     40200,
		"7.0":               40200,
		"unknown":           40100,
	} {
		if got := requiredOn(release); got != want {
			t.Errorf("%s: got %d, want %d", release, got, want)
		}
	}
}
