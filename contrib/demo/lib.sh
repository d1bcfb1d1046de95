# shellcheck shell=bash
# What demo.sh is written in.

# short: ends the demo; what is wrong goes to the closing line.
short() {
	echo "$1" >"${FIGURES:-/dev/null}"
	exit 1
}
trap 'short "line $LINENO: exit status $?: ${typed:-}"' ERR

figures() { echo "$1" >"${FIGURES:-/dev/null}"; }

title() { printf '\n# %s\n' "$*"; }

# run: shows a command and what it says. The output stays in $said, and how many
# milliseconds it took in $ms. What it remarks comes last.
# shellcheck disable=SC2034 # which demo.sh uses
run() {
	local status=0 word start=${EPOCHREALTIME/./}
	typed=
	for word; do
		if [[ $word == *[[:space:]\$\;\{\(]* ]]; then typed+=" '$word'"; else typed+=" $word"; fi
	done
	echo "\$$typed"
	"$@" >"$STATEFORK_TESTBED/said" 2>"$STATEFORK_TESTBED/remarks" || status=$?
	ms=$(((${EPOCHREALTIME/./} - start) / 1000))
	said=$(<"$STATEFORK_TESTBED/said")
	cat "$STATEFORK_TESTBED/said" "$STATEFORK_TESTBED/remarks"
	return $status
}

checks=0

# check WHAT IS EXPECTED
check() {
	[[ $2 == "$3" ]] || short "$1: '$2', not '$3'"
	checks=$((checks + 1))
	echo "  ok: $1"
}

# await WHAT COMMAND...: the command succeeds within a minute.
await() {
	local end=$((SECONDS + 60))
	until "${@:2}" >/dev/null 2>&1; do
		((SECONDS < end)) || short "not within a minute: $1"
	done
	checks=$((checks + 1))
	echo "  ok: $1"
}
