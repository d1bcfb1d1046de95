package waypoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// journalFile lies in the task's bundle while an operation is under way.
const journalFile = "statefork.json"

// journal is the record of the operation under way: what a person or a
// recovery needs to know if the shim dies.
type journal struct {
	// Phase is one of runtime/container's phases; empty if nothing is under way.
	Phase string `json:"phase"`
	// Op is "checkpoint" or "restore".
	Op string `json:"op,omitempty"`
	// Node is the node that is being made or restored.
	Node string `json:"node,omitempty"`
	// Key is the active snapshot's.
	Key string `json:"key,omitempty"`
	// Images is the directory of the process images.
	Images string `json:"images,omitempty"`

	bundle string
}

// enter writes the journal with the next phase.
func (j *journal) enter(phase string) error {
	j.Phase = phase
	b, err := json.Marshal(j)
	if err != nil {
		return err
	}
	name := filepath.Join(j.bundle, journalFile)
	if err := os.WriteFile(name+".tmp", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	if err := os.Rename(name+".tmp", name); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

// clear ends the operation.
func (j *journal) clear() error {
	err := os.Remove(filepath.Join(j.bundle, journalFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("clear journal: %w", err)
	}
	return nil
}

// readJournal reads the journal of the operation under way, if any.
func readJournal(bundle string) (*journal, error) {
	j := &journal{bundle: bundle}
	b, err := os.ReadFile(filepath.Join(bundle, journalFile))
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return j, nil
		}
		return nil, fmt.Errorf("read journal: %w", err)
	}
	if err := json.Unmarshal(b, j); err != nil {
		return nil, fmt.Errorf("parse journal of %q: %w", bundle, err)
	}
	return j, nil
}
