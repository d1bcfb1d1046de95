package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
)

// model is what the snapshotter should hold, in plain values: every snapshot
// knows all layers below it.
type model struct {
	snaps map[string]*modelSnap
	node  map[string]string // node id -> snapshot
	last  int               // the last layer
	empty map[string]bool   // sealed layers that nothing was written to
	full  map[string]bool   // layers that something was written to
	known map[string]bool   // names that were asked for since the root was opened
}

type modelSnap struct {
	kind    snapshots.Kind
	layer   string
	parent  string   // the visible one
	private []string // layers of the lineage, topmost first
	node    string
	old     string // the key it was committed from, while that can be taken back
}

// below lists all layers below a snapshot.
func (m *model) below(p *modelSnap) []string {
	all := slices.Clone(p.private)
	for p.parent != "" {
		p = m.snaps[p.parent]
		all = append(append(all, p.layer), p.private...)
	}
	return all
}

// dirs returns what should be in l and m.
func (m *model) dirs() (l, o []string) {
	keep := map[string]bool{}
	for _, p := range m.snaps {
		keep[p.layer] = true
		for _, layer := range p.private {
			keep[layer] = true
		}
		if p.kind != snapshots.KindView {
			o = append(o, p.layer)
		}
	}
	return slices.Sorted(maps.Keys(keep)), slices.Sorted(slices.Values(o))
}

// pick returns the name of some snapshot of a kind, "" if there is none.
func (m *model) pick(r *rand.Rand, kinds ...snapshots.Kind) string {
	var all []string
	for name, p := range m.snaps {
		if slices.Contains(kinds, p.kind) {
			all = append(all, name)
		}
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return all[r.IntN(len(all))]
}

func (m *model) hasChild(name string) bool {
	for _, p := range m.snaps {
		if p.parent == name {
			return true
		}
	}
	return false
}

// TestModel plays random calls on a snapshotter and on the model, and compares
// records, mounts and directories after each. Now and then it opens the root
// anew.
func TestModel(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			root := t.TempDir()
			r := rand.New(rand.NewPCG(seed, 1))
			m := &model{snaps: map[string]*modelSnap{}, node: map[string]string{}, empty: map[string]bool{}, full: map[string]bool{}, known: map[string]bool{}}
			s := open(t, root)
			for step := range 150 {
				switch r.IntN(11) {
				case 0, 1, 2:
					m.create(t, s, r, step)
				case 3, 4, 5:
					m.commit(t, s, r, step)
				case 6:
					m.remove(t, s, r)
				case 7:
					if step%5 == 0 {
						if err := s.Close(); err != nil {
							t.Fatal(err)
						}
						s = open(t, root)
						clear(m.known)
					}
				case 8:
					m.ask(t, s, r)
				case 9, 10:
					m.takeBack(t, s, r, step)
				}
				if err := m.compare(t, s); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
			}
		})
	}
}

func (m *model) create(t *testing.T, s *Snapshotter, r *rand.Rand, step int) {
	p := &modelSnap{kind: snapshots.KindActive, parent: m.pick(r, snapshots.KindCommitted)}
	if r.IntN(8) == 0 {
		p.parent = ""
	}
	var opts []snapshots.Opt
	nodes := slices.Sorted(maps.Keys(m.node))
	if len(nodes) > 0 && r.IntN(3) > 0 {
		id := nodes[r.IntN(len(nodes))]
		n := m.snaps[m.node[id]]
		n.old = ""
		p.parent, p.private = n.parent, append([]string{n.layer}, n.private...)
		opts = append(opts, from(id))
	}
	if p.parent != "" {
		m.snaps[p.parent].old = ""
	}
	m.last++
	p.layer = strconv.FormatInt(int64(m.last), 36)
	key := fmt.Sprint("key-", step)
	if r.IntN(5) == 0 {
		p.kind = snapshots.KindView
		if _, err := s.View(t.Context(), key, p.parent, opts...); err != nil {
			t.Fatal(err)
		}
	} else {
		prepare(t, s, key, p.parent, opts...)
	}
	m.snaps[key] = p
}

func (m *model) commit(t *testing.T, s *Snapshotter, r *rand.Rand, step int) {
	key := m.pick(r, snapshots.KindActive)
	if key == "" {
		return
	}
	m.commitKey(t, s, r, step, key)
}

