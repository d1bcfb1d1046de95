package container

import (
	"os"

	"github.com/opencontainers/runc/libcontainer"

	// Device rules of cgroups are opt-in.
	_ "github.com/opencontainers/cgroups/devices"
	// The C constructor that joins and makes namespaces before Go starts.
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
)

// initArg is the argument with which libcontainer executes this binary again
// to become a container's process.
const initArg = "init"

func init() {
	if len(os.Args) > 1 && os.Args[1] == initArg {
		libcontainer.Init()
	}
}
