package container

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
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
		if t.state == 'Z' || t.state == 'X' {
			continue
		}
		if err := limitsReadable(t); err != nil {
			return err
		}
		if pid == init {
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

// limitsReadable refuses what CRIU asks for and would be denied: the kernel tells
// the resource limits of another user's process only to who may set them.
func limitsReadable(t task) error {
	err := unix.Prlimit(t.pid, unix.RLIMIT_CORE, nil, &unix.Rlimit{})
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%s has another user or group than root's, and its resource limits can be kept only with CAP_SYS_RESOURCE, which containerd has not got: give it that, or run the process as root: %w", t, errdefs.ErrFailedPrecondition)
	}
	return nil // gone, or for CRIU to say
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

// culprits names, for a refusal by CRIU that does not, the processes that have
// such a file open. CRIU tells what it met, but only its verbose log where.
func culprits(refusal error, pids []int) error {
	const uring = "anon_inode:[io_uring]"
	if !strings.Contains(refusal.Error(), "io_uring") {
		return refusal
	}
	var found []string
	for _, pid := range pids {
		t, err := readTask(pid)
		if err != nil {
			continue
		}
		dir := fmt.Sprintf("/proc/%d/fd", pid)
		fds, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if link, err := os.Readlink(filepath.Join(dir, fd.Name())); err == nil && link == uring {
				found = append(found, fmt.Sprintf("%s fd %s", t, fd.Name()))
			}
		}
	}
	if len(found) == 0 {
		return refusal
	}
	return fmt.Errorf("io_uring of %s: %w", strings.Join(found, ", "), refusal)
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

// conn is an established TCP connection.
type conn struct {
	local, remote string
	remoteIP      net.IP
}

// peers lists the established TCP connections of init's network namespace
// whose other end is outside of it.
func peers(init int, netns *os.File) ([]string, error) {
	// Asking for connections makes the kernel walk a table that is sized for
	// the whole host, so ask only where there are sockets.
	used, err := tcpInUse(init)
	if err != nil || !used {
		return nil, err
	}
	var conns []conn
	err = onThread(func() error {
		if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", os.NewSyscallError("setns", err))
		}
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			sockets, err := netlink.SocketDiagTCP(family)
			if err != nil {
				return fmt.Errorf("list connections: %w", err)
			}
			conns = append(conns, established(sockets)...)
		}
		return nil
	})
	return outside(conns), err
}

// tcpInUse says whether there are TCP sockets that are bound or connected.
func tcpInUse(init int) (bool, error) {
	for _, name := range []string{"sockstat", "sockstat6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", init, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		}
		if err != nil {
			return false, fmt.Errorf("count sockets: %w", err)
		}
		if sockstatUsed(string(b)) {
			return true, nil
		}
	}
	return false, nil
}

// sockstatUsed reads "TCP: inuse 3 orphan 0 ...", with "TCP6:" for IPv6.
func sockstatUsed(table string) bool {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) >= 3 && (f[0] == "TCP:" || f[0] == "TCP6:") && f[1] == "inuse" {
			return f[2] != "0"
		}
	}
	return true // unknown form: look
}

func established(sockets []*netlink.Socket) []conn {
	var out []conn
	for _, s := range sockets {
		if s.State != netlink.TCP_ESTABLISHED {
			continue
		}
		addr := func(ip net.IP, port uint16) string { return net.JoinHostPort(ip.String(), strconv.Itoa(int(port))) }
		out = append(out, conn{
			local:    addr(s.ID.Source, s.ID.SourcePort),
			remote:   addr(s.ID.Destination, s.ID.DestinationPort),
			remoteIP: s.ID.Destination,
		})
	}
	return out
}

// outside picks the connections whose other end is not among them.
func outside(conns []conn) []string {
	local := map[string]bool{}
	for _, c := range conns {
		local[c.local] = true
	}
	var out []string
	for _, c := range conns {
		if !c.remoteIP.IsLoopback() && !local[c.remote] {
			out = append(out, c.local+" - "+c.remote)
		}
	}
	return out
}
