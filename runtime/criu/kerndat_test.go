package criu

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func TestKerndat(t *testing.T) {
	b := needCRIU(t)
	if bytes.Contains(readFile(t, "/proc/self/mountinfo"), []byte(" "+runDir+" ")) {
		t.Skipf("needs a %s that is no mount: criu keeps its cache there by itself", runDir)
	}
	dir := t.TempDir()
	cache := filepath.Join(dir, kerndatFile)
	ensure := func() os.FileInfo {
		t.Helper()
		if err := b.ensureKerndat(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(cache)
		if err != nil || st.Size() == 0 {
			t.Fatalf("no cache: %v, %v", st, err)
		}
		return st
	}
	first := ensure()
	if st, err := os.Stat(filepath.Join(dir, filepath.Dir(stampFile))); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("stamp's directory: %v, %v", st.Mode(), err)
	}
	if again := ensure(); !os.SameFile(first, again) {
		t.Error("a cache that fits was made again")
	}
	old := bytes.Replace(readFile(t, filepath.Join(dir, stampFile)), []byte(`"boot_id":"`), []byte(`"boot_id":"x`), 1)
	if err := os.WriteFile(filepath.Join(dir, stampFile), old, 0o600); err != nil {
		t.Fatal(err)
	}
	if again := ensure(); os.SameFile(first, again) {
		t.Error("the cache of another boot was kept")
	}
	if err := os.Remove(cache); err != nil {
		t.Fatal(err)
	}
	ensure()
	if bytes.Contains(readFile(t, "/proc/self/mountinfo"), []byte(" "+runDir+" ")) {
		t.Errorf("a mount is left on %s", runDir)
	}
}

func TestKerndatConcurrent(t *testing.T) {
	b := needCRIU(t)
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := b.ensureKerndat(t.Context(), dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// One cache, one stamp, its lock; nothing half written.
	for pattern, want := range map[string]int{"*": 2, "statefork/*": 2} {
		if got, err := filepath.Glob(filepath.Join(dir, pattern)); err != nil || len(got) != want {
			t.Errorf("%s: got %v, %v; want %d files", pattern, got, err, want)
		}
	}
}

// TestKerndatFailure leaves no stamp of a cache that could not be made.
func TestKerndatFailure(t *testing.T) {
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	dir := t.TempDir()
	b := &Binary{Path: fakeCRIU(t, "4.1")} // makes no cache
	if err := b.ensureKerndat(t.Context(), dir); err == nil {
		t.Fatal("no error")
	}
	for _, name := range []string{stampFile, kerndatFile} {
		if _, err := os.Stat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s: got %v, want not exist", name, err)
		}
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
