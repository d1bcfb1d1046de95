#!/bin/bash
# Installs the Debian packages that something needs:
# packages.sh build|test|proto; "test" includes "build".
set -euo pipefail

packages=(gcc libc6-dev pkg-config libseccomp-dev) # cgo and seccomp, for the shim and runc
case ${1:-test} in
build) ;;
test)
	packages+=(
		busybox-static debootstrap # root file systems
		iproute2 iptables containernetworking-plugins
		patchelf   # points a fetched criu at its own libraries
		shellcheck # for lint
	)
	;;
proto) packages=(protobuf-compiler) ;;
*) echo "usage: packages.sh [build|test|proto]" >&2 && exit 1 ;;
esac

if ! type -P dpkg-query >/dev/null; then
	echo "packages: not Debian: please have the like of ${packages[*]}"
	exit 0
fi

missing=()
for p in "${packages[@]}"; do
	state=$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)
	[[ $state == installed ]] || missing+=("$p")
done

if ((${#missing[@]} == 0)); then
	echo "packages: all ${#packages[@]} already there"
elif ((EUID != 0)); then
	echo "packages: missing, and installing needs root: ${missing[*]}" >&2
	exit 1
else
	echo "packages: installing ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" >/dev/null
fi
if [[ ${1:-test} == test ]]; then
	echo "packages: the CNI plugins are in /usr/lib/cni"
fi
