package container

import (
	"testing"

	"github.com/containerd/errdefs"
)

// TestStatusPairs tries each pair of statuses.
func TestStatusPairs(t *testing.T) {
	all := []Status{StatusCreated, StatusRunning, StatusPausing, StatusPaused, StatusStopped}
	allowed := map[[2]Status]bool{
		{StatusCreated, StatusRunning}: true,
		{StatusCreated, StatusStopped}: true,
		{StatusRunning, StatusPausing}: true,
		{StatusRunning, StatusStopped}: true,
		{StatusPausing, StatusPaused}:  true,
		{StatusPausing, StatusRunning}: true,
		{StatusPausing, StatusStopped}: true,
		{StatusPaused, StatusRunning}:  true,
		{StatusPaused, StatusStopped}:  true,
	}
	for _, from := range all {
		if _, ok := transitions[from]; !ok {
			t.Errorf("%s is not in the table", from)
		}
		for _, to := range all {
			err := from.check(to, "move")
			if allowed[[2]Status{from, to}] {
				if err != nil {
					t.Errorf("%s to %s: %v", from, to, err)
				}
				continue
			}
			if !errdefs.IsFailedPrecondition(err) {
				t.Errorf("%s to %s: got %v, want a failed precondition", from, to, err)
			}
		}
	}
	if len(transitions) != len(all) {
		t.Errorf("the table has %d statuses, this test %d", len(transitions), len(all))
	}
}
