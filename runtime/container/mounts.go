package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// The mounts of a container fall into two parts. CRIU rebuilds the root, proc,
// sysfs, devpts and mqueue. All others are "external" to CRIU: it knows each by
// a key, and at a restore binds what we offer under that key. What we offer is
// attached in a mount namespace that only the restoring CRIU process sees, so
// nothing of it is ever visible on the host, and a crash leaves nothing behind.

// readMounts returns the mount table of process pid.
func readMounts(pid int) ([]*mountinfo.Info, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mount table of pid %d: %w", pid, err)
	}
	defer f.Close()
	infos, err := mountinfo.GetMountsFromReader(f, nil)
	if err != nil {
		return nil, fmt.Errorf("parse mount table of pid %d: %w", pid, err)
	}
	return infos, nil
}

// classify picks the external ones of the mounts of a container. binds are
// the destinations of the spec's bind mounts.
func classify(infos []*mountinfo.Info, binds []string) ([]ExternalMount, error) {
	var rootDev string
	for _, m := range infos {
		if m.Mountpoint == "/" {
			rootDev = devOf(m)
		}
	}
	var out []ExternalMount
	for _, m := range infos {
		kind, err := kindOf(m, rootDev, binds)
		if err != nil {
			return nil, err
		}
		if kind == "" {
			continue
		}
		if strings.Contains(m.Mountpoint, "]") {
			return nil, fmt.Errorf("mount %q: CRIU cannot name a mountpoint with ']': %w", m.Mountpoint, errdefs.ErrFailedPrecondition)
		}
		out = append(out, ExternalMount{
			Key:        "m" + strconv.Itoa(len(out)),
			Mountpoint: m.Mountpoint,
			Kind:       kind,
			FSType:     m.FSType,
			Source:     m.Source,
			Options:    m.VFSOptions,
			Flags:      m.Options,
			Dev:        devOf(m),
			Root:       m.Root,
		})
	}
	return out, nil
}

func devOf(m *mountinfo.Info) string {
	return strconv.Itoa(m.Major) + ":" + strconv.Itoa(m.Minor)
}

// kindOf returns the kind of m, empty if CRIU rebuilds it.
func kindOf(m *mountinfo.Info, rootDev string, binds []string) (string, error) {
	if m.Mountpoint == "/" {
		return "", nil
	}
	for _, b := range binds {
		if m.Mountpoint == b || strings.HasPrefix(m.Mountpoint, b+"/") {
			return mountBind, nil
		}
	}
	switch m.FSType {
	case "proc", "sysfs", "devpts", "mqueue":
		return "", nil
	case "tmpfs":
		return mountTmpfs, nil
	case "cgroup", "cgroup2":
		return mountCgroup, nil
	}
	if devOf(m) == rootDev {
		return "", nil // a bind of a part of the root itself
	}
	if strings.HasPrefix(m.FSType, "fuse") {
		return "", fmt.Errorf("mount %q is FUSE (%s), which cannot be checkpointed: unmount it first: %w", m.Mountpoint, m.FSType, errdefs.ErrFailedPrecondition)
	}
	return mountBind, nil
}

// staged is a detached mount: it belongs to no mount namespace until attached.
type staged struct {
	name string // below workerDir
	dir  bool
	file *os.File
	// flags are those of the mount as mountinfo shows them; empty leaves them
	// as they are.
	flags string
}

// part is one more mount of a staged file system: of its directory or file at
// source, with flags of its own.
type part struct {
	name, source, flags string
}

// staging is the set of mounts that a restore offers to CRIU. Each has its flags
// already: where two mounts of a file system have the same ones, CRIU takes it
// that the second one got them from the first and does not set them.
type staging struct {
	mounts []staged
	// parts are mounted when the mounts are attached.
	parts []part
	// sources maps a mount's key to its path below the staging directory.
	sources map[string]string
}

// Close gives up the mounts that this process holds.
func (s *staging) Close() error {
	var errs []error
	for _, m := range s.mounts {
		errs = append(errs, m.file.Close())
	}
	s.mounts = nil
	return errors.Join(errs...)
}

