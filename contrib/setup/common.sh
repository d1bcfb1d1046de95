# Sourced by the other scripts: where things are, and how a pinned tool is built.
# shellcheck shell=bash disable=SC2034

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=${here%/contrib/setup}/bin
# What was fetched or built is kept here, so that a second clone copies it.
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/statefork
mkdir -p "$bin" "$cache"

die() {
	echo "$*" >&2
	exit 1
}

# version FILE: the first thing in FILE --version that looks like a version.
version() { "$1" --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' | head -n1; }

# at_least A B: whether A is a version, and not older than B.
at_least() { [[ -n $1 && $(printf '%s\n' "$2" "$1" | sort -V | head -n1) == "$2" ]]; }

# pinned MODULE: its version in tools/go.mod.
pinned() { awk -v m="$1" '$1 == m && $2 ~ /^v/ { print $2 }' "$here/tools/go.mod"; }

# built_from FILE MODULE VERSION: whether FILE is a Go program made from that.
built_from() {
	[[ -f $1 ]] && go version -m "$1" 2>/dev/null |
		awk -v m="$2" -v v="$3" '$1 ~ /^(mod|dep)$/ && $2 == m && $3 == v { found = 1 } END { exit !found }'
}

# tool PACKAGE MODULE [go build flags]: puts PACKAGE's program into bin, built
# from the version of MODULE that tools/go.mod pins. CGO_ENABLED is the caller's.
tool() {
	local package=$1 module=$2 name=${1##*/} v kept
	shift 2
	v=$(pinned "$module")
	kept=$cache/$name-$v-$(uname -m)
	if [[ ! -L $bin/$name ]] && built_from "$bin/$name" "$module" "$v"; then
		echo "$name: $v already there"
		return
	fi
	if built_from "$kept" "$module" "$v"; then
		echo "$name: copying $v from the cache"
	else
		echo "$name: building $v"
		(cd "$here/tools" && nice go build -trimpath -o "$kept.$$" "$@" "$package" 2> >(grep -v "^go: downloading" >&2))
		mv "$kept.$$" "$kept"
	fi
	cp --remove-destination "$kept" "$bin/$name"
}
