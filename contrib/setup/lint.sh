#!/bin/bash
# Checks the sources. All checks run, also after one has failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

short=()
check() {
	local name=$1 out
	shift
	out=$("$@" 2>&1) && return
	echo "$name:"
	echo "$out"
	short+=("$name")
}

unformatted() {
	local files
	files=$(gofmt -l .) || return
	[[ -z $files ]] || { echo "$files" && return 1; }
}

scripts() {
	find . -path ./.git -prune -o -path ./bin -prune -o \( -name '*.sh' -o -path ./.ci/run \) -print0 |
		xargs -0 shellcheck -x -P SCRIPTDIR
}

check gofmt unformatted
check vet go vet -tags seccomp ./...
check staticcheck bin/staticcheck -tags seccomp ./...
check tidy go mod tidy -diff
check shellcheck scripts

if ((${#short[@]})); then
	printf '%s\n' "${short[@]}" >>"${FIGURES:-/dev/null}"
	exit 1
fi
echo "$(go list -tags seccomp ./... | wc -l) packages" >>"${FIGURES:-/dev/null}"
