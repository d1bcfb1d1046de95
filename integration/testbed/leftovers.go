package testbed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Leftovers says what is there that should not be.
type Leftovers struct {
	Of    string
	Items []Item
}

func (l *Leftovers) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "left behind by %s:", l.Of)
	for _, i := range l.Items {
		fmt.Fprintf(&b, "\n  %s", i)
	}
	return b.String()
}

// leftovers lists what is new on the machine since the testbed's start. What
// nothing ties to the testbed counts only if the machine was its alone.
func (tb *Testbed) leftovers() ([]Item, error) {
	now, err := TakeInventory(tb.marks()...)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(now.New(tb.before), func(i Item) bool {
		if i.Kind == "file" && strings.HasPrefix(i.Name, tb.Dir) {
			return true
		}
		return !i.Ours && !tb.Alone
	}), nil
}

// settle waits until nothing is left: mounts, cgroups and namespaces go after
// their last user, and that is the kernel's time.
func (tb *Testbed) settle(ctx context.Context) ([]Item, error) {
	var left []Item
	err := Poll(ctx, tb.Settle, func(context.Context) error {
		var err error
		if left, err = tb.leftovers(); err != nil {
			return Permanent(err)
		}
		if len(left) > 0 {
			return &Leftovers{Of: "testbed " + tb.Name, Items: left}
		}
		return nil
	})
	if len(left) > 0 {
		return left, nil // the caller reports them
	}
	return nil, err
}

// sweep removes leftovers, so that one failure is not also the next test's.
func (tb *Testbed) sweep(left []Item) error {
	var errs []error
	for _, i := range left {
		if !i.Ours {
			continue
		}
		var err error
		switch i.Kind {
		case "process":
			var pid int
			if _, err = fmt.Sscanf(i.Name, "%d", &pid); err == nil {
				err = syscall.Kill(pid, syscall.SIGKILL)
			}
		case "mount":
			mountpoint, _, _ := strings.Cut(i.Name, " of ")
			err = unix.Unmount(mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EINVAL) {
			errs = append(errs, fmt.Errorf("sweep %s: %w", i, err))
		}
	}
	errs = append(errs, tb.sweepCgroups(left))
	return errors.Join(errs...)
}

// sweepCgroups removes empty cgroups, the deepest first, when the processes in
// them have gone.
func (tb *Testbed) sweepCgroups(left []Item) error {
	ctx, cancel := context.WithTimeout(context.Background(), tb.Settle)
	defer cancel()
	var errs []error
	for _, i := range slices.Backward(left) {
		if i.Kind != "cgroup" || !i.Ours {
			continue
		}
		err := Poll(ctx, tb.Settle, func(context.Context) error {
			if err := syscall.Rmdir(i.Name); err != nil && !errors.Is(err, syscall.ENOENT) {
				return err
			}
			return nil
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", i, err))
		}
	}
	return errors.Join(errs...)
}
