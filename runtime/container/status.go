package container

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// Status is where a process is in its life, in the words of the OCI runtime
// specification. The container's status is its init process' one.
type Status string

// The statuses. Pausing is the time that the kernel takes to freeze a cgroup.
const (
	StatusCreated Status = "created"
	StatusRunning Status = "running"
	StatusPausing Status = "pausing"
	StatusPaused  Status = "paused"
	StatusStopped Status = "stopped"
)

// transitions lists where a process can go from each status. Only init is ever
// pausing or paused: it stands for the whole cgroup. A swap is no transition:
// nobody outside can tell that the process underneath is another one.
var transitions = map[Status][]Status{
	StatusCreated: {StatusRunning, StatusStopped},
	StatusRunning: {StatusPausing, StatusStopped},
	StatusPausing: {StatusPaused, StatusRunning, StatusStopped},
	StatusPaused:  {StatusRunning, StatusStopped},
	StatusStopped: {},
}

// check fails with ErrFailedPrecondition unless a process can go from s to
// next. doing is the verb of the operation, for the error.
func (s Status) check(next Status, doing string) error {
	for _, t := range transitions[s] {
		if t == next {
			return nil
		}
	}
	return fmt.Errorf("%s a process that is %s: %w", doing, s, errdefs.ErrFailedPrecondition)
}
