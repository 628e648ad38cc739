#!/bin/bash
# Does this tree compute the same bits as another version of it? usage: tools/bits.sh BASE [PROCESSOR]
# Builds the commit BASE beside the working tree, runs tools/bits.c (a grid of outputs and gradients) over both libraries on this
# machine and compares every digest. Exits 1 and names the cases that differ. What a machine's processor lacks is not compared:
# with a PROCESSOR (aarch64 or x86_64) both are built for that one by Debian's cross compiler and run by qemu, over an hour of one
# core each.
#   BUILD       the build directory of the working tree (default build; for a PROCESSOR build-bits/PROCESSOR)
#   CMAKE_ARGS  more options for both builds
#   EVERY       run only one case in so many (default 1; 5 still meets every pattern with every type and kernel)
set -eu
cd "$(dirname "$0")/.."
[ $# = 1 ] || [ $# = 2 ] || { sed -n '2,9s/^# //p' "$0"; exit 2; }
. tools/two_builds.sh
find_base "$1"
processor=${2:-}
options=()
compiler=${CC:-cc}
emulator=()
if [ -n "$processor" ]; then
    toolchain=$PWD/cmake/${processor/_/-}-linux-gnu.cmake
    [ -e "$toolchain" ] || { echo "bits.sh: no toolchain file for $processor; aarch64 and x86_64 have one"; exit 2; }
    options+=(-DCMAKE_TOOLCHAIN_FILE="$toolchain" -DRA_MPI=OFF -DRA_CUDA=OFF)
    compiler=$processor-linux-gnu-gcc
    emulator=("qemu-$processor" -cpu max -L "/usr/$processor-linux-gnu")
    for tool in "$compiler" "${emulator[0]}"; do
        command -v "$tool" >/dev/null || { echo "bits.sh: $processor needs $tool"; exit 2; }
    done
fi
build=${BUILD:-build${processor:+-bits/$processor}}
build=$(mkdir -p "$build" && cd "$build" && pwd)
suffix=${processor:+-$processor}

# digests SOURCE BUILD TEXT: builds the library and writes what the grid gives
digests() {
    build_program "$1" "$2" "$3.run" tools/bits.c "${options[@]}"
    "${emulator[@]}" "$3.run" "${EVERY:-1}" >"$3"
}

digests "$base/source" "$base/build$suffix" "$base/base$suffix.txt"
digests . "$build" "$base/head$suffix.txt"

cases=$(wc -l <"$base/head$suffix.txt")
if grep -m 3 ' failed: ' "$base/head$suffix.txt"; then
    echo "bits.sh: cases that cannot run prove nothing"
    exit 1
fi
differ=$(diff "$base/base$suffix.txt" "$base/head$suffix.txt" | grep -c '^>' || true)
diff "$base/base$suffix.txt" "$base/head$suffix.txt" | sed -n 's/^> /differs: /p' | cut -d: -f1-2 | head -20
echo "$cases cases, $differ differ from ${commit:0:7}"
[ "$differ" = 0 ] && [ "$cases" = "$(wc -l <"$base/base$suffix.txt")" ]
