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

# built_from FILE MODULE VERSION [TAGS]: whether FILE is a Go program made from
# that, with just these build tags (separated by commas).
built_from() {
	[[ -f $1 ]] && go version -m "$1" 2>/dev/null |
		awk -v m="$2" -v v="$3" -v want="${4:-}" '
			$1 ~ /^(mod|dep)$/ && $2 == m && $3 == v { found = 1 }
			$1 == "build" && sub(/^-tags=/, "", $2) { tags = $2 }
			END { exit !(found && tags == want) }'
}

# tool PACKAGE MODULE [go build flags]: puts PACKAGE's program into bin, built
# from the version of MODULE that tools/go.mod pins. CGO_ENABLED is the caller's.
tool() { put build "$@"; }

# test_tool PACKAGE MODULE [go test flags]: the same for a program that is
# PACKAGE's tests.
test_tool() { put 'test -c' "$@"; }

put() {
	local how package=$2 module=$3 name=${2##*/} v kept tags='' before='' flag
	read -ra how <<<"$1"
	shift 3
	for flag; do
		[[ $before != -tags ]] || tags=${flag// /,}
		before=$flag
	done
	v=$(pinned "$module")
	kept=$cache/$name-$v-$(uname -m)
	if [[ ! -L $bin/$name ]] && built_from "$bin/$name" "$module" "$v" "$tags"; then
		echo "$name: $v already there"
		return
	fi
	if built_from "$kept" "$module" "$v" "$tags"; then
		echo "$name: copying $v from the cache"
	else
		echo "$name: building $v"
		(cd "$here/tools" && nice go "${how[@]}" -trimpath -o "$kept.$$" "$@" "$package" 2> >(grep -v "^go: downloading" >&2))
		mv "$kept.$$" "$kept"
	fi
	cp --remove-destination "$kept" "$bin/$name"
}
