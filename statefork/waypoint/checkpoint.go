package waypoint

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// Timings are the parts of an operation; a part that did not happen is zero.
type Timings struct {
	Total time.Duration `json:"total_ns"`
	// Frozen is how long the container did not run.
	Frozen   time.Duration `json:"frozen_ns"`
	Dump     time.Duration `json:"dump_ns"`
	Snapshot time.Duration `json:"snapshot_ns"`
	Restore  time.Duration `json:"restore_ns"`
}

// Exec is an exec'd process of a container.
type Exec struct {
	ID  string `json:"id"`
	PID uint32 `json:"pid"`
}

// Result of a checkpoint or a restore.
type Result struct {
	Container string         `json:"container"`
	Node      statefork.Node `json:"node"`
	Timings   Timings        `json:"timings"`
	// External is what the node does not contain.
	External []statefork.External `json:"external,omitempty"`
	// EndedExecs were running in the state that a restore left.
	EndedExecs []Exec `json:"ended_execs,omitempty"`
	// Generation counts the restores of the task.
	Generation uint64 `json:"generation"`
	// Started says that the container did not run and has a new task.
	Started bool `json:"started,omitempty"`
}

// Checkpoint makes a node of a running container, which goes on from there.
// The name is optional and must be new among the container's nodes.
func (c *Client) Checkpoint(ctx context.Context, ref, name string, labels map[string]string) (*Result, error) {
	if name != "" {
		if err := api.ValidateName(name); err != nil {
			return nil, fmt.Errorf("check node: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	ctx = c.scope(ctx)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	return c.checkpoint(ctx, rec, name, labels)
}

func (c *Client) checkpoint(ctx context.Context, rec containers.Container, name string, labels map[string]string) (*Result, error) {
	shim, err := c.dial(ctx, rec)
	if err != nil {
		return nil, err
	}
	defer shim.Close()
	resp, err := shim.Checkpoint(ctx, name, labels)
	if err != nil {
		return nil, explain(err, rec)
	}
	return &Result{
		Container: rec.ID,
		Node:      toNode(resp.Node),
		Timings:   toTimings(resp.Timings),
		External:  toExternal(resp.External),
	}, nil
}

// Restore moves a running container in place to one of its nodes; a container
// that does not run gets a new task at the node. A fork can also go to the node
// that it was started at, and to those above.
func (c *Client) Restore(ctx context.Context, ref, nodeRef string) (*Result, error) {
	ctx = c.scope(ctx)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	sn, err := c.snapshotter(rec)
	if err != nil {
		return nil, err
	}
	n, info, err := c.reach(ctx, sn, rec, nodeRef)
	if err != nil {
		return nil, err
	}
	status, err := c.status(ctx, rec.ID)
	if err != nil {
		return nil, err
	}
	if !status.running() {
		return c.startAt(ctx, rec, n, info)
	}
	shim, err := c.dial(ctx, rec)
	if err != nil {
		return nil, err
	}
	defer shim.Close()
	resp, err := shim.Restore(ctx, n.ID)
	if err != nil {
		return nil, explain(err, rec)
	}
	res := &Result{
		Container:  rec.ID,
		Node:       toNode(resp.Node),
		Timings:    toTimings(resp.Timings),
		External:   toExternal(resp.External),
		Generation: resp.Generation,
	}
	for _, e := range resp.EndedExecs {
		res.EndedExecs = append(res.EndedExecs, Exec{ID: e.ExecId, PID: e.Pid})
	}
	return res, nil
}

func toTimings(t *api.Timings) Timings {
	us := func(n uint64) time.Duration { return time.Duration(n) * time.Microsecond }
	return Timings{
		Total:    us(t.GetTotal()),
		Frozen:   us(t.GetFrozen()),
		Dump:     us(t.GetDump()),
		Snapshot: us(t.GetSnapshot()),
		Restore:  us(t.GetRestore()),
	}
}

func toExternal(ext []*api.External) []statefork.External {
	var list []statefork.External
	for _, e := range ext {
		list = append(list, statefork.External{Kind: e.Kind, Name: e.Name})
	}
	return list
}
