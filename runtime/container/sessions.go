package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/launch"
	"github.com/statefork/statefork/runtime/terminal"
	"github.com/statefork/statefork/runtime/terminal/shell"
)

// Sessions returns the container's persistent shells.
func (c *Container) Sessions() *terminal.Set { return c.sessions }

// shells are where a shell is looked for that is named without a path, and
// which ones if none is named.
var (
	shellDirectories = []string{"/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin"}
	defaultShells    = []string{"bash", "sh"}
)

// StartShell implements terminal.Host. The shell becomes a child of init and
// leads a session: CRIU dumps and restores it like any other process. The caller
// holds the operation lock.
func (c *Container) StartShell(ctx context.Context, want terminal.Launch) (_ *terminal.Channel, retErr error) {
	pid, paused, err := c.initAlive(ctx)
	if err != nil {
		return nil, err
	}
	if paused {
		return nil, fmt.Errorf("container is paused: resume it first: %w", errdefs.ErrFailedPrecondition)
	}
	if !c.privatePIDs() {
		return nil, fmt.Errorf("sessions need a pid namespace of the container's own: %w", errdefs.ErrNotImplemented)
	}
	root, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open root of container: %w", err)
	}
	defer root.Close()
	spec, err := c.sessionProcess(root, want)
	if err != nil {
		return nil, err
	}
	path, dialect, err := findShell(root, want.Shell)
	if err != nil {
		return nil, err
	}
	s := &shellStart{c: c, spec: spec, dialect: dialect, ch: &terminal.Channel{Path: path, Dialect: dialect}}
	defer func() {
		if retErr != nil {
			s.abandon()
		}
		closeAll(s.inside)
	}()
	if err := s.openFiles(want.Size); err != nil {
		return nil, err
	}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	return s.ch, nil
}

// sessionProcess is the process that a session's shell is to be, without its
// arguments.
func (c *Container) sessionProcess(root *os.File, want terminal.Launch) (*specs.Process, error) {
	p := *c.spec.Process
	p.Terminal, p.Scheduler, p.IOPriority = false, nil, nil
	p.Env = append(slices.Clone(p.Env), want.Env...)
	if !slices.ContainsFunc(p.Env, func(v string) bool { return strings.HasPrefix(v, "TERM=") }) {
		p.Env = append(p.Env, "TERM=xterm-256color")
	}
	if want.Cwd != "" {
		if !filepath.IsAbs(want.Cwd) {
			return nil, fmt.Errorf("working directory %q is not absolute: %w", want.Cwd, errdefs.ErrInvalidArgument)
		}
		p.Cwd = want.Cwd
		if dir, err := openIn(root, want.Cwd, unix.O_PATH|unix.O_DIRECTORY); err == nil {
			closeQuietly(dir)
		} else {
			// A shell that is to go on where another one was is better off
			// in the container's own directory than not there.
			p.Cwd = c.spec.Process.Cwd
		}
	}
	if want.User != "" {
		if err := setUser(&p, root, want.User); err != nil {
			return nil, fmt.Errorf("user %q: %w: %w", want.User, err, errdefs.ErrInvalidArgument)
		}
	}
	return &p, nil
}

// setUser looks a user up in the container's own files.
func setUser(p *specs.Process, root *os.File, name string) error {
	read := func(path string) io.ReadCloser {
		f, err := openIn(root, path, unix.O_RDONLY)
		if err != nil {
			return io.NopCloser(strings.NewReader(""))
		}
		return f
	}
	passwd, group := read("/etc/passwd"), read("/etc/group")
	defer passwd.Close()
	defer group.Close()
	u, err := user.GetExecUser(name, nil, passwd, group)
	if err != nil {
		return err
	}
	p.User = specs.User{UID: uint32(u.Uid), GID: uint32(u.Gid)}
	for _, g := range u.Sgids {
		p.User.AdditionalGids = append(p.User.AdditionalGids, uint32(g))
	}
	p.Env = append(p.Env, "HOME="+u.Home)
	if u.Uid != 0 {
		p.Capabilities = nil
	}
	return nil
}

// Processes implements terminal.Host.
func (c *Container) Processes() ([]int, error) {
	cg, err := c.cgroup()
	if err != nil {
		return nil, err
	}
	pids, err := cg.GetAllPids()
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	return pids, nil
}

// findShell finds a shell in the container's root: by a path, by a name, or the
// best there is.
func findShell(root *os.File, want string) (path string, d shell.Dialect, _ error) {
	if filepath.IsAbs(want) {
		d, ok := shellAt(root, want)
		if !ok {
			return "", 0, fmt.Errorf("shell %q: no such program in the container: %w", want, errdefs.ErrNotFound)
		}
		return want, d, nil
	}
	names := defaultShells
	if want != "" {
		names = []string{want}
	}
	for _, name := range names {
		if strings.Contains(name, "/") {
			return "", 0, fmt.Errorf("shell %q: neither a name nor an absolute path: %w", name, errdefs.ErrInvalidArgument)
		}
		for _, dir := range shellDirectories {
			path := filepath.Join(dir, name)
			if d, ok := shellAt(root, path); ok {
				return path, d, nil
			}
		}
	}
	return "", 0, fmt.Errorf("no shell %s in %s of the container: %w",
		strings.Join(names, " or "), strings.Join(shellDirectories, ", "), errdefs.ErrNotFound)
}

// shellAt says whether there is a program at path, and what dialect its name,
// or the name that it is a link to, stands for.
func shellAt(root *os.File, path string) (shell.Dialect, bool) {
	f, err := openIn(root, path, unix.O_PATH)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
		return 0, false
	}
	if d := shell.ForPath(path); d != shell.Unknown {
		return d, true
	}
	resolved, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return shell.Unknown, true
	}
	return shell.ForPath(resolved), true
}

