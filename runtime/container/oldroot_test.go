package container

import "testing"

func TestDirtyBytes(t *testing.T) {
	const meminfo = "MemTotal:       24683656 kB\nDirty:             12345 kB\nWriteback:             7 kB\n"
	if got := dirtyBytes(meminfo); got != 12345<<10 {
		t.Errorf("got %d", got)
	}
	if got := dirtyBytes("MemTotal: 1 kB\n"); got != 0 {
		t.Errorf("got %d from a table without the line", got)
	}
}
