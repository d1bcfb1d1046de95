#!/bin/bash
# closing.sh NAME COMMAND...: runs COMMAND and closes with one line that tells
# how it went: "NAME: ok (figures)" or "NAME: short (what)". The exit status is
# COMMAND's. COMMAND gives the figures, or what fell short, by writing them to
# the file $FIGURES; a closing.sh within COMMAND does so by itself.
set -uo pipefail

name=$1
shift
outer=${FIGURES:-}
FIGURES=$(mktemp)
export FIGURES
trap 'rm -f "$FIGURES"' EXIT

"$@"
status=$?

figures=$(paste -sd, "$FIGURES" | sed 's/, */, /g')
if ((status == 0)); then
	verdict=ok
else
	verdict=short
	: "${figures:=exit status $status}"
fi
[[ -z $outer ]] || echo "$name $verdict" >>"$outer"
echo "$name: $verdict (${figures:+$figures, }$SECONDS s)"
exit $status
