package api

import (
	"fmt"
	"regexp"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/statefork/statefork/layer"
)

// RuntimeName is the runtime under which containerd finds the shim.
const RuntimeName = "io.statefork.v1"

// Labels on a node's committed snapshot. The snapshotter's metadata is the
// physical tree: there is no other record of a node. A label value together
// with its key may have 4096 bytes in containerd.
const (
	// LabelNode holds the node's id. It has the one prefix that containerd
	// hands down to a snapshotter, which needs it to resolve LabelFrom.
	LabelNode = layer.LabelNode
	// LabelFrom, on an active snapshot, holds the id of the node that it
	// descends from; our snapshotter stacks that node's layers below it. It is
	// also how the head of a container is found.
	LabelFrom = layer.LabelFrom
	// LabelContainer holds the id of the container that was checkpointed.
	LabelContainer = "io.statefork.container"
	// LabelName holds the node's name, if it has one.
	LabelName = "io.statefork.name"
	// LabelParent holds the id of the node's parent; absent on a root.
	LabelParent = "io.statefork.parent"
	// LabelCreated holds the time of the freeze in RFC 3339 with nanoseconds.
	LabelCreated = "io.statefork.created"
	// LabelHeadOf holds the key of the active snapshot that was sealed. If
	// that key is missing, the checkpoint stopped between Commit and Prepare,
	// and Prepare of the key from the newest such node completes it.
	LabelHeadOf = "io.statefork.head-of"
	// LabelAbandoned, on a snapshot that is no node, holds the id of the node
	// for which a restore gave up the state in it. It has LabelHeadOf too: a
	// restore that stopped after that Commit is completed in the same way.
	LabelAbandoned = "io.statefork.abandoned-for"
	// LabelImages holds the directory of the node's process images.
	LabelImages = "io.statefork.images"
	// LabelImageBytes holds the size of the process images in bytes.
	LabelImageBytes = "io.statefork.image-bytes"
	// LabelUserPrefix precedes the keys of the caller's own labels.
	LabelUserPrefix = "io.statefork.user/"

	// LabelGCContainer ties a snapshot's life to its container's.
	LabelGCContainer = "containerd.io/gc.bref.container"
)

var (
	nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	idRE   = regexp.MustCompile(`^[0-9a-f]{12}$`)
)

// ValidateName says whether name can name a node: 1 to 63 letters, digits,
// '_', '.' or '-', the first a letter or a digit, and nothing that looks like
// a node id.
func ValidateName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("name %q: want 1 to 63 of A-Z a-z 0-9 _ . - and a letter or digit first", name)
	}
	if idRE.MatchString(name) {
		return fmt.Errorf("name %q looks like a node id: choose another", name)
	}
	return nil
}

// IsNodeID says whether s has the form of a node id: 12 hexadecimal digits.
func IsNodeID(s string) bool { return idRE.MatchString(s) }

// SnapshotName returns the name of the committed snapshot of a node.
func SnapshotName(containerID, nodeID string) string { return containerID + "@" + nodeID }

// AbandonedName returns the name under which an active snapshot is set aside
// when its container goes back to a node. id is unique.
func AbandonedName(key, id string) string { return key + "-abandoned-" + id }

// NodeFromSnapshot reads a node from its snapshot's labels; it returns nil
// for a snapshot that is no node.
func NodeFromSnapshot(info snapshots.Info) *Node {
	id := info.Labels[LabelNode]
	_, aside := info.Labels[LabelAbandoned]
	if id == "" || aside || info.Kind != snapshots.KindCommitted {
		return nil
	}
	n := &Node{
		Id:          id,
		Name:        info.Labels[LabelName],
		Parent:      info.Labels[LabelParent],
		ContainerId: info.Labels[LabelContainer],
		Snapshot:    info.Name,
		Images:      info.Labels[LabelImages],
		Labels:      map[string]string{},
	}
	created, err := time.Parse(time.RFC3339Nano, info.Labels[LabelCreated])
	if err != nil {
		created = info.Created
	}
	n.CreatedAt = timestamppb.New(created)
	fmt.Sscanf(info.Labels[LabelImageBytes], "%d", &n.ImageBytes)
	for k, v := range info.Labels {
		if len(k) > len(LabelUserPrefix) && k[:len(LabelUserPrefix)] == LabelUserPrefix {
			n.Labels[k[len(LabelUserPrefix):]] = v
		}
	}
	return n
}
