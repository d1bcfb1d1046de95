package criu

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// endChildren kills and reaps the children of the calling thread, with their
// descendants, but for those in others. On the thread of a worker that has
// ended, these are what a failed restore has left: CRIU makes the root of a tree
// its sibling, so CRIU cannot reap it, and no one else knows it.
//
// Only the thread's own children can appear there after others was taken: the
// kernel gives the children of a thread that ends to the first living thread of
// the process, and that is the main one, which is never a worker's.
func endChildren(others []int) {
	for _, pid := range childrenOf(os.Getpid(), unix.Gettid()) {
		if slices.Contains(others, pid) {
			continue
		}
		killTree(pid)
		for {
			_, err := unix.Wait4(pid, nil, unix.WALL, nil)
			if err != unix.EINTR {
				break
			}
		}
	}
}

// awaitEnd waits for the end of a child of this process and leaves it to be
// reaped.
func awaitEnd(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			return
		}
	}
}

// killTree kills a process and its descendants. One that forks meanwhile
// leaves a child behind only if it has no pid namespace of its own.
func killTree(pid int) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err == nil {
		for _, t := range tasks {
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				continue
			}
			for _, child := range childrenOf(pid, tid) {
				killTree(child)
			}
		}
	}
	_ = unix.Kill(pid, unix.SIGKILL)
}

// childrenOf returns the children of one thread.
func childrenOf(pid, tid int) []int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, tid))
	if err != nil {
		return nil // the thread is gone, and its children with another
	}
	var pids []int
	for _, f := range strings.Fields(string(data)) {
		if child, err := strconv.Atoi(f); err == nil {
			pids = append(pids, child)
		}
	}
	return pids
}
