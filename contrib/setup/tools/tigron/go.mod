// A stand-in for a module that only nerdctl's tests use and the module proxy
// does not have: with it nerdctl builds from the proxy alone.
module github.com/containerd/nerdctl/mod/tigron

go 1.24
