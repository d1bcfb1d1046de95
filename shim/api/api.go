// Package api is the shim's private interface: the Waypoint service, the
// labels by which a node is recorded, and a client that finds a task's socket.
//
// The service runs on the same ttrpc socket as containerd's Task service. Its
// errors carry containerd's errdefs classes; the client gives them back as such.
package api

//go:generate protoc -I . -I /usr/include --go_out=. --go_opt=paths=source_relative --go-ttrpc_out=. --go-ttrpc_opt=paths=source_relative waypoint.proto
