package main

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

var now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

func buffers() (o *output, out, msg *bytes.Buffer) {
	out, msg = &bytes.Buffer{}, &bytes.Buffer{}
	return &output{out: out, msg: msg, now: now}, out, msg
}

func TestTree(t *testing.T) {
	node := func(id, parent, name string, ago time.Duration, bytes uint64) statefork.Node {
		return statefork.Node{ID: id, Parent: parent, Name: name, Created: now.Add(-ago), ImageBytes: bytes}
	}
	tree := &waypoint.Tree{
		Container: waypoint.Container{ID: "abc", Name: "web", Status: "running", Head: "ccc", ForkedFrom: "src@123"},
		Nodes: statefork.NewTree([]statefork.Node{
			node("aaa", "123", "base", 3*time.Minute, 1<<20), node("bbb", "aaa", "", 2*time.Minute, 1536),
			node("ccc", "aaa", "tried", 10*time.Second, 12), node("ddd", "ccc", "", 9*time.Second, 12),
			node("eee", "gone", "", 5*time.Second, 5<<30),
		}),
		Forks: []statefork.Fork{{ID: "f1", Name: "web-1", From: "bbb", Status: "running"}, {ID: "f2", From: "ccc", Status: "stopped"}, {ID: "f3", From: "removed", Status: "none"}},
	}
	o, out, _ := buffers()
	if err := o.tree(tree); err != nil {
		t.Fatal(err)
	}
	const want = `web  running  5 nodes  forked from src@123
|-- (fork) f3  none
|-- aaa  base  3m  1.0 MiB
|   |-- bbb  -  2m  1.5 KiB
|   |   ` + "`" + `-- (fork) web-1  running
|   ` + "`" + `-- * ccc  tried  10s  12 B  <- head
|       |-- (fork) f2  stopped
|       ` + "`" + `-- ddd  -  9s  12 B
` + "`" + `-- eee  -  5s  5.0 GiB
`
	if out.String() != want {
		t.Errorf("tree is\n%swant\n%s", out, want)
	}
}

func TestTreeWithoutHead(t *testing.T) {
	o, out, _ := buffers()
	err := o.tree(&waypoint.Tree{
		Container: waypoint.Container{ID: "abc", Status: "none", Head: "gone"},
		Nodes:     statefork.NewTree([]statefork.Node{{ID: "aaa", Created: now}}),
	})
	if want := "abc  none  1 node\n`-- aaa  -  0s  0 B\nhead is gone, which is not among them\n"; err != nil || out.String() != want {
		t.Errorf("tree is\n%s%v; want\n%s", out, err, want)
	}
}

func TestResult(t *testing.T) {
	o, out, msg := buffers()
	err := o.result(&waypoint.Result{
		Node:       statefork.Node{ID: "aaa"},
		Timings:    waypoint.Timings{Total: 24*time.Millisecond + 123*time.Microsecond, Dump: 11 * time.Millisecond},
		External:   []statefork.External{{Kind: "mount", Name: "/data", Detail: "/srv/data"}, {Kind: "socket", Name: "1.2.3.4:5"}},
		EndedExecs: []waypoint.Exec{{ID: "e1", PID: 7}},
	}, "not rolled back")
	if err != nil || out.String() != "aaa\n" {
		t.Errorf("result printed %q, %v", out, err)
	}
	const want = `statefork: exec e1 (pid 7) was ended
statefork: not rolled back: mount /data (/srv/data)
statefork: not rolled back: socket 1.2.3.4:5
statefork: total 24.1ms, dump 11ms
`
	if msg.String() != want {
		t.Errorf("remarks are\n%swant\n%s", msg, want)
	}
}

func TestForkOutput(t *testing.T) {
	o, out, msg := buffers()
	err := o.fork(&waypoint.ForkResult{
		Siblings: []waypoint.Sibling{{ID: "a1", Name: "web-1"}, {ID: "a2", Err: errors.New("fork a2: no memory")}, {ID: "a3"}},
		Dropped:  []statefork.External{{Kind: "port", Name: "80->80/tcp"}},
	})
	if err != nil || out.String() != "a1 web-1\na3\n" {
		t.Errorf("fork printed %q, %v", out, err)
	}
	if want := "statefork: not kept: port 80->80/tcp\nstatefork: fork a2: no memory\n"; msg.String() != want {
		t.Errorf("remarks are %q, want %q", msg, want)
	}
}

func TestUnits(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", time.Minute: "1m", time.Hour: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := age(d); got != want {
			t.Errorf("age(%v) = %q, want %q", d, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1 << 20: "1.0 MiB", 3 << 40: "3.0 TiB", 1 << 63: "8192.0 PiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}
