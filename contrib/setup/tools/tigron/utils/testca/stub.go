// Package testca is empty: only tests of nerdctl use it.
package testca
