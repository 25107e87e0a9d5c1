#!/usr/bin/env bash
# stage.sh TITLE COMMAND…: says what runs, runs it, and says how long it took.
set -u

bold='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' plain=$'\e[0m'; fi

title=$1
shift
printf '%s==> %s%s\n' "$bold" "$title" "$plain"
started=$SECONDS
"$@"
status=$?
if [ $status -eq 0 ]; then
  printf '    %s: done in %d s\n' "$title" $((SECONDS - started))
else
  printf '    %s: failed after %d s\n' "$title" $((SECONDS - started)) >&2
fi
exit $status