// cloneMounts makes a staging of the container's very own mounts: the file
// systems go on living while the container's tree is dead. It sets Dir in ext.
func cloneMounts(ctx context.Context, pid int, ext []ExternalMount) (*staging, error) {
	mnt, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return nil, fmt.Errorf("open mount namespace: %w", err)
	}
	defer mnt.Close()
	s := &staging{sources: map[string]string{}}
	err = onThread(func() error {
		if err := enterMountNamespace(mnt); err != nil {
			return err
		}
		for i := range ext {
			f, dir, err := openTree(unix.AT_FDCWD, ext[i].Mountpoint, unix.OPEN_TREE_CLONE)
			if err != nil {
				return fmt.Errorf("clone mount %q: %w", ext[i].Mountpoint, err)
			}
			ext[i].Dir = dir
			s.mounts = append(s.mounts, staged{name: ext[i].Key, dir: dir, file: f})
			s.sources[ext[i].Key] = ext[i].Key
		}
		return nil
	})
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// openTree opens the mount at name and says whether it is a directory.
func openTree(dirfd int, name string, flags uint) (*os.File, bool, error) {
	fd, err := unix.OpenTree(dirfd, name, flags|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, false, os.NewSyscallError("open_tree", err)
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, false, os.NewSyscallError("fstat", err)
	}
	return f, st.Mode&unix.S_IFMT == unix.S_IFDIR, nil
}

// sourceFunc finds the path on the host of a bind or cgroup mount.
type sourceFunc func(ExternalMount) (string, error)

// freshMounts makes a staging for a restore to a node: each tmpfs is made new
// and filled from its archive beside the images, everything else is bound from
// where source finds it. A mount in live (by mountpoint) is taken as it is.
func freshMounts(ctx context.Context, images string, ext []ExternalMount, live *staging, liveKeys map[string]string, source sourceFunc) (_ *staging, retErr error) {
	s := &staging{sources: map[string]string{}}
	defer func() {
		if retErr != nil {
			s.Close()
		}
	}()
	bases := tmpfsBases(ext)
	made := map[string]bool{}
	for _, m := range ext {
		if m.Kind == mountTmpfs {
			name := "t" + strings.ReplaceAll(m.Dev, ":", "-")
			if !made[m.Dev] {
				f, err := newTmpfs(ctx, bases[m.Dev], filepath.Join(images, archiveName(m.Dev)))
				if err != nil {
					return nil, err
				}
				made[m.Dev] = true
				s.mounts = append(s.mounts, staged{name: name, dir: true, file: f})
			}
			rel := strings.TrimPrefix(m.Root, strings.TrimSuffix(bases[m.Dev].Root, "/"))
			s.parts = append(s.parts, part{name: m.Key, source: path.Join(name, rel), flags: m.Flags})
			s.sources[m.Key] = m.Key
			continue
		}
		if key, ok := liveKeys[m.Mountpoint]; ok {
			if st, ok := live.take(key); ok {
				st.name, st.flags = m.Key, m.Flags
				s.mounts = append(s.mounts, st)
				s.sources[m.Key] = m.Key
				continue
			}
		}
		src, err := source(m)
		if err != nil {
			return nil, err
		}
		f, dir, err := openTree(unix.AT_FDCWD, src, unix.OPEN_TREE_CLONE)
		if err != nil {
			return nil, fmt.Errorf("mount %q from %q: %w", m.Mountpoint, src, err)
		}
		s.mounts = append(s.mounts, staged{name: m.Key, dir: dir, file: f, flags: m.Flags})
		s.sources[m.Key] = m.Key
	}
	return s, nil
}

// take moves a mount out of the staging.
func (s *staging) take(key string) (staged, bool) {
	for i, m := range s.mounts {
		if m.name == key {
			s.mounts = append(s.mounts[:i:i], s.mounts[i+1:]...)
			return m, true
		}
	}
	return staged{}, false
}

// find returns the mount of the staging with the given key.
func (s *staging) find(key string) (staged, bool) {
	for _, m := range s.mounts {
		if m.name == key {
			return m, true
		}
	}
	return staged{}, false
}

// tmpfsBases picks, for each tmpfs instance, the mount that shows most of it.
func tmpfsBases(ext []ExternalMount) map[string]ExternalMount {
	bases := map[string]ExternalMount{}
	for _, m := range ext {
		if m.Kind != mountTmpfs {
			continue
		}
		if b, ok := bases[m.Dev]; !ok || len(m.Root) < len(b.Root) {
			bases[m.Dev] = m
		}
	}
	return bases
}

// hiddenDir is hidden from a restoring CRIU by a tmpfs of its own: it makes
// directories there that stay if it is killed.
const hiddenDir = "/tmp"

// workerDir holds, in that tmpfs, what a restoring CRIU is to mount; workerRoot
// is the container's new root.
const (
	workerDir  = hiddenDir + "/.statefork"
	workerRoot = workerDir + "/root"
)

