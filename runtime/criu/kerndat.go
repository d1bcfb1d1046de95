package criu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// runDir is where CRIU keeps the cache; it is compiled in.
	runDir = "/run"
	// kerndatFile is CRIU's cache of what the kernel can do. Loading it takes
	// the place of probing, which takes some 30 ms of each dump and restore.
	kerndatFile = "criu.kdat"
	// stampFile says what the cache was made for, below runDir.
	stampFile = "statefork/kerndat.json"
)

// stamp tells for which kernel a cache is good. The build of CRIU is named by
// the cache itself: another build removes it.
type stamp struct {
	BootID string `json:"boot_id"`
	Kernel string `json:"kernel"`
}

// EnsureKerndat sees to it that CRIU finds its cache of the kernel's features
// in /run. CRIU saves it only where /run is a tmpfs, but loads it anywhere: on
// other hosts the cache is made in a tmpfs of its own and copied. It is cheap
// once the cache is there. CRIU works without, so an error is worth a warning
// and no more.
func (b *Binary) EnsureKerndat(ctx context.Context) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(runDir, &fs); err != nil {
		return fmt.Errorf("cache kernel features: %w", os.NewSyscallError("statfs", err))
	}
	if fs.Type == unix.TMPFS_MAGIC {
		return nil // CRIU does it, and the cache ends with the boot
	}
	if err := b.ensureKerndat(ctx, runDir); err != nil {
		return fmt.Errorf("cache kernel features: %w", err)
	}
	return nil
}

// ensureKerndat puts the cache into dir.
func (b *Binary) ensureKerndat(ctx context.Context, dir string) error {
	want, err := newStamp()
	if err != nil {
		return err
	}
	if want.fits(dir) {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(stampFile)), 0o700); err != nil {
		return err
	}
	unlock, err := lock(filepath.Join(dir, stampFile+".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if want.fits(dir) {
		return nil // another process was faster
	}
	// While no stamp is there, a stamp that fits cannot stand beside a cache
	// that does not.
	if err := os.Remove(filepath.Join(dir, stampFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	data, err := b.makeKerndat(ctx)
	if err != nil {
		return err
	}
	if err := replaceFile(filepath.Join(dir, kerndatFile), data); err != nil {
		return err
	}
	data, err = json.Marshal(want)
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(dir, stampFile), append(data, '\n'))
}

// newStamp returns the stamp of a cache made now.
func newStamp() (*stamp, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return nil, os.NewSyscallError("uname", err)
	}
	return &stamp{
		BootID: strings.TrimSpace(string(boot)),
		Kernel: unix.ByteSliceToString(uts.Release[:]),
	}, nil
}

// fits reports whether dir has a cache with this stamp.
func (s *stamp) fits(dir string) bool {
	data, err := os.ReadFile(filepath.Join(dir, stampFile))
	if err != nil {
		return false
	}
	var have stamp
	if err := json.Unmarshal(data, &have); err != nil {
		return false
	}
	if have != *s {
		return false
	}
	_, err = os.Stat(filepath.Join(dir, kerndatFile))
	return err == nil
}

// makeKerndat has CRIU make its cache in a mount namespace whose /run is a
// tmpfs, and returns it. Namespace and tmpfs go with the thread.
func (b *Binary) makeKerndat(ctx context.Context) ([]byte, error) {
	var out bytes.Buffer
	cmd := b.command(ctx, "check")
	cmd.Stdout, cmd.Stderr = &out, &out
	var data []byte
	done := make(chan error, 1)
	onOwnThread(func() {
		var err error
		data, err = kerndatOf(cmd)
		done <- err
	})
	if err := <-done; err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		summary, _ := summarize(&out)
		if summary == "" {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %s", err, summary)
	}
	return data, nil
}

// kerndatOf runs a check on a thread of its own. A check that finds fault with
// the kernel has still probed it.
func kerndatOf(check *exec.Cmd) ([]byte, error) {
	if err := privateRun(); err != nil {
		return nil, err
	}
	runErr := check.Run()
	var exit *exec.ExitError
	if runErr != nil && !errors.As(runErr, &exit) {
		return nil, runErr
	}
	// The thread sees the tmpfs; an open here is through its namespace.
	f, err := os.Open(filepath.Join(runDir, kerndatFile))
	if err != nil {
		return nil, errors.Join(runErr, err)
	}
	defer f.Close()
	return io.ReadAll(f)
}

// privateRun gives the calling thread a mount namespace with an empty tmpfs on
// /run.
func privateRun() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	if err := unix.Mount("tmpfs", runDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return os.NewSyscallError("mount", err)
	}
	return nil
}

// lock takes an exclusive lock that other processes see too.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if err != unix.EINTR {
			f.Close()
			return nil, os.NewSyscallError("flock", err)
		}
	}
}

// replaceFile writes a file that is there as a whole or not at all.
func replaceFile(path string, data []byte) (retErr error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if retErr != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
