// Package expect is empty: only tests of nerdctl use it.
package expect
