// Package statefork has the words of the control plane: the nodes of an
// exploration, the tree that they form, and errors that say what to do. It does
// no I/O and imports nothing of this module; the backends below it bring a
// node's state back.
package statefork
