#!/bin/bash
# The first process of the demo's container: a web server, and a loop that counts.
mkdir -p /data
python3 /app/web.py &

n=0
while true; do
	n=$((n + 1))
	echo $n >/data/beat
	sleep 0.1
done
