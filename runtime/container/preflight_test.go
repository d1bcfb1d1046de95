package container

import (
	"os"
	"path/filepath"
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

func TestReadConns(t *testing.T) {
	// sl local_address rem_address st ...
	const table = `  sl  local_address rem_address   st tx_queue
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000
   2: 0400040A:9C40 0800040A:01BB 01 00000000:00000000
`
	name := filepath.Join(t.TempDir(), "tcp")
	if err := os.WriteFile(name, []byte(table), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readConns(name)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 {
		t.Fatalf("got %d established connections, want 2: %v", len(got), got)
	}
	if got[1].local != "10.4.0.4:40000" || got[1].remote != "10.4.0.8:443" {
		t.Errorf("got %v", got[1])
	}
	if !got[0].remoteIP.IsLoopback() {
		t.Errorf("%v is not loopback", got[0].remoteIP)
	}
}

func TestParseAddr(t *testing.T) {
	for in, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000000000000000000001000000:0050": "[::1]:80",
	} {
		if _, got, err := parseAddr(in); err != nil || got != want {
			t.Errorf("%s: got %q, %v; want %q", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "0100007F", "zz:1", "0100:1F90:", "01:0050"} {
		if _, _, err := parseAddr(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
