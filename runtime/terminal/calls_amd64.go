package terminal

import "golang.org/x/sys/unix"

// System calls that newer architectures do not have.
const (
	sysPoll   = unix.SYS_POLL
	sysSelect = unix.SYS_SELECT
)
