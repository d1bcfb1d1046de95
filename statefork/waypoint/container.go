package waypoint

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// statusNone stands for a container without a task.
const statusNone = "none"

// Container is one line of a list of containers.
type Container struct {
	ID string `json:"id"`
	// Name is nerdctl's name of the container, or empty.
	Name    string `json:"name,omitempty"`
	Image   string `json:"image,omitempty"`
	Runtime string `json:"runtime"`
	// Status of the task as containerd has it, or "none".
	Status string `json:"status"`
	PID    uint32 `json:"pid,omitempty"`
	// Head is the id of the node that the container descends from, or empty.
	Head  string `json:"head,omitempty"`
	Nodes int    `json:"nodes"`
	// ForkedFrom is "<container>@<node>" for a fork.
	ForkedFrom string    `json:"forked_from,omitempty"`
	Created    time.Time `json:"created"`
}

type taskStatus struct {
	Status string
	PID    uint32
}

// SplitRef parts "C@NODE" at its last '@'; node is empty for a plain "C".
func SplitRef(ref string) (container, node string) {
	if i := strings.LastIndexByte(ref, '@'); i >= 0 {
		return ref[:i], ref[i+1:]
	}
	return ref, ""
}

// find returns the container that ref means: its id, nerdctl's name, or the
// first characters of its id.
func (c *Client) find(ctx context.Context, ref string) (containers.Container, error) {
	const hint = "list them with \"statefork ls\", or give the namespace"
	if ref == "" {
		return containers.Container{}, fmt.Errorf("container name is empty: %w", errdefs.ErrInvalidArgument)
	}
	all, err := c.ctrd.ContainerService().List(ctx)
	if err != nil {
		return containers.Container{}, fmt.Errorf("list containers: %w", err)
	}
	found := match(all, ref)
	switch len(found) {
	case 0:
		return containers.Container{}, statefork.WithHint(
			fmt.Errorf("container %q in namespace %q: %w", ref, c.opts.Namespace, errdefs.ErrNotFound), hint)
	case 1:
		return found[0], nil
	}
	return containers.Container{}, statefork.WithHint(
		fmt.Errorf("container %q may be %s: %w", ref, joinIDs(found), errdefs.ErrInvalidArgument), "give more of its id")
}

// match picks by id; if there is none, by name; if there is none, by prefix.
func match(all []containers.Container, ref string) []containers.Container {
	for _, is := range []func(containers.Container) bool{
		func(r containers.Container) bool { return r.ID == ref },
		func(r containers.Container) bool { return r.Labels[nerdctlName] == ref },
		func(r containers.Container) bool { return strings.HasPrefix(r.ID, ref) },
	} {
		found := slices.DeleteFunc(slices.Clone(all), func(r containers.Container) bool { return !is(r) })
		if len(found) > 0 {
			return found
		}
	}
	return nil
}

func joinIDs(recs []containers.Container) string {
	var ids []string
	for _, r := range recs {
		ids = append(ids, r.ID)
	}
	return strings.Join(ids, " or ")
}

// status of one container's task.
func (c *Client) status(ctx context.Context, id string) (taskStatus, error) {
	resp, err := c.ctrd.TaskService().Get(ctx, &tasks.GetRequest{ContainerID: id})
	if err = errgrpc.ToNative(err); errdefs.IsNotFound(err) {
		return taskStatus{Status: statusNone}, nil
	}
	if err != nil {
		return taskStatus{}, fmt.Errorf("get task %q: %w", id, err)
	}
	return statusOf(resp.Process), nil
}

// statuses of all tasks, by container.
func (c *Client) statuses(ctx context.Context) (map[string]taskStatus, error) {
	resp, err := c.ctrd.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", errgrpc.ToNative(err))
	}
	all := make(map[string]taskStatus, len(resp.Tasks))
	for _, p := range resp.Tasks {
		all[p.ID] = statusOf(p)
	}
	return all, nil
}

func statusOf(p *task.Process) taskStatus {
	return taskStatus{Status: strings.ToLower(p.Status.String()), PID: p.Pid}
}

// running says whether the task has processes that a shim could checkpoint.
func (s taskStatus) running() bool {
	switch s.Status {
	case "running", "paused", "pausing":
		return true
	}
	return false
}

func statusIn(all map[string]taskStatus, id string) taskStatus {
	if s, ok := all[id]; ok {
		return s
	}
	return taskStatus{Status: statusNone}
}

// List returns the containers of the statefork runtime, and those of another
// runtime name that have nodes, sorted by their age.
func (c *Client) List(ctx context.Context) ([]Container, error) {
	ctx = c.scope(ctx)
	recs, err := c.ctrd.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	status, err := c.statuses(ctx)
	if err != nil {
		return nil, err
	}
	found, err := c.survey(ctx, recs)
	if err != nil {
		return nil, err
	}
	var list []Container
	for _, r := range recs {
		n := found.nodes[r.ID]
		if r.Runtime.Name == api.RuntimeName || n > 0 || r.Labels[LabelForkedFrom] != "" {
			list = append(list, describe(r, statusIn(status, r.ID), found.heads[snapshotOf(r)], n))
		}
	}
	slices.SortFunc(list, func(a, b Container) int {
		if d := a.Created.Compare(b.Created); d != 0 {
			return d
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, nil
}

func describe(r containers.Container, s taskStatus, head string, nodes int) Container {
	return Container{
		ID:         r.ID,
		Name:       r.Labels[nerdctlName],
		Image:      r.Image,
		Runtime:    r.Runtime.Name,
		Status:     s.Status,
		PID:        s.PID,
		Head:       head,
		Nodes:      nodes,
		ForkedFrom: r.Labels[LabelForkedFrom],
		Created:    r.CreatedAt,
	}
}
