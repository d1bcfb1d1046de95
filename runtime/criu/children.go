package criu

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// endChildren kills and reaps the processes that the calling thread is the
// parent of, with their descendants. On the thread of a worker that has ended,
// these are what a failed restore has left: CRIU makes the root of a tree its
// sibling, so CRIU cannot reap it, and no one else knows it.
func endChildren() {
	for _, pid := range childrenOf(os.Getpid(), unix.Gettid()) {
		killTree(pid)
		for {
			_, err := unix.Wait4(pid, nil, unix.WALL, nil)
			if err != unix.EINTR {
				break
			}
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
