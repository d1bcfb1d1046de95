#!/bin/bash
# Puts critest, the conformance tests of Kubernetes' Container Runtime Interface,
# into bin. It is no part of setup.sh: only "make conformance" needs it, and it
# takes a minute to build.
set -euo pipefail
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"

module=sigs.k8s.io/cri-tools
v=$(pinned $module)
CGO_ENABLED=0 test_tool $module/cmd/critest $module \
	-ldflags "-s -w -X $module/pkg/version.Version=${v#v}"
