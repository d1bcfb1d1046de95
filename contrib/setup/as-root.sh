#!/bin/bash
# as-root.sh COMMAND...: runs COMMAND if this is root; else says that it must be.
set -euo pipefail

if ((EUID != 0)); then
	echo "needs root" >>"${FIGURES:-/dev/null}"
	exit 1
fi
exec "$@"
