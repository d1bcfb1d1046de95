//go:build linux && cgo && (amd64 || arm64)

package launch

/*
#cgo CFLAGS: -fno-stack-protector -fno-lto

// Linkers define these for a section whose name is a C identifier.
extern const char __start_statefork_launch[] __attribute__((visibility("hidden")));
extern const char __stop_statefork_launch[] __attribute__((visibility("hidden")));
extern const char statefork_launch_entry[] __attribute__((visibility("hidden")));

static const void *launch_start(void) { return __start_statefork_launch; }
static int launch_size(void) { return __stop_statefork_launch - __start_statefork_launch; }
static int launch_entry(void) { return statefork_launch_entry - __start_statefork_launch; }
*/
import "C"

import "unsafe"

// code returns a copy of the launcher's code, and the offset at which it is
// entered.
func code() ([]byte, uint64, error) {
	return C.GoBytes(unsafe.Pointer(C.launch_start()), C.launch_size()), uint64(C.launch_entry()), nil
}
