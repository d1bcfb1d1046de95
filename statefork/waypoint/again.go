package waypoint

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
)

// A shim that was killed may have left calls behind that containerd is still
// carrying out: the Commit of the active snapshot, its Prepare. What was read
// before they are done does not hold any more. Nobody else sends such calls for
// a container without a task, so looking again soon finds it standing still.

const (
	// overtakenPatience bounds how long it may take to stand still.
	overtakenPatience = 5 * time.Second
	overtakenAgain    = 50 * time.Millisecond
)

// overtakenError is an error over something that is not as it was read just
// before.
type overtakenError struct{ error }

func (e overtakenError) Unwrap() error { return e.error }

// overtaken marks err if it is of the kind that another's call makes.
func overtaken(err error) error {
	if errdefs.IsAlreadyExists(err) || errdefs.IsNotFound(err) {
		return overtakenError{err}
	}
	return err
}

// lookAgain calls f, which must take back what it did if it fails, until it is
// not overtaken any more.
func lookAgain(ctx context.Context, f func() error) error {
	deadline := time.Now().Add(overtakenPatience)
	tick := time.NewTicker(overtakenAgain)
	defer tick.Stop()
	for {
		err := f()
		var o overtakenError
		if !errors.As(err, &o) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-tick.C:
		}
	}
}

// forgotten says that containerd lists the active snapshot of a container, as
// taken says, and that its snapshotter has none: the shim was killed in a Commit,
// and when its connection was gone, containerd took the commit back that the
// snapshotter had carried out. What was in it cannot be reached any more.
func forgotten(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container, taken error) bool {
	if !errdefs.IsAlreadyExists(taken) {
		return false
	}
	_, err := settled(ctx, sn, rec)
	return errdefs.IsNotFound(err)
}

// settled stats the active snapshot of a container by writing what is true of
// it anyway: containerd's writers wait for each other, so a Commit that is
// already at work on it is over then. Its layer may not be written under that.
func settled(ctx context.Context, sn snapshots.Snapshotter, rec containers.Container) (snapshots.Info, error) {
	info, err := sn.Update(ctx, snapshots.Info{
		Name:   rec.SnapshotKey,
		Labels: map[string]string{api.LabelGCContainer: rec.ID},
	}, "labels."+api.LabelGCContainer)
	if err != nil {
		return info, fmt.Errorf("update active snapshot of %q: %w", rec.ID, err)
	}
	return info, nil
}
