package waypoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sync/errgroup"

	"github.com/statefork/statefork/statefork"
)

const (
	// maxParallel is how many siblings are restored at once: CRIU is bound by
	// the processor, and more only make each of them slower.
	maxParallel = 2
	maxForks    = 1000
	maxIDLength = 76
	// suffixBytes make a fork's default name differ from all others.
	suffixBytes  = 3
	nerdctlBytes = 32
)

// ForkOptions say how the siblings shall be.
type ForkOptions struct {
	// Count of siblings, by default one.
	Count int
	// Name of the fork; with more than one, "-1", "-2", … are added to it. By
	// default it is the source's name, "-fork-" and random digits.
	Name string
	// LogURI is where the output goes; by default where nerdctl's labels say,
	// else nowhere.
	LogURI string
}

// Sibling is one of the containers that a fork was to make.
type Sibling struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	PID  uint32 `json:"pid,omitempty"`
	// Error is empty for a sibling that runs.
	Error string `json:"error,omitempty"`
	// Err is Error with its class.
	Err error `json:"-"`
}

// ForkResult is what came of a fork.
type ForkResult struct {
	Container string         `json:"container"`
	Node      statefork.Node `json:"node"`
	// Checkpoint is set if the node was made for this fork.
	Checkpoint *Timings  `json:"checkpoint,omitempty"`
	Siblings   []Sibling `json:"siblings"`
	// External is what the siblings share with their source and each other.
	External []statefork.External `json:"external,omitempty"`
	// Dropped is what the source has and its siblings have not.
	Dropped []statefork.External `json:"dropped,omitempty"`
}

// Err joins the errors of the siblings that did not start.
func (r *ForkResult) Err() error {
	var errs []error
	for _, s := range r.Siblings {
		errs = append(errs, s.Err)
	}
	return errors.Join(errs...)
}

