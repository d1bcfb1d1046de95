#!/bin/bash
# A walk through what statefork does, on a containerd of its own that is gone
# afterwards. Read it as a tutorial: "run" shows a command as one would type it,
# and runs it; "check" ends the demo unless two things are the same.
#
# In the container are a web server that remembers values in its memory, writes
# them to SQLite and has 64 MiB of noise that only it knows, and a loop that counts.
set -euo pipefail

if [[ -z ${STATEFORK_TESTBED:-} ]]; then
	cd "$(dirname "$0")/../.."
	[[ -n ${FIGURES:-} ]] || exec contrib/setup/closing.sh demo contrib/demo/demo.sh
	command -v go >/dev/null || { echo "go is not in the path: install Go 1.26 or newer" >>"$FIGURES" && exit 1; }
	exec go run -tags seccomp ./integration/sandbox -image debian contrib/demo/demo.sh
fi
app=$(cd "$(dirname "$0")" && pwd)
# The sandbox's containerd is not where statefork looks for it by itself.
statefork() { command statefork --state "$STATEFORK_STATE" "$@"; }
source "$app/lib.sh"

title "A container under the statefork runtime. Nothing else about it is special."
run nerdctl run -d --name web --runtime io.statefork.v1 --snapshotter statefork --net none \
	-v "$app:/app:ro" localhost/debian /app/start.sh
id=$said
await "the server answers" nerdctl exec web /app/ask
run nerdctl exec web /app/ask plan "keep it"
run nerdctl exec web /app/ask
before=$said
counted=$(nerdctl exec web tail -n 1 /data/count)

title "A session: a shell that keeps its directory and variables from one command to the next."
run statefork exec web -- 'cd /data; note="the plan is good"'
# shellcheck disable=SC2016 # the session's variables
remember='echo "$PWD: $note"'
run statefork exec web -- "$remember"
noted=$said
check "what the shell remembers" "$noted" "/data: the plan is good"

title "A checkpoint: files, processes, memory and sockets, in one freeze. The container goes on."
run statefork checkpoint web --name clean
checkpoint_ms=$ms
check "the server's memory after the checkpoint" "$(nerdctl exec web /app/ask)" "$before"

title "A bad idea: another plan, the data deleted, the server killed."
run nerdctl exec web /app/ask plan "start all over"
run statefork exec web -- 'cd /; note="the plan is bad"'
run nerdctl exec web pkill -9 python3
run nerdctl exec web rm -rf /data /usr/bin/sqlite3
if run nerdctl exec web /app/ask; then short "the server still answers"; fi
if run nerdctl exec web ls /data; then short "the data is still there"; fi

title "Back to the node, in place: the same container, and the server as it was."
run statefork restore web clean
restore_ms=$ms
run nerdctl inspect -f '{{.Id}} {{.State.Status}}' web
check "the container's id and status" "$said" "$id running"
run nerdctl exec web /app/ask
check "the server's memory" "$said" "$before"
run statefork exec web -- "$remember"
check "what the shell remembers" "$said" "$noted"
run nerdctl exec web sqlite3 /data/web.db 'PRAGMA integrity_check; SELECT count(*) FROM writes'
check "the database" "$said" $'ok\n1'
# Were the loop's memory and its file not from the same moment, a number would
# be missing or there twice.
# shellcheck disable=SC2016 # awk's variables
run nerdctl exec web awk '$1 != NR { exit 1 } END { print NR }' /data/count
restored=$said
((restored >= counted)) || short "the loop has counted to $restored, and had been at $counted"
await "the loop counts on" nerdctl exec web sh -c "[ \$(wc -l </data/count) -gt $restored ]"

title "Three siblings from the same point. Each goes its own way."
run statefork fork web@clean -n 3 --name try
fork_ms=$((ms / 3))
for i in 1 2 3; do
	run nerdctl exec "try-$i" /app/ask plan "idea $i"
done
for i in 1 2 3; do
	check "what try-$i remembers" "$(nerdctl exec "try-$i" /app/ask)" "${before/keep it/idea $i}"
	check "what the shell of try-$i remembers" "$(statefork exec "try-$i" -- "$remember")" "$noted"
	check "what try-$i has written" \
		"$(nerdctl exec "try-$i" sqlite3 /data/web.db 'SELECT value FROM writes')" $'keep it\n'"idea $i"
done
check "what web remembers" "$(nerdctl exec web /app/ask)" "$before"

title "The tree: nodes, where the container stands, and who came from where."
run statefork checkpoint web --name later
run statefork restore web clean
run statefork checkpoint web --name another-way
run statefork tree web
check "the head" "$(grep -c 'another-way.*<- head' <<<"$said")" 1
check "forks in the tree" "$(grep -c '(fork) try-[123] *running' <<<"$said")" 3

title "Everything goes with its containers: layers, process images, names."
run nerdctl rm -f web try-1 try-2 try-3
run statefork ls
check "containers that are left" "$(nerdctl ps --all --quiet)" ""

figures "checkpoint $checkpoint_ms ms, restore $restore_ms ms, fork $fork_ms ms each, $checks checks"
