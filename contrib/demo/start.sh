#!/bin/bash
# The first process of the demo's container: a web server beside it, and a loop
# that writes down how far it has counted.
mkdir -p /data
python3 /app/web.py &

n=0
while true; do
	n=$((n + 1))
	echo $n >>/data/count
	sleep 0.1
done
