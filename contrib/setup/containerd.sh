#!/bin/bash
# Puts containerd, ctr, nerdctl, and the plain runc with its shim (what the
# benchmarks compare with) into bin.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"

want=2.3
containerd=github.com/containerd/containerd/v2
nerdctl=github.com/containerd/nerdctl/v2
runc=github.com/opencontainers/runc

# system NAME...: links the system's programs into bin, if it has all of them.
system() {
	local name path=()
	for name; do path+=("$(type -P "$name")") || return; done
	echo "$1: using the system's $(version "${path[0]}")"
	ln -sf "${path[@]}" "$bin"
}

# Its own bin is no part of the system.
PATH=$(tr : '\n' <<<"$PATH" | grep -vxF "$bin" | paste -sd:)

export CGO_ENABLED=0
if ! { at_least "$(version containerd || true)" "$want" && system containerd ctr; }; then
	# The parts left out need C libraries.
	flags=(-tags "no_btrfs no_devmapper no_zfs"
		-ldflags "-s -w -X $containerd/version.Version=$(pinned $containerd)")
	tool $containerd/cmd/containerd $containerd "${flags[@]}"
	tool $containerd/cmd/ctr $containerd "${flags[@]}"
fi
if ! { at_least "$(version nerdctl || true)" "$want" && system nerdctl; }; then
	tool $nerdctl/cmd/nerdctl $nerdctl \
		-ldflags "-s -w -X $nerdctl/pkg/version.Version=$(pinned $nerdctl)"
fi
tool $containerd/cmd/containerd-shim-runc-v2 $containerd \
	-ldflags "-s -w -X $containerd/version.Version=$(pinned $containerd)"
v=$(pinned $runc)
CGO_ENABLED=1 tool $runc $runc -tags seccomp -ldflags "-s -w -X main.version=${v#v}"
