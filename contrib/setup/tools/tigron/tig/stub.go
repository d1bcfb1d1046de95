// Package tig has the one name that nerdctl's program itself refers to.
package tig

// T is the part of testing.T that is called on it.
type T interface {
	Helper()
	Log(args ...any)
	FailNow()
}
