// Package utils is empty: only tests of nerdctl use it.
package utils
