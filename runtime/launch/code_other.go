//go:build !linux || !cgo || (!amd64 && !arm64)

package launch

// code has nothing to return: there is no compiler for launcher.c, or no system
// calls in it for this architecture.
func code() ([]byte, uint64, error) { return nil, 0, unsupported() }