// openIn opens a path below a container's root as its processes would, however
// its links lead.
func openIn(root *os.File, path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), path, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// shellStart is the start of one shell.
type shellStart struct {
	c       *Container
	spec    *specs.Process
	dialect shell.Dialect
	ch      *terminal.Channel
	// The shell's ends: terminal, command pipe, report pipe.
	slave, commands, reports *os.File
	// inside are all that is to be closed when the shell has its own.
	inside []*os.File
}

func (s *shellStart) abandon() {
	closeAll([]*os.File{s.ch.Master, s.ch.Commands, s.ch.Reports, s.ch.Exit})
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			closeQuietly(f)
		}
	}
}

func (s *shellStart) openFiles(size terminal.Size) (err error) {
	if s.ch.Master, s.slave, err = terminal.Open(size, int(s.spec.User.UID)); err != nil {
		return err
	}
	s.inside = append(s.inside, s.slave)
	if err := terminal.Plain(s.slave); err != nil {
		return err
	}
	if s.commands, s.ch.Commands, err = terminal.NewPipe(terminal.Writing); err != nil {
		return err
	}
	s.inside = append(s.inside, s.commands)
	// Dash and ash open it again, by its name in /proc.
	if err := s.commands.Chown(int(s.spec.User.UID), -1); err != nil {
		return fmt.Errorf("give shell its command pipe: %w", err)
	}
	if s.ch.Reports, s.reports, err = terminal.NewPipe(terminal.Reading); err != nil {
		return err
	}
	s.inside = append(s.inside, s.reports)
	return nil
}

// Descriptors of the launcher, behind its standard streams.
const (
	launcherFD = 3 + iota
	notifyFD
	commandsFD
	reportsFD
	nowhereFD
)

// run has libcontainer start the launcher, and that the shell.
func (s *shellStart) run(ctx context.Context) error {
	program, err := launch.File()
	if err != nil {
		return err
	}
	notify, err := launch.NewNotify(s.ch.Path)
	if err != nil {
		return err
	}
	defer notify.Close()
	files := map[int]int{0: 0, 1: 1, 2: 2, shell.ReportFD: reportsFD}
	files[s.dialect.CommandFD()] = commandsFD
	nowhere, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer nowhere.Close()
	if s.dialect.Banner() {
		files[1] = nowhereFD // until it is given the terminal
	}
	s.spec.Args, err = launch.Args(launch.Spec{
		Mode:     launch.Orphan,
		Program:  launcherFD,
		Notify:   notifyFD,
		Path:     s.ch.Path,
		Args:     append([]string{filepath.Base(s.ch.Path)}, s.dialect.Args()...),
		Files:    files,
		Terminal: true,
	})
	if err != nil {
		return err
	}
	s.spec.Env = append(s.spec.Env, shell.Env()...)
	lp, err := libcontainerProcess(s.spec)
	if err != nil {
		return err
	}
	lp.Stdin, lp.Stdout, lp.Stderr = s.slave, s.slave, s.slave
	lp.ExtraFiles = []*os.File{program, notify.File(), s.commands, s.reports, nowhere}
	if err := s.c.lc().Start(lp); err != nil {
		return fmt.Errorf("start shell %q: %w", s.ch.Path, errorClass(err))
	}
	p, err := notify.Wait(ctx)
	if err != nil {
		_ = lp.Signal(unix.SIGKILL)
	}
	// The launcher ends when it has forked the shell. Only then is the shell
	// init's child, and it notes its parent when it begins.
	_, werr := waitChild(lp)()
	if err == nil {
		s.ch.Pid, s.ch.Exit = p.Pid, p.Pidfd
		err = notify.Release(ctx)
	}
	if err := errors.Join(err, werr); err != nil {
		return err
	}
	if err := unix.SetNonblock(int(s.ch.Exit.Fd()), true); err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if s.ch.Exit, err = pollable(s.ch.Exit); err != nil {
		return err
	}
	s.ch.Inner, err = innerPid(s.ch.Pid)
	return err
}

// innerPid returns the pid of a process in its own pid namespace.
func innerPid(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("read status of process: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		rest, ok := strings.CutPrefix(line, "NSpid:")
		if !ok {
			continue
		}
		var n int
		f := strings.Fields(rest)
		if len(f) > 0 {
			if _, err := fmt.Sscan(f[len(f)-1], &n); err == nil {
				return n, nil
			}
		}
	}
	return 0, fmt.Errorf("process %d has no pid of its namespace: %w", pid, errdefs.ErrInternal)
}

// findInner finds the processes of the container by their pids inside. They are
// looked at when the first one is asked for: most containers have no sessions.
func (c *Container) findInner() func(inner int) (int, error) {
	all := sync.OnceValues(func() (map[int]int, error) {
		pids, err := c.Processes()
		if err != nil {
			return nil, err
		}
		byInner := map[int]int{}
		for _, pid := range pids {
			if inner, err := innerPid(pid); err == nil {
				byInner[inner] = pid
			}
		}
		return byInner, nil
	})
	return func(inner int) (int, error) {
		byInner, err := all()
		if err != nil {
			return 0, err
		}
		if pid, ok := byInner[inner]; ok {
			return pid, nil
		}
		return 0, fmt.Errorf("process %d of the container is not there: %w", inner, errdefs.ErrNotFound)
	}
}

// resumeSessions goes on with sessions once their shells are restored.
type resumeSessions func(find func(inner int) (int, error)) error
