package container

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"
)

// saveTmpfs writes the content of each tmpfs in ext into an archive in images,
// reading through the staged clones. The tree must be frozen or dead.
func saveTmpfs(ctx context.Context, images string, ext []ExternalMount, live *staging) error {
	for dev, base := range tmpfsBases(ext) {
		m, ok := live.find(base.Key)
		if !ok {
			return fmt.Errorf("tmpfs %q was not staged", base.Mountpoint)
		}
		if !m.dir {
			continue // one file of a tmpfs whose directory is not mounted
		}
		if err := archiveDir(ctx, procPath(m.file), filepath.Join(images, archiveName(dev))); err != nil {
			return fmt.Errorf("save tmpfs %q: %w", base.Mountpoint, err)
		}
	}
	return nil
}

// procPath names a directory by our descriptor of it: a walk below it cannot
// be led elsewhere by what the container put on the way.
func procPath(f *os.File) string {
	return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) + "/"
}

// archiveDir writes dir as a tar archive to name, or nothing if it is empty.
func archiveDir(ctx context.Context, dir, name string) (retErr error) {
	empty, err := isEmpty(dir)
	if err != nil || empty {
		return err
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		retErr = errors.Join(retErr, f.Close())
	}()
	w := bufio.NewWriterSize(f, 1<<18)
	if err := archive.WriteDiff(ctx, w, "", dir); err != nil {
		return err
	}
	return w.Flush()
}

func isEmpty(dir string) (bool, error) {
	d, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer d.Close()
	_, err = d.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// rootMode is the owner and mode of a tmpfs' root directory.
type rootMode struct {
	Mode uint32 `json:"mode"`
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// describeTmpfs records the root directories of the tmpfs instances in ext.
func describeTmpfs(ext []ExternalMount, live *staging) error {
	for i := range ext {
		m, ok := live.find(ext[i].Key)
		if ext[i].Kind != mountTmpfs || !ok {
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(m.file.Fd()), &st); err != nil {
			return fmt.Errorf("stat tmpfs %q: %w", ext[i].Mountpoint, err)
		}
		ext[i].Top = &rootMode{Mode: st.Mode & 0o7777, UID: int(st.Uid), GID: int(st.Gid)}
	}
	return nil
}

// newTmpfs makes a tmpfs like base, fills it from the archive if that exists,
// and returns it as a detached mount.
func newTmpfs(ctx context.Context, base ExternalMount, archivePath string) (_ *os.File, retErr error) {
	f, err := mountTmpfsDetached(base.Source, base.Options)
	if err != nil {
		return nil, fmt.Errorf("make tmpfs for %q: %w", base.Mountpoint, err)
	}
	defer func() {
		if retErr != nil {
			f.Close()
		}
	}()
	if err := extract(ctx, f, archivePath); err != nil {
		return nil, fmt.Errorf("fill tmpfs for %q: %w", base.Mountpoint, err)
	}
	if base.Top != nil && base.Dir {
		top := procPath(f)
		if err := os.Chown(top, base.Top.UID, base.Top.GID); err != nil {
			return nil, fmt.Errorf("make tmpfs for %q: %w", base.Mountpoint, err)
		}
		if err := unix.Chmod(top, base.Top.Mode); err != nil {
			return nil, fmt.Errorf("make tmpfs for %q: %w", base.Mountpoint, err)
		}
	}
	if slices.Contains(strings.Split(base.Options, ","), "ro") {
		if err := makeReadonly(f); err != nil {
			return nil, fmt.Errorf("make tmpfs for %q read-only: %w", base.Mountpoint, err)
		}
	}
	return f, nil
}

// makeReadonly makes a whole file system read-only, whichever mount shows it.
func makeReadonly(f *os.File) error {
	fs, err := unix.Fspick(int(f.Fd()), "", unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH)
	if err != nil {
		return os.NewSyscallError("fspick", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return os.NewSyscallError("fsconfig", err)
	}
	return os.NewSyscallError("fsconfig", unix.FsconfigReconfigure(fs))
}

// mountTmpfsDetached makes a tmpfs with the options that mountinfo showed for
// another one ("rw,size=65536k,mode=755,inode64").
func mountTmpfsDetached(source, options string) (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if source != "" {
		if err := unix.FsconfigSetString(fs, "source", source); err != nil {
			return nil, fmt.Errorf("source %q: %w", source, os.NewSyscallError("fsconfig", err))
		}
	}
	for _, o := range strings.Split(options, ",") {
		k, v, hasValue := strings.Cut(o, "=")
		switch {
		case k == "" || k == "rw" || k == "ro" || k == "seclabel":
			// set once it is filled, and of the host's LSM
			continue
		case hasValue:
			err = unix.FsconfigSetString(fs, k, v)
		default:
			err = unix.FsconfigSetFlag(fs, k)
		}
		if err != nil {
			return nil, fmt.Errorf("option %q: %w", o, os.NewSyscallError("fsconfig", err))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

func extract(ctx context.Context, dir *os.File, archivePath string) error {
	f, err := os.Open(archivePath)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil // it was empty
		}
		return err
	}
	defer f.Close()
	_, err = archive.Apply(ctx, procPath(dir), bufio.NewReaderSize(f, 1<<18))
	return err
}