// commitKey commits an active snapshot, or one whose commit can be taken back.
func (m *model) commitKey(t *testing.T, s *Snapshotter, r *rand.Rand, step int, key string) {
	p := m.snaps[key]
	if r.IntN(3) > 0 {
		write(t, filepath.Join(s.dirs.layers(), p.layer, "f"), key)
		m.full[p.layer] = true
	}
	m.empty[p.layer] = !m.full[p.layer]
	name := fmt.Sprint("name-", step)
	var opts []snapshots.Opt
	if r.IntN(4) > 0 {
		p.node, p.old = nodeID(step), key
		opts = append(opts, asNode(p.node))
		m.node[p.node] = name
	}
	if err := s.Commit(t.Context(), name, key, opts...); err != nil {
		t.Fatal(err)
	}
	p.kind = snapshots.KindCommitted
	m.snaps[name] = p
	delete(m.snaps, key)
}

// tentative picks the name of a node whose commit can be taken back.
func (m *model) tentative(r *rand.Rand) string {
	var all []string
	for name, p := range m.snaps {
		if p.old != "" {
			all = append(all, name)
		}
	}
	if len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return all[r.IntN(len(all))]
}

// ask asks for a node by its name, as only one does who knows of it.
func (m *model) ask(t *testing.T, s *Snapshotter, r *rand.Rand) {
	name := m.tentative(r)
	if name == "" {
		return
	}
	if _, err := s.Stat(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	m.known[name] = true
}

// takeBack changes a snapshot by the key it had before it was committed.
func (m *model) takeBack(t *testing.T, s *Snapshotter, r *rand.Rand, step int) {
	name := m.tentative(r)
	if name == "" {
		return
	}
	key := m.snaps[name].old
	m.reopen(name)
	switch r.IntN(3) {
	case 0:
		m.commitKey(t, s, r, step, key)
	case 1:
		remove(t, s, key)
		delete(m.snaps, key)
	case 2:
		info, err := s.Stat(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Update(t.Context(), info); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *model) reopen(name string) {
	p := m.snaps[name]
	m.snaps[p.old] = p
	delete(m.snaps, name)
	delete(m.node, p.node)
	p.kind, p.node, p.old = snapshots.KindActive, "", ""
}

func (m *model) remove(t *testing.T, s *Snapshotter, r *rand.Rand) {
	name := m.pick(r, snapshots.KindActive, snapshots.KindView, snapshots.KindCommitted)
	if name == "" || m.hasChild(name) {
		return
	}
	remove(t, s, name)
	if m.snaps[name].old != "" && !m.known[name] {
		m.reopen(name)
		return
	}
	if id := m.snaps[name].node; id != "" {
		delete(m.node, id)
	}
	delete(m.snaps, name)
}

// compare holds the snapshotter against the model.
func (m *model) compare(t *testing.T, s *Snapshotter) error {
	l, o := m.dirs()
	var errs []error
	differ := func(what string, got, want []string) {
		if !slices.Equal(got, want) {
			errs = append(errs, fmt.Errorf("%s: got %q, want %q", what, got, want))
		}
	}
	differ("layers", names(t, s, "l"), l)
	differ("beside the layers", names(t, s, "m"), o)
	var listed []string
	err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
		listed = append(listed, info.Name)
		p := m.snaps[info.Name]
		if p == nil || info.Kind != p.kind || info.Parent != p.parent {
			return fmt.Errorf("snapshot %+v, want %+v", info, p)
		}
		key := info.Name
		if p.old != "" {
			key = p.old
			old, err := s.Stat(t.Context(), key)
			if err != nil || old.Name != key || old.Kind != snapshots.KindActive || old.Parent != p.parent {
				return fmt.Errorf("snapshot %+v by its old key: %+v, %v", p, old, err)
			}
		} else if info.Kind == snapshots.KindCommitted {
			return nil
		}
		mounts, err := s.Mounts(t.Context(), key)
		if err != nil {
			return err
		}
		got := lowersOf(mounts)
		if mounts[0].Type == "bind" {
			got = []string{filepath.Base(mounts[0].Source)}
		}
		differ("lowers of "+info.Name, got, m.lowers(p))
		return nil
	})
	differ("snapshots", slices.Sorted(slices.Values(listed)), slices.Sorted(maps.Keys(m.snaps)))
	return errors.Join(append(errs, err)...)
}

// lowers lists the layers that should be in a mount, or the one that is bound.
func (m *model) lowers(p *modelSnap) []string {
	below := m.below(p)
	full := slices.DeleteFunc(slices.Clone(below), func(l string) bool { return m.empty[l] })
	switch {
	case len(below) == 0:
		return []string{p.layer}
	case p.kind == snapshots.KindView && m.empty[below[0]]:
		return append(below[:1], full...)
	case len(full) == 0:
		return below[len(below)-1:]
	}
	return full
}
