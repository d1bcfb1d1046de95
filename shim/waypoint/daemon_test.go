package waypoint

import (
	"context"
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
)

func TestPersist(t *testing.T) {
	tries := 0
	err := persist(context.Background(), func() error {
		if tries++; tries < 3 {
			return errdefs.ErrUnavailable
		}
		return nil
	})
	if err != nil || tries != 3 {
		t.Errorf("got %v after %d tries, want success at the third", err, tries)
	}
	tries = 0
	err = persist(context.Background(), func() error { tries++; return errdefs.ErrNotFound })
	if !errdefs.IsNotFound(err) || tries != 1 {
		t.Errorf("got %v after %d tries, want an answer to be taken as such", err, tries)
	}
	ctx, cancel := context.WithCancel(context.Background())
	err = persist(ctx, func() error { cancel(); return errdefs.ErrUnavailable })
	if !errors.Is(err, context.Canceled) || !errdefs.IsUnavailable(err) {
		t.Errorf("got %v, want both why it tried and why it stopped", err)
	}
}

func TestRandomHex(t *testing.T) {
	id, err := randomHex(6)
	if err != nil || !api.IsNodeID(id) {
		t.Errorf("got %q, %v", id, err)
	}
	if api.ValidateName(id) == nil {
		t.Errorf("name %q would be taken for an id", id)
	}
}
