package container

import (
	"net"
	"os"
	"strings"
	"testing"
)

func TestDescends(t *testing.T) {
	tasks := map[int]task{
		10: {pid: 10, ppid: 1},
		11: {pid: 11, ppid: 10},
		12: {pid: 12, ppid: 11},
		20: {pid: 20, ppid: 1},  // put in from outside
		21: {pid: 21, ppid: 20}, // and its child
	}
	for pid, want := range map[int]bool{11: true, 12: true, 20: false, 21: false} {
		if got := descends(tasks, pid, 10); got != want {
			t.Errorf("pid %d: got %v, want %v", pid, got, want)
		}
	}
}

func TestReadTask(t *testing.T) {
	got, err := readTask(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got.pid != os.Getpid() || got.ppid != os.Getppid() || got.comm == "" {
		t.Errorf("got %+v", got)
	}
}

func TestSockstatUsed(t *testing.T) {
	for table, want := range map[string]bool{
		"sockets: used 3\nTCP: inuse 0 orphan 0 tw 0 alloc 0 mem 0\nUDP: inuse 1 mem 0\n": false,
		"sockets: used 3\nTCP: inuse 2 orphan 0 tw 0 alloc 2 mem 0\n":                     true,
		"TCP6: inuse 0\nUDP6: inuse 4\n":                                                  false,
		"TCP6: inuse 1\n":                                                                 true,
		"something new\n":                                                                 true,
	} {
		if got := sockstatUsed(table); got != want {
			t.Errorf("%q: got %v, want %v", table, got, want)
		}
	}
}

// TestPeers has connections in this network namespace: both ends of one are
// here, so only what is outside may be listed.
func TestPeers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if used, err := tcpInUse(os.Getpid()); err != nil || !used {
		t.Errorf("sockets in use: got %v, %v", used, err)
	}
	got, err := peers(os.Getpid(), ns)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range got {
		if strings.Contains(p, l.Addr().String()) {
			t.Errorf("%s is listed as outside", p)
		}
	}
}

func TestOutside(t *testing.T) {
	conns := []conn{
		{"127.0.0.1:80", "127.0.0.1:4000", net.IPv4(127, 0, 0, 1)},
		{"10.4.0.4:80", "10.4.0.4:4000", net.IPv4(10, 4, 0, 4)}, // by its own address
		{"10.4.0.4:4000", "10.4.0.4:80", net.IPv4(10, 4, 0, 4)},
		{"10.4.0.4:4001", "10.4.0.8:443", net.IPv4(10, 4, 0, 8)},
	}
	got := outside(conns)
	if len(got) != 1 || got[0] != "10.4.0.4:4001 - 10.4.0.8:443" {
		t.Errorf("got %v", got)
	}
}
