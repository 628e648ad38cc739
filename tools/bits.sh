#!/bin/bash
# Does this tree compute the same bits as another version of it? usage: tools/bits.sh BASE
# Builds the commit BASE beside the working tree, runs tools/bits.c (a grid of outputs and gradients) over both libraries on this
# machine and compares every digest. Exits 1 and names the cases that differ. What a machine's processor lacks is not compared.
#   BUILD       the build directory of the working tree (default build)
#   CMAKE_ARGS  more options for both builds
set -eu
cd "$(dirname "$0")/.."
[ $# = 1 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "bits.sh: there is no commit $1"; exit 2; }
build=$(mkdir -p "${BUILD:-build}" && cd "${BUILD:-build}" && pwd)
base=$PWD/build-bits/$commit # kept for the next time

# digests SOURCE BUILD TEXT: builds the library and writes what the grid gives
digests() {
    [ -e "$2/CMakeCache.txt" ] || cmake -S "$1" -B "$2" -G Ninja -DRA_TESTS=OFF ${CMAKE_ARGS:-} --log-level=WARNING
    ninja -C "$2" libringattn.so | tail -1
    ${CC:-cc} -std=c17 -O2 -I"$1/include" tools/bits.c -o "$3.run" "$2/libringattn.so" -Wl,-rpath,"$2" -lpthread -lm
    "$3.run" >"$3"
}

if [ ! -d "$base/source" ]; then
    mkdir -p "$base/source"
    git archive "$commit" | tar -x -C "$base/source"
fi
digests "$base/source" "$base/build" "$base/base.txt"
digests . "$build" "$base/head.txt"

cases=$(wc -l <"$base/head.txt")
if grep -m 3 ' failed: ' "$base/head.txt"; then
    echo "bits.sh: cases that cannot run prove nothing"
    exit 1
fi
differ=$(diff "$base/base.txt" "$base/head.txt" | grep -c '^>' || true)
diff "$base/base.txt" "$base/head.txt" | sed -n 's/^> /differs: /p' | cut -d: -f1-2 | head -20
echo "$cases cases, $differ differ from ${commit:0:7}"
[ "$differ" = 0 ] && [ "$cases" = "$(wc -l <"$base/base.txt")" ]