// Fork starts new containers at a node of a container: "C@NODE", or "C" for a
// node that is made now. The source is not touched. Each sibling runs or leaves
// nothing; the result tells which. An error means that none was tried.
func (c *Client) Fork(ctx context.Context, ref string, o ForkOptions) (*ForkResult, error) {
	ctx = c.scope(ctx)
	ref, nodeRef := SplitRef(ref)
	rec, err := c.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	sn, err := c.snapshotter(rec)
	if err != nil {
		return nil, err
	}
	ids, err := c.identities(ctx, rec, o)
	if err != nil {
		return nil, err
	}
	f := &forker{c: c, src: rec, sn: sn, logURI: o.LogURI}
	if err := f.open(); err != nil {
		return nil, err
	}
	// A fork that cannot be written must not leave a checkpoint behind.
	trial, err := rewrite(rec, f.store, f.ports, ids[0])
	if err != nil {
		return nil, err
	}
	res := &ForkResult{Container: rec.ID, External: externalOf(rec), Dropped: trial.Dropped}
	if nodeRef == "" {
		cp, err := c.checkpoint(ctx, rec, "", nil)
		if err != nil {
			return nil, err
		}
		res.Checkpoint, nodeRef = &cp.Timings, cp.Node.ID
		res.External = merge(res.External, cp.External)
	}
	var info snapshots.Info
	if res.Node, info, err = c.reach(ctx, sn, rec, nodeRef); err != nil {
		return nil, err
	}
	if f.images, err = imagesOf(info); err != nil {
		return nil, err
	}
	leased, release, err := c.withLease(ctx, rec.Snapshotter, info.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	res.Siblings = f.startAll(leased, info, res.Node, ids)
	return res, nil
}

// merge adds what is not in the list yet.
func merge(list, more []statefork.External) []statefork.External {
	known := map[string]bool{}
	for _, e := range list {
		known[e.Kind+"\x00"+e.Name] = true
	}
	for _, e := range more {
		if !known[e.Kind+"\x00"+e.Name] {
			list = append(list, e)
		}
	}
	return list
}

// identities chooses and checks ids and names before anything is made.
func (c *Client) identities(ctx context.Context, src containers.Container, o ForkOptions) ([]identity, error) {
	if o.Count == 0 {
		o.Count = 1
	}
	if o.Count < 0 || o.Count > maxForks {
		return nil, fmt.Errorf("count %d of forks is not in 1 to %d: %w", o.Count, maxForks, errdefs.ErrInvalidArgument)
	}
	all, err := c.ctrd.ContainerService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	taken := map[string]bool{}
	for _, r := range all {
		taken[r.ID], taken[r.Labels[nerdctlName]] = true, true
	}
	ids := make([]identity, o.Count)
	for i := range ids {
		if ids[i], err = newIdentity(src, o, i); err != nil {
			return nil, err
		}
		name := ids[i].ID
		if ids[i].Name != "" {
			name = ids[i].Name
		}
		if taken[name] || taken[ids[i].ID] {
			return nil, statefork.WithHint(
				fmt.Errorf("container %q: %w", name, errdefs.ErrAlreadyExists), "choose another name")
		}
	}
	return ids, nil
}

// newIdentity names the i-th sibling. nerdctl's containers have random ids and
// a name; for others the id is the name.
func newIdentity(src containers.Container, o ForkOptions, i int) (identity, error) {
	ofNerdctl := src.Labels[nerdctlStateDir] != ""
	name := o.Name
	switch {
	case name == "":
		base := src.ID
		if ofNerdctl {
			base = src.Labels[nerdctlName]
		}
		const mark = "-fork-"
		if room := maxIDLength - len(mark) - 2*suffixBytes; len(base) > room {
			base = strings.TrimRight(base[:room], "._-")
		}
		name = base + mark + randomHex(suffixBytes)
	case o.Count > 1:
		name += "-" + strconv.Itoa(i+1)
	}
	if ofNerdctl {
		if !nerdctlNameRE.MatchString(name) {
			return identity{}, fmt.Errorf("name %q: nerdctl wants two or more of A-Z a-z 0-9 _ . - and a letter or digit first: %w", name, errdefs.ErrInvalidArgument)
		}
		return identity{ID: randomHex(nerdctlBytes), Name: name}, nil
	}
	if err := identifiers.Validate(name); err != nil {
		return identity{}, fmt.Errorf("check name: %w", err)
	}
	return identity{ID: name}, nil
}

// forker starts siblings of one source at one node.
type forker struct {
	c      *Client
	src    containers.Container
	sn     snapshots.Snapshotter
	logURI string
	images string
	// store is nerdctl's, nil for a container that is not nerdctl's.
	store *store
	ports []portMapping
}

func (f *forker) open() error {
	dir := f.src.Labels[nerdctlStateDir]
	if dir == "" {
		return nil
	}
	st, err := storeOf(dir, f.c.opts.Namespace, f.src.ID)
	if err != nil {
		return err
	}
	f.store = &st
	f.ports, err = st.ports(f.src.ID)
	return err
}

func (f *forker) startAll(ctx context.Context, info snapshots.Info, n statefork.Node, ids []identity) []Sibling {
	siblings := make([]Sibling, len(ids))
	var g errgroup.Group
	g.SetLimit(maxParallel)
	for i, id := range ids {
		id.From = n.Container + "@" + n.ID
		g.Go(func() error {
			s := Sibling{ID: id.ID, Name: id.Name}
			if s.PID, s.Err = f.start(ctx, info, id); s.Err != nil {
				s.Err = fmt.Errorf("fork container %q: %w", id.ID, s.Err)
				s.Error = s.Err.Error()
			}
			siblings[i] = s
			return nil
		})
	}
	_ = g.Wait() // each error is its sibling's
	return siblings
}

// start makes one sibling; on failure it takes back all that it has made.
func (f *forker) start(ctx context.Context, info snapshots.Info, id identity) (pid uint32, retErr error) {
	var made undoStack
	defer func() { retErr = made.unwind(ctx, retErr) }()
	rec, err := rewrite(f.src, f.store, f.ports, id)
	if err != nil {
		return 0, err
	}
	if f.store != nil {
		if err := f.store.add(f.src.ID, id, rec.Hostname); err != nil {
			return 0, err
		}
		made.push(func(context.Context) error { return f.store.remove(id) })
	}
	if err := prepareAt(ctx, f.sn, id.ID, info, id.ID); err != nil {
		return 0, err
	}
	made.push(func(ctx context.Context) error { return f.sn.Remove(ctx, id.ID) })
	service := f.c.ctrd.ContainerService()
	if _, err := service.Create(ctx, rec.Container); err != nil {
		return 0, fmt.Errorf("create container %q: %w", id.ID, err)
	}
	made.push(func(ctx context.Context) error { return service.Delete(ctx, id.ID) })
	cont, err := f.c.ctrd.LoadContainer(ctx, id.ID)
	if err != nil {
		return 0, fmt.Errorf("load container %q: %w", id.ID, err)
	}
	if err := f.c.startTask(ctx, cont, rec.Container, f.images, f.logURI); err != nil {
		return 0, err
	}
	if len(rec.Late) > 0 {
		if _, err := cont.SetLabels(ctx, rec.Late); err != nil {
			log.G(ctx).WithError(err).WithField("container", id.ID).Warn("restart policy is not set")
		}
	}
	s, err := f.c.status(ctx, id.ID)
	if err != nil {
		// It runs: that its pid cannot be told now is no reason to end it.
		log.G(ctx).WithError(err).WithField("container", id.ID).Warn("status of fork is unknown")
	}
	return s.PID, nil
}

// undoStack takes back the steps of an operation, the last one first.
type undoStack []func(context.Context) error

func (u *undoStack) push(f func(context.Context) error) { *u = append(*u, f) }

// unwind runs the stack if there is an error, and returns that with those of
// the steps; what is gone already needs no undoing.
func (u undoStack) unwind(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	ctx, cancel := undo(ctx)
	defer cancel()
	for _, f := range slices.Backward(u) {
		if uerr := f(ctx); uerr != nil && !errdefs.IsNotFound(uerr) {
			err = errors.Join(err, uerr)
		}
	}
	return err
}
