package waypoint

import (
	"os"
	"path/filepath"
	"testing"
)

func TestJournal(t *testing.T) {
	dir := t.TempDir()
	if j, err := readJournal(dir); err != nil || j.Phase != "" {
		t.Fatalf("without an operation: got %+v, %v", j, err)
	}
	j := &journal{Op: "restore", Node: "0123456789ab", Key: "c", Images: "/i", bundle: dir}
	for _, phase := range []string{"dump", "restore"} {
		if err := j.enter(phase); err != nil {
			t.Fatal(err)
		}
		got, err := readJournal(dir)
		if err != nil {
			t.Fatal(err)
		}
		if *got != *j || got.Phase != phase {
			t.Errorf("got %+v, want %+v", got, j)
		}
	}
	for range 2 { // clearing twice does no harm
		if err := j.clear(); err != nil {
			t.Fatal(err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestJournalUnreadable(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, journalFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readJournal(dir); err == nil {
		t.Error("half a journal was read without an error")
	}
	j := &journal{bundle: filepath.Join(dir, "absent")}
	if err := j.enter("dump"); err == nil {
		t.Error("a journal was written into no directory")
	}
}