// attach makes a private mount namespace for the calling OS thread and puts
// the staged mounts into it. The mount at oldRoot is left out, as it would be
// kept busy; program stays visible, wherever it is. The thread must not be used
// for anything else afterwards. The mounts' descriptors stay open but are used
// up.
func (s *staging) attach(oldRoot, program string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return os.NewSyscallError("make mounts private", err)
	}
	if err := unix.Unmount(oldRoot, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("detach old root: %w", err)
	}
	if err := hide(program); err != nil {
		return err
	}
	if err := os.MkdirAll(workerRoot, 0o700); err != nil {
		return fmt.Errorf("make mountpoint of root: %w", err)
	}
	for _, m := range s.mounts {
		if err := m.attach(filepath.Join(workerDir, m.name)); err != nil {
			return err
		}
	}
	for _, p := range s.parts {
		if err := p.attach(); err != nil {
			return err
		}
	}
	return nil
}

// attach makes the mount. A detached file system cannot be cloned by older
// kernels, so this comes after it was attached.
func (p part) attach() error {
	f, dir, err := openTree(unix.AT_FDCWD, filepath.Join(workerDir, p.source), unix.OPEN_TREE_CLONE)
	if err != nil {
		return fmt.Errorf("clone mount %q: %w", p.source, err)
	}
	defer f.Close()
	m := staged{name: p.name, dir: dir, file: f, flags: p.flags}
	return m.attach(filepath.Join(workerDir, p.name))
}

// attach puts the mount at target and gives it its flags.
func (m staged) attach(target string) error {
	if err := makeTarget(target, m.dir); err != nil {
		return fmt.Errorf("make mountpoint: %w", err)
	}
	if err := unix.MoveMount(int(m.file.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach mount %q: %w", m.name, os.NewSyscallError("move_mount", err))
	}
	if m.flags == "" {
		return nil
	}
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|mountFlags(m.flags), ""); err != nil {
		return fmt.Errorf("set flags %q of mount %q: %w", m.flags, m.name, os.NewSyscallError("mount", err))
	}
	return nil
}

// mountFlags reads the flags of a mount as mountinfo shows them: "ro,nosuid".
func mountFlags(shown string) uintptr {
	known := map[string]uintptr{
		"ro":          unix.MS_RDONLY,
		"nosuid":      unix.MS_NOSUID,
		"nodev":       unix.MS_NODEV,
		"noexec":      unix.MS_NOEXEC,
		"noatime":     unix.MS_NOATIME,
		"nodiratime":  unix.MS_NODIRATIME,
		"relatime":    unix.MS_RELATIME,
		"nosymfollow": unix.MS_NOSYMFOLLOW,
	}
	var flags uintptr
	for _, name := range strings.Split(shown, ",") {
		flags |= known[name]
	}
	if flags&(unix.MS_NOATIME|unix.MS_RELATIME) == 0 {
		flags |= unix.MS_STRICTATIME // shown by nothing, and not what no flag means
	}
	return flags
}

// hide lays a tmpfs over hiddenDir but keeps what is there around program: the
// program itself, and the libraries that were put beside it.
func hide(program string) error {
	var keep []staged
	for _, name := range around(program) {
		f, dir, err := openTree(unix.AT_FDCWD, name, unix.OPEN_TREE_CLONE|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("keep %q: %w", name, err)
		}
		defer f.Close()
		keep = append(keep, staged{name: name, dir: dir, file: f})
	}
	if err := unix.Mount("statefork", hiddenDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=700"); err != nil {
		return fmt.Errorf("mount staging directory: %w", err)
	}
	for _, m := range keep {
		if err := m.attach(m.name); err != nil {
			return err
		}
	}
	return nil
}

// around lists what of hiddenDir a program needs: the directories right below
// it that the program is in, by its name and by where that leads.
func around(program string) []string {
	names := []string{program}
	if real, err := filepath.EvalSymlinks(program); err == nil {
		names = append(names, real)
	}
	var out []string
	for _, name := range names {
		rel, ok := strings.CutPrefix(filepath.Clean(name), hiddenDir+"/")
		if !ok {
			continue
		}
		first, _, _ := strings.Cut(rel, "/")
		if top := filepath.Join(hiddenDir, first); !slices.Contains(out, top) {
			out = append(out, top)
		}
	}
	return out
}

func makeTarget(target string, dir bool) error {
	if dir {
		return os.Mkdir(target, 0o700)
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// criuExternalDump lists the external mounts in CRIU's form for a dump.
func criuExternalDump(ext []ExternalMount) []string {
	out := make([]string, 0, len(ext))
	for _, m := range ext {
		out = append(out, "mnt["+m.Mountpoint+"]:"+m.Key)
	}
	return out
}

// criuExternalRestore lists the staged mounts in CRIU's form for a restore.
func (s *staging) criuExternalRestore() []string {
	out := make([]string, 0, len(s.sources))
	for key, src := range s.sources {
		out = append(out, "mnt["+key+"]:"+filepath.Join(workerDir, src))
	}
	sort.Strings(out)
	return out
}
