//go:build !amd64

package terminal

// System calls that are not there: programs use ppoll and pselect6.
const (
	sysPoll   = -1
	sysSelect = -2
)
