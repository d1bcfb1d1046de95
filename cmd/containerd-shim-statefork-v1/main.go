// Command containerd-shim-statefork-v1 is a containerd runtime whose
// containers can be checkpointed, restored in place and forked. containerd
// finds and starts it as the runtime io.statefork.v1.
package main

import (
	"github.com/statefork/statefork/shim"
)

func main() { shim.Run() }
