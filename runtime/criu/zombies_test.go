package criu

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"google.golang.org/protobuf/proto"
)

// TestDetachZombies changes those zombies of the root that CRIU cannot bring
// back, and nothing else.
func TestDetachZombies(t *testing.T) {
	const alive, dead = taskAlive, 2
	type process struct {
		pid, parent, session, group, state uint32
		want                               uint32 // its session then
	}
	all := []process{
		{1, 0, 1, 1, alive, 1},
		{12, 1, 12, 12, dead, 12},
		{13, 1, 12, 12, dead, 13},
		{14, 1, 12, 14, alive, 12},
		{15, 1, 12, 15, dead, 15},
		{16, 1, 1, 1, dead, 1},
		{20, 14, 12, 14, dead, 12},
	}
	dir := t.TempDir()
	tree := filepath.Join(dir, "pstree.img")
	img := &crit.CriuImage{Magic: "PSTREE"}
	for _, p := range all {
		img.Entries = append(img.Entries, &crit.CriuEntry{Message: &pstree.PstreeEntry{
			Pid: &p.pid, Ppid: &p.parent, Sid: &p.session, Pgid: &p.group, Threads: []uint32{p.pid},
		}})
		core := &crit.CriuImage{Magic: "CORE", Entries: []*crit.CriuEntry{{Message: &criu_core.CoreEntry{
			Mtype: criu_core.CoreEntry_X86_64.Enum(),
			Tc: &criu_core.TaskCoreEntry{
				TaskState: &p.state, ExitCode: proto.Uint32(0), Personality: proto.Uint32(0), Flags: proto.Uint32(0),
				BlkSigset: proto.Uint64(0), Comm: proto.String("x"),
			},
		}}}}
		if err := encode(filepath.Join(dir, fmt.Sprintf("core-%d.img", p.pid)), core); err != nil {
			t.Fatal(err)
		}
	}
	if err := encode(tree, img); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to do
		if err := DetachZombies(dir); err != nil {
			t.Fatal(err)
		}
	}
	got, err := decode(tree, &pstree.PstreeEntry{})
	if err != nil || len(got.Entries) != len(all) {
		t.Fatalf("%v, %v", got, err)
	}
	for i, p := range all {
		e := got.Entries[i].Message.(*pstree.PstreeEntry)
		group := p.group
		if p.want != p.session {
			group = p.want
		}
		if e.GetPid() != p.pid || e.GetPpid() != p.parent || e.GetSid() != p.want || e.GetPgid() != group {
			t.Errorf("process %d became %v, want session %d and group %d", p.pid, e, p.want, group)
		}
	}
}
