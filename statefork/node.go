package statefork

import "time"

// Node is one physical point of an exploration.
type Node struct {
	// ID identifies the node: 12 hexadecimal digits.
	ID string `json:"id"`
	// Name is the caller's name for it, unique in its tree, or empty.
	Name string `json:"name,omitempty"`
	// Parent is the ID of the node that it descends from. It may lie in the
	// tree of another container, of which this one is a fork.
	Parent string `json:"parent,omitempty"`
	// Container is the container that was checkpointed.
	Container string `json:"container"`
	// Snapshot is the name of the committed snapshot that holds the files.
	Snapshot string `json:"snapshot"`
	// Created is the time of the freeze.
	Created time.Time `json:"created"`
	// ImageBytes is the size of the process images.
	ImageBytes uint64 `json:"image_bytes"`
	// Labels are the caller's own.
	Labels map[string]string `json:"labels,omitempty"`
}

// Fork is a live container that was started at a node.
type Fork struct {
	// ID is the container's id, Name its name where it has one.
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	// From is the ID of the node that it was started at.
	From string `json:"from"`
	// Status is that of its task, or "none" without one.
	Status string `json:"status"`
}

// External is state that lies outside of a container: no node keeps it, no
// restore rolls it back, and forks share it.
type External struct {
	// Kind is "mount", "socket", "port", "setting", or the type of a namespace.
	Kind string `json:"kind"`
	// Name is a path in the container, an address, or a setting's name.
	Name string `json:"name"`
	// Detail says more, such as the path on the host.
	Detail string `json:"detail,omitempty"`
}
