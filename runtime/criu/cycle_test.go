package criu

import (
	"fmt"
	"testing"
)

// TestCycles moves one tree through many dumps and restores.
func TestCycles(t *testing.T) {
	b := needCRIU(t)
	p := startTree(t, "plain", 8)
	var sum string
	if _, err := fmt.Sscan(p.ask("sum"), &sum); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		images := t.TempDir()
		if err := p.dump(b, DumpOptions{Images: images}); err != nil {
			t.Fatal(err)
		}
		p.wait()
		if _, err := p.restore(t.Context(), b, RestoreOptions{Images: images, Work: t.TempDir()}); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%s %d %d", sum, i+2, 'a'+i+2)
		if got := p.ask("sum"); got != want {
			t.Fatalf("cycle %d: tree says %q, want %q", i, got, want)
		}
	}
}
