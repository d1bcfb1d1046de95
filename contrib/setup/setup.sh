#!/bin/bash
# Puts everything that building and testing need where the Makefile looks for
# it: Debian packages into the system, all else into bin. What is there is kept.
set -euo pipefail
cd "$(dirname "$0")"

./packages.sh test
./criu.sh
./containerd.sh
./tools.sh lint
