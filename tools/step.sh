#!/bin/sh
# Runs a command, and says what it does and every ten seconds for how long: step.sh TEXT COMMAND...
text=$1
shift
began=$(date +%s)
echo "$text ..."
# the clock holds no output open, which the reader of a pipe would wait for
while sleep 10 > /dev/null 2>&1; do
	echo "$text: $(($(date +%s) - began)) s so far"
done &
clock=$!
trap 'kill $clock 2> /dev/null' EXIT
trap 'exit 130' INT TERM
"$@"
status=$?
took=$(($(date +%s) - began))
if [ $status = 0 ]; then
	echo "$text: done after $took s"
else
	echo "$text: failed with status $status after $took s" >&2
fi
exit $status
