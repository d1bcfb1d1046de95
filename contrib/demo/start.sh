#!/bin/bash
# The first process of the demo's container: a web server beside it, and a loop
# that writes down how far it has counted.
mkdir -p /data
python3 /app/web.py &

# Opened once: what was deleted does not come again.
exec 3>>/data/count
n=0
while true; do
	n=$((n + 1))
	echo $n >&3
	sleep 0.1
done
