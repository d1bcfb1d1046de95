// Package launch starts a program in a container as a child of the container's
// init.
//
// A process that is put into a container from outside has its parent outside of
// the pid namespace. Such a process is not in init's tree, and CRIU leaves it out
// of a dump without a word. If a process inside the namespace forks the command
// and ends, the kernel gives the command to the namespace's init, and it is dumped
// like any other.
//
// The process in between is the launcher: a program of its own, freestanding C
// within this binary. File has it as a sealed memory file, which a container
// executes by descriptor and which is nowhere in the container's file system. It
// is started by whatever puts processes into the container, after user,
// capabilities, limits and working directory are set, and hands all of that on.
//
// Its caller hears of the command through a Notify: which process it is, while it
// still waits to be let go, and whether it could be executed.
package launch

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	// maxFiles is MAX_FILES of launcher.c.
	maxFiles = 64
	// maxFD is far above what a limit of open files can allow: fs.nr_open.
	maxFD = 1 << 30
)

// Mode is what becomes of the launcher once the command is there.
type Mode byte

const (
	// Orphan has the launcher end at once, with code 0: the command is init's
	// child, and nobody outside learns how it ends other than by a pidfd.
	Orphan Mode = 'o'
	// Monitor has the launcher stay and end as the command does, by the same
	// code or signal. All signals but SIGKILL are lost on it; if it is killed,
	// the command goes on as init's child.
	Monitor Mode = 'm'
)

// Spec describes one start.
type Spec struct {
	Mode Mode
	// Program is the launcher's own file, as a descriptor of the process that
	// executes it. It is closed then, like all that Files does not name.
	Program int
	// Notify is the descriptor of Notify.File in that process.
	Notify int
	// Path is the command. If it has no slash it is looked for in the absolute
	// directories of PATH in the environment that the launcher is executed with.
	Path string
	// Args are the command's arguments; the first is its name.
	Args []string
	// Files are the command's descriptors and which of the launcher's each is.
	// Nil keeps 0, 1 and 2.
	Files map[int]int
	// Terminal makes descriptor 2 the controlling terminal of the command's
	// session: a shell may have its commands on 0 and their output on 1. It must
	// not be that of another session, except the launcher's own, which gives it
	// up.
	Terminal bool
}

// Args returns the arguments that the launcher is to be executed with. The first
// one is its path too: execution by descriptor needs a /proc.
func Args(s Spec) ([]string, error) {
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("launch %q: %w: %w", s.Path, err, errdefs.ErrInvalidArgument)
	}
	var plan strings.Builder
	plan.WriteByte(byte(s.Mode))
	if s.Terminal {
		plan.WriteByte('t')
	} else {
		plan.WriteByte('-')
	}
	plan.WriteString(strconv.Itoa(s.Notify))
	files := s.files()
	for _, to := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(&plan, ",%d=%d", to, files[to])
	}
	return append([]string{
		"/proc/self/fd/" + strconv.Itoa(s.Program), plan.String(), s.Path,
	}, s.Args...), nil
}

func (s *Spec) files() map[int]int {
	if s.Files == nil {
		return map[int]int{0: 0, 1: 1, 2: 2}
	}
	return s.Files
}

// check refuses what the launcher would have no way to complain of.
func (s *Spec) check() error {
	if s.Mode != Orphan && s.Mode != Monitor {
		return fmt.Errorf("no mode %q", s.Mode)
	}
	if s.Path == "" || len(s.Args) == 0 {
		return fmt.Errorf("command without a path or a name")
	}
	for _, arg := range append([]string{s.Path}, s.Args...) {
		if strings.ContainsRune(arg, 0) {
			return fmt.Errorf("NUL in argument %q", arg)
		}
	}
	files := s.files()
	if len(files) > maxFiles {
		return fmt.Errorf("%d files are more than %d", len(files), maxFiles)
	}
	if _, ok := files[2]; s.Terminal && !ok {
		return fmt.Errorf("terminal without descriptor 2")
	}
	fds := []int{s.Program, s.Notify}
	for to, from := range files {
		fds = append(fds, to, from)
	}
	for _, fd := range fds {
		if fd < 0 || fd >= maxFD {
			return fmt.Errorf("no descriptor %d", fd)
		}
	}
	return nil
}
