// Package test is empty: only tests of nerdctl use it.
package test
