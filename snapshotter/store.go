package snapshotter

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	bolt "go.etcd.io/bbolt"
	errbolt "go.etcd.io/bbolt/errors"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
)

// Our buckets stand beside containerd's "v1" at the top of the database.
var (
	bucketLayers  = []byte("statefork.layers")  // layer id, 8 bytes -> record
	bucketNodes   = []byte("statefork.nodes")   // node id -> name of its snapshot
	bucketCommits = []byte("statefork.commits") // key of an active snapshot -> tentative
)

// MetaStore's layout, as far as takeBack needs it.
var (
	bucketVersion   = []byte("v1")
	bucketSnapshots = []byte("snapshots") // name -> bucket with keyKind
	keyKind         = []byte("kind")      // one byte, a snapshots.Kind
)

// store keeps all metadata in one database, so that one transaction covers
// both what containerd sees (names, kinds, visible parents, labels: kept by
// containerd's own MetaStore) and the private lineage of the layers.
type store struct{ ms *storage.MetaStore }

// openStore opens the database. bolt's lock on the file keeps a second daemon
// out of the same root; the first is waited for, since it may be on its way
// out.
func openStore(ctx context.Context, file string, timeout time.Duration) (*store, error) {
	ms, err := storage.NewMetaStore(file, func(o *bolt.Options) error {
		o.Timeout = timeout
		return nil
	})
	if err != nil {
		return nil, err
	}
	s := &store{ms: ms}
	err = s.run(ctx, true, func(_ context.Context, b *bolt.Tx) error {
		for _, name := range [][]byte{bucketLayers, bucketNodes, bucketCommits} {
			if _, err := b.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, errbolt.ErrTimeout) {
		return nil, fmt.Errorf("lock %q: another snapshotter uses this root: %w", file, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return nil, fmt.Errorf("open metadata %q: %w", file, errors.Join(err, ms.Close()))
	}
	return s, nil
}

// tx is one transaction on the store. The context that comes with it carries
// the same transaction for the functions of package storage.
type tx struct {
	layers, nodes, commits *bolt.Bucket
	// snapshots is MetaStore's own bucket of snapshots, by name.
	snapshots *bolt.Bucket
}

func (s *store) view(ctx context.Context, fn func(context.Context, *tx) error) error {
	return s.transact(ctx, false, fn)
}

func (s *store) update(ctx context.Context, fn func(context.Context, *tx) error) error {
	return s.transact(ctx, true, fn)
}

func (s *store) transact(ctx context.Context, writable bool, fn func(context.Context, *tx) error) error {
	return s.run(ctx, writable, func(ctx context.Context, b *bolt.Tx) error {
		t := &tx{layers: b.Bucket(bucketLayers), nodes: b.Bucket(bucketNodes), commits: b.Bucket(bucketCommits)}
		if v := b.Bucket(bucketVersion); v != nil {
			t.snapshots = v.Bucket(bucketSnapshots)
		}
		return fn(ctx, t)
	})
}

// run relies on MetaStore's transactor being bolt's own transaction. Nothing
// but its type says so; opening the store checks it.
func (s *store) run(ctx context.Context, writable bool, fn func(context.Context, *bolt.Tx) error) (retErr error) {
	ctx, transactor, err := s.ms.TransactionContext(ctx, writable)
	if err != nil {
		return err
	}
	done := false
	defer func() {
		if !done {
			retErr = errors.Join(retErr, transactor.Rollback())
		}
	}()
	b, ok := transactor.(*bolt.Tx)
	if !ok {
		return fmt.Errorf("metadata transaction is a %T, not bolt's: %w", transactor, errdefs.ErrInternal)
	}
	if err := fn(ctx, b); err != nil || !writable {
		return err
	}
	// bolt rolls back by itself when its commit fails
	done = true
	return transactor.Commit()
}

func (s *store) close() error { return s.ms.Close() }

// record is what we keep of a layer, which is named by the id that MetaStore
// gave to its snapshot. Ids only grow, so a layer stands on smaller ones.
type record struct {
	// from is the layer of the node that this one goes on from: the next one
	// below in the private lineage; 0 for none.
	from uint64
	// refs is the number of records whose from is this one.
	refs uint64
	// removed: containerd removed the snapshot, descendants need the layer.
	removed bool
	// empty: the upperdir had no entries when it was sealed.
	empty bool
	// measured: usage is known.
	measured bool
	usage    snapshots.Usage
	// node is the id of the node, if the snapshot is one.
	node string
	// key is that of the active snapshot that the node was committed from, as
	// long as the commit can be taken back.
	key string
}

const (
	flagRemoved = 1 << iota
	flagEmpty
	flagMeasured
)

func (r record) encode() []byte {
	var flags uint64
	if r.removed {
		flags |= flagRemoved
	}
	if r.empty {
		flags |= flagEmpty
	}
	if r.measured {
		flags |= flagMeasured
	}
	var b []byte
	for _, v := range []uint64{r.from, r.refs, flags, uint64(r.usage.Inodes), uint64(r.usage.Size)} {
		b = binary.AppendUvarint(b, v)
	}
	b = append(b, r.node...)
	if r.node != "" { // the ids of nodes are all of one length
		b = append(b, r.key...)
	}
	return b
}

func decodeRecord(b []byte) (record, error) {
	var v [5]uint64
	for i := range v {
		n := 0
		if v[i], n = binary.Uvarint(b); n <= 0 {
			return record{}, errors.New("record is cut short")
		}
		b = b[n:]
	}
	r := record{
		from:     v[0],
		refs:     v[1],
		removed:  v[2]&flagRemoved != 0,
		empty:    v[2]&flagEmpty != 0,
		measured: v[2]&flagMeasured != 0,
		usage:    snapshots.Usage{Inodes: int64(v[3]), Size: int64(v[4])},
	}
	if len(b) > 0 {
		if len(b) < nodeIDLength {
			return record{}, errors.New("record is cut short")
		}
		r.node, r.key = string(b[:nodeIDLength]), string(b[nodeIDLength:])
	}
	return r, nil
}

func layerKey(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// layer reads the record of a layer.
func (t *tx) layer(id uint64) (record, error) {
	b := t.layers.Get(layerKey(id))
	if b == nil {
		return record{}, fmt.Errorf("layer %d has no record: %w", id, errdefs.ErrInternal)
	}
	r, err := decodeRecord(b)
	if err != nil {
		return record{}, fmt.Errorf("read record of layer %d: %w", id, err)
	}
	return r, nil
}

func (t *tx) putLayer(id uint64, r record) error {
	if err := t.layers.Put(layerKey(id), r.encode()); err != nil {
		return fmt.Errorf("write record of layer %d: %w", id, err)
	}
	return nil
}

// eachLayer calls fn for every layer that has a record.
func (t *tx) eachLayer(fn func(id uint64, r record)) error {
	return t.layers.ForEach(func(k, v []byte) error {
		id := binary.BigEndian.Uint64(k)
		r, err := decodeRecord(v)
		if err != nil {
			return fmt.Errorf("read record of layer %d: %w", id, err)
		}
		fn(id, r)
		return nil
	})
}

// parseID reads an id as MetaStore gives it.
func parseID(s string) (uint64, error) {
	id, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read snapshot id %q: %w", s, err)
	}
	return id, nil
}
