package container

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Some state would be lost without an error, or would kill the tree at the dump
// and then fail at the restore. It is refused before anything is touched. What
// CRIU itself refuses cleanly is left to CRIU.

// task is one process of the container as /proc shows it.
type task struct {
	pid, ppid int
	state     byte
	comm      string
}

func (t task) String() string { return fmt.Sprintf("pid %d (%s)", t.pid, t.comm) }

// readTask reads /proc/<pid>/stat.
func readTask(pid int) (task, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return task{}, err
	}
	s := string(b)
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if open < 0 || end < open {
		return task{}, fmt.Errorf("parse /proc/%d/stat: no command name", pid)
	}
	f := strings.Fields(s[end+1:])
	if len(f) < 2 {
		return task{}, fmt.Errorf("parse /proc/%d/stat: too short", pid)
	}
	ppid, err := strconv.Atoi(f[1])
	if err != nil {
		return task{}, fmt.Errorf("parse /proc/%d/stat: %w", pid, err)
	}
	return task{pid: pid, ppid: ppid, state: f[0][0], comm: s[open+1 : end]}, nil
}

// checkTasks refuses processes that CRIU would lose or could not restore. The
// tree must be frozen; pids are those in the container's cgroup.
func checkTasks(init int, pids []int) error {
	tasks := map[int]task{}
	for _, pid := range pids {
		t, err := readTask(pid)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		tasks[pid] = t
	}
	want, err := readNamespaces(init)
	if err != nil {
		return err
	}
	for pid, t := range tasks {
		if pid == init || t.state == 'Z' || t.state == 'X' {
			continue
		}
		if !descends(tasks, pid, init) {
			return fmt.Errorf("%s was put into the container from outside and is no child of its init: end it first: %w", t, errdefs.ErrFailedPrecondition)
		}
		got, err := readNamespaces(pid)
		if err != nil {
			return err
		}
		if ns := firstDifference(want, got); ns != "" {
			return fmt.Errorf("%s has a %s namespace of its own: not supported: %w", t, ns, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

func descends(tasks map[int]task, pid, init int) bool {
	for range len(tasks) + 1 {
		t, ok := tasks[pid]
		if !ok {
			return false
		}
		if t.ppid == init {
			return true
		}
		pid = t.ppid
	}
	return false
}

// checkedNamespaces are those that every task must share with init. A mount
// namespace may differ: CRIU restores nested ones.
var checkedNamespaces = []string{"pid", "pid_for_children", "net", "uts", "ipc", "user", "cgroup", "time", "time_for_children"}

func readNamespaces(pid int) (map[string]string, error) {
	out := map[string]string{}
	for _, ns := range checkedNamespaces {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				continue // this kernel has no such namespace
			}
			return nil, fmt.Errorf("read namespaces of pid %d: %w", pid, err)
		}
		out[ns] = link
	}
	return out, nil
}

func firstDifference(want, got map[string]string) string {
	for _, ns := range checkedNamespaces {
		if want[ns] != got[ns] {
			return strings.TrimSuffix(ns, "_for_children")
		}
	}
	return ""
}

// sysvInUse says whether the IPC namespace holds System V objects. They would
// not be in the images if CRIU ran inside the namespace.
func sysvInUse(ipc *os.File) (bool, error) {
	var used bool
	err := onThread(func() error {
		if err := unix.Setns(int(ipc.Fd()), unix.CLONE_NEWIPC); err != nil {
			return fmt.Errorf("enter ipc namespace: %w", os.NewSyscallError("setns", err))
		}
		for _, kind := range []string{"shm", "sem", "msg"} {
			b, err := os.ReadFile("/proc/sysvipc/" + kind)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("read System V objects: %w", err)
			}
			if strings.Count(string(b), "\n") > 1 { // beyond the heading
				used = true
			}
		}
		return nil
	})
	return used, err
}

// peers lists the established TCP connections of init's network namespace
// whose other end is outside of it.
func peers(init int) ([]string, error) {
	local := map[string]bool{}
	var found []conn
	for _, name := range []string{"tcp", "tcp6"} {
		cs, err := readConns(fmt.Sprintf("/proc/%d/net/%s", init, name))
		if err != nil {
			return nil, err
		}
		found = append(found, cs...)
	}
	for _, c := range found {
		local[c.local] = true
	}
	var out []string
	for _, c := range found {
		if !c.remoteIP.IsLoopback() && !local[c.remote] {
			out = append(out, c.local+" - "+c.remote)
		}
	}
	return out, nil
}

type conn struct {
	local, remote string
	remoteIP      net.IP
}

// readConns reads the established connections of a /proc/<pid>/net/tcp table.
func readConns(name string) ([]conn, error) {
	f, err := os.Open(name)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil // no IPv6
		}
		return nil, fmt.Errorf("read connections: %w", err)
	}
	defer f.Close()
	var out []conn
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		const established = "01"
		if len(fields) < 4 || fields[3] != established {
			continue
		}
		_, local, err := parseAddr(fields[1])
		if err != nil {
			return nil, fmt.Errorf("parse %q: %w", name, err)
		}
		ip, remote, err := parseAddr(fields[2])
		if err != nil {
			return nil, fmt.Errorf("parse %q: %w", name, err)
		}
		out = append(out, conn{local: local, remote: remote, remoteIP: ip})
	}
	return out, sc.Err()
}

// parseAddr reads "0100007F:1F90": words of four bytes in host order, which on
// the machines that CRIU runs on is little endian, then the port.
func parseAddr(s string) (net.IP, string, error) {
	host, port, ok := strings.Cut(s, ":")
	if !ok {
		return nil, "", fmt.Errorf("address %q", s)
	}
	ip, err := hex.DecodeString(host)
	if err != nil || len(ip)%4 != 0 {
		return nil, "", fmt.Errorf("address %q", s)
	}
	for i := 0; i < len(ip); i += 4 {
		ip[i], ip[i+1], ip[i+2], ip[i+3] = ip[i+3], ip[i+2], ip[i+1], ip[i]
	}
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return nil, "", fmt.Errorf("address %q", s)
	}
	return net.IP(ip), net.JoinHostPort(net.IP(ip).String(), strconv.FormatUint(p, 10)), nil
}
