#!/bin/bash
# ptxas_report.sh COMPILER ... -o OBJECT ...: compiles, and keeps what ptxas -v says of registers, spills and wgmma in
# OBJECT.report.
set -u
object=
for ((i = 1; i <= $#; i++)); do
    [ "${!i}" = -o ] && next=$((i + 1)) && object=${!next}
done
"$@" 2>"$object.report"
status=$?
grep -vE '^ptxas info|bytes stack frame|^$' "$object.report" >&2
exit $status
