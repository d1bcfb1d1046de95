#!/bin/bash
# integration.sh GO-TEST-ARGUMENTS...: runs the integration tests twice: all of
# them as the machine is, then those with containers under cgroup v2. It fails if
# either fails; the second is run also then.
set -uo pipefail

here=${BASH_SOURCE%/*}
all=${FIGURES:-/dev/null}
status=0

# pass NAME COMMAND...: one pass, the counts of which go to the figures.
pass() {
	local name=$1 counts
	shift
	echo "pass: $name"
	counts=$(mktemp)
	if ! FIGURES=$counts "$@"; then
		status=1
	fi
	echo "$name: $(paste -sd, "$counts" | grep . || echo 'did not run')" >>"$all"
	rm -f "$counts"
}

kind=v1
if [[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]]; then
	kind=v2
fi
pass "cgroup $kind" go run ./contrib/setup/gotest "$@" ./integration/... ./snapshotter -test.root
if [[ $kind == v1 ]]; then
	STATEFORK_PASS=cgroup2 pass "cgroup v2" "$here/cgroup2.sh" \
		go run ./contrib/setup/gotest "$@" ./integration -test.root
fi
exit "$status"
