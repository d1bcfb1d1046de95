#!/bin/bash
# cgroup2.sh COMMAND...: runs COMMAND where the machine looks as if cgroup v2
# were all that it has: in a mount namespace of its own, with nothing but cgroup2
# on /sys/fs/cgroup, and in a cgroup namespace of its own. So everything that
# COMMAND makes of cgroups lies below one cgroup. It fails if anything stays there.
#
# Controllers that the machine uses in v1 hierarchies are not to be had in v2.
set -euo pipefail

say() {
	echo "cgroup2.sh: $*" >&2
}

# inside: this process is in the cgroup that shall be the root for COMMAND.
if [[ ${1:-} == --inside ]]; then
	shift
	# The view of the whole tree goes first, then the machine's own.
	umount "$1"
	shift
	umount --recursive --lazy /sys/fs/cgroup
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
	# A cgroup with processes cannot hand controllers down.
	mkdir /sys/fs/cgroup/tests
	echo $$ >/sys/fs/cgroup/tests/cgroup.procs
	exec "$@"
fi

if [[ ${1:-} != --apart ]]; then
	exec unshare --mount --propagation private -- "$0" --apart "$@"
fi
shift

all=$(mktemp -d)
mount -t cgroup2 cgroup2 "$all"
own=$all/cgroup2-$$
mkdir "$own"

# What the machine's root has to give is handed down, and taken back at the end.
added=
for c in $(<"$own/../cgroup.controllers"); do
	if ! grep -qw "$c" "$all/cgroup.subtree_control"; then
		echo "+$c" >"$all/cgroup.subtree_control" && added+=" -$c"
	fi
done
say "controllers: $(<"$own/cgroup.controllers")"

# A signal is COMMAND's to heed; its end comes back here.
trap : INT TERM
status=0
(
	trap - INT TERM
	echo "$BASHPID" >"$own/cgroup.procs"
	exec unshare --mount --cgroup --propagation private -- "$0" --inside "$all" "$@"
) || status=$?

# Dying processes need a moment to leave.
for _ in {1..100}; do
	grep -q 'populated 1' "$own/cgroup.events" || break
	sleep 0.1
done
if ! rmdir "$own/tests" "$own" 2>/dev/null; then
	say "left behind: $(cd "$own" && find . -mindepth 1 -type d | sort | paste -sd' '); processes: $(cat "$own/cgroup.procs" "$own"/*/cgroup.procs | paste -sd' ')"
	find "$own" -depth -type d -exec rmdir {} + || true
	status=1
fi
for c in $added; do
	# Another run may have come to need it.
	echo "$c" 2>/dev/null >"$all/cgroup.subtree_control" || true
done
umount "$all"
rmdir "$all"
exit "$status"
