#!/bin/bash
# Puts what the checks need into bin; with the word "proto", what generating
# shim/api needs.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"

export CGO_ENABLED=0
case ${1:-lint} in
lint) tool honnef.co/go/tools/cmd/staticcheck honnef.co/go/tools ;;
proto)
	"$here/packages.sh" proto
	tool google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/protobuf
	tool github.com/containerd/ttrpc/cmd/protoc-gen-go-ttrpc github.com/containerd/ttrpc
	;;
*) die "usage: tools.sh [lint|proto]" ;;
esac
