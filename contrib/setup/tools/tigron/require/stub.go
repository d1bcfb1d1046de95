// Package require is empty: only tests of nerdctl use it.
package require
