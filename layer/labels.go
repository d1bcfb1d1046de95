package layer

// Labels by which a node's layers are found. containerd hands down to a
// snapshotter only labels with this prefix.
const (
	// LabelNode, given to Commit, holds the id of the node that the snapshot
	// is the physical state of: 12 hexadecimal digits.
	LabelNode = "containerd.io/snapshot/statefork.node"
	// LabelFrom, given to Prepare or View, holds the id of the node to go on
	// from. The snapshotter stacks that node's layers between the new snapshot
	// and its visible parent, which must be the node's own visible parent.
	LabelFrom = "containerd.io/snapshot/statefork.from"
)
