#!/bin/bash
# A walk through what statefork does, on a containerd of its own that is gone
# afterwards. Read it as a tutorial: lines that begin with "+" are what one types.
#
# In the container runs a web server that counts visits in its memory and keeps
# notes in SQLite, with 64 MiB that only it has, and a loop that counts.
set -euo pipefail

if [[ -z ${STATEFORK_TESTBED:-} ]]; then
	cd "$(dirname "$0")/../.."
	[[ -n ${FIGURES:-} ]] || exec contrib/setup/closing.sh demo contrib/demo/demo.sh
	exec go run -tags seccomp ./integration/sandbox -image debian contrib/demo/demo.sh
fi

# What went wrong goes to the closing line, as the figures do.
failed() {
	echo "$1" >>"${FIGURES:-/dev/null}"
	echo "demo: $1" >&2
	exit 1
}
trap 'failed "line $LINENO failed"' ERR

title() { printf '\n# %s\n' "$*"; }

# +: shows a command as one would type it, and runs it. What it prints stays in
# $said, and what it remarks in $remarks.
+() {
	local status=0 word
	printf +
	for word; do
		[[ $word == *[[:space:]\$\;\{]* ]] && printf " '%s'" "$word" || printf ' %s' "$word"
	done
	echo
	"$@" >"$STATEFORK_TESTBED/said" 2>"$STATEFORK_TESTBED/remarks" || status=$?
	said=$(<"$STATEFORK_TESTBED/said") remarks=$(<"$STATEFORK_TESTBED/remarks")
	[[ -z $said ]] || echo "$said"
	[[ -z $remarks ]] || echo "$remarks"
	return $status
}

# The containerd is not where statefork looks for it by itself.
statefork() { command statefork --state "$STATEFORK_STATE" "$@"; }

# want WHAT IS EXPECTED
want() { [[ $2 == "$3" ]] || failed "$1 is $2, not $3"; }

field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1" <<<"$said"; }
took() { sed -n "s/^statefork: .*\b$1 \([0-9.]*[mµ]*s\).*/\1/p" <<<"$remarks"; }
beat() { nerdctl exec "$1" cat /data/beat; }

app=$(cd "$(dirname "$0")" && pwd)

title "A container under the statefork runtime. Nothing else about it is special."
+ nerdctl run -d --name web --runtime io.statefork.v1 --net none -v "$app:/app:ro" localhost/debian /app/start.sh
id=$said
for ((try = 0; ; try++)); do # the server needs a moment
	nerdctl exec web /app/ask >/dev/null 2>&1 && break
	((try < 50)) || failed "the server does not start"
done
+ nerdctl exec web /app/ask "written before the checkpoint"
+ nerdctl exec web /app/ask
visits=$(field visits) memory=$(field memory)

title "A checkpoint: files, processes, memory and sockets, in one freeze. The container goes on."
+ statefork checkpoint web --name clean
checkpoint_total=$(took total) checkpoint_frozen=$(took frozen)
beat_then=$(beat web)
+ nerdctl exec web /app/ask
want "the number of visits" "$(field visits)" $((visits + 1))

title "A bad idea: its data is deleted, and the server killed."
+ nerdctl exec web pkill -9 python3
+ nerdctl exec web rm -rf /data /usr/bin/sqlite3
if + nerdctl exec web /app/ask; then failed "the server is still there"; fi

title "Back to the node, in place: the same container, with the server's memory as it was."
+ statefork restore web clean
restore_total=$(took total)
+ nerdctl inspect -f '{{.Id}} {{.State.Status}}' web
want "the container" "$said" "$id running"
+ nerdctl exec web /app/ask
want "the number of visits" "$(field visits)" $((visits + 1))
want "the memory" "$(field memory)" "$memory"
+ nerdctl exec web sqlite3 /data/notes.db 'PRAGMA integrity_check; SELECT text FROM notes'
want "the database" "$said" $'ok\nwritten before the checkpoint'
beat_now=$(beat web)
((beat_now >= beat_then - 2)) || failed "the loop counts from $beat_now, not on from $beat_then"
for ((try = 0; $(beat web) <= beat_now; try++)); do
	((try < 50)) || failed "the loop does not count on"
done
echo "the loop counts on: $beat_now, $(beat web)"

title "Three siblings from the same point. Each goes its own way."
start=${EPOCHREALTIME/./}
+ statefork fork web@clean -n 3 --name try
fork_ms=$(((${EPOCHREALTIME/./} - start) / 1000))
for i in 1 2 3; do
	+ nerdctl exec "try-$i" /app/ask "an idea of try-$i"
	want "the notes" "$(field notes)" "['written before the checkpoint', 'an idea of try-$i']"
	want "the memory" "$(field memory)" "$memory"
done
+ nerdctl exec web /app/ask
want "the notes of the source" "$(field notes)" "['written before the checkpoint']"

title "The tree: nodes, where the container stands, and who came from where."
+ statefork checkpoint web --name later
+ statefork restore web clean
+ statefork checkpoint web --name another-way
+ statefork tree web
+ nerdctl ps --format '{{.Names}} {{.Status}}'

title "Everything goes with its container: layers, process images, names."
+ nerdctl rm -f web try-1 try-2 try-3
+ statefork ls
echo "checkpoint $checkpoint_total of which frozen $checkpoint_frozen, restore $restore_total, 3 forks in $fork_ms ms, nothing left" \
	>>"${FIGURES:-/dev/null}"
