#!/bin/bash
# Is this tree as fast as another version of it? usage: tools/speed.sh BASE [CALLS]
# Builds the commit BASE beside the working tree and lets tools/speed.c make CALLS calls (default 20) of a few problems with
# each library, in turns. A line for each problem and pass has the least time and the median of both, and the base's over this
# tree's. Nothing else should run meanwhile; `taskset -c 0-3 tools/speed.sh ...` keeps both to the same processors.
#   BUILD       the build directory of the working tree (default build)
#   CMAKE_ARGS  more options for both builds
set -eu
cd "$(dirname "$0")/.."
[ $# = 1 ] || [ $# = 2 ] || { sed -n '2,7s/^# //p' "$0"; exit 2; }
. tools/two_builds.sh
programs=build-bits/speed
find_base "$1"
mkdir -p "$programs" "${BUILD:-build}"
build_program "$base/source" "$base/build" "$programs/base" tools/speed.c
build_program . "$(cd "${BUILD:-build}" && pwd)" "$programs/head" tools/speed.c
exec python3 tools/speed.py "$programs/base" "$programs/head" "${2:-20}"
