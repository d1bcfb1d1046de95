#!/bin/bash
# Runs the checks, all of them also after one has failed. What needs root is
# left out without it, but not in CI, where it would go unnoticed.
set -uo pipefail

checks=(lint unit integration)
if ((EUID != 0)) && [[ ${CI:-} != true ]]; then
	checks=(lint unit)
	echo "integration: left out: it starts containers, and that needs root"
	echo "integration left out: needs root" >>"${FIGURES:-/dev/null}"
fi
exec make --keep-going --no-print-directory "${checks[@]}"
