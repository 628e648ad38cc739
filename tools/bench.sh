#!/bin/sh
# A few cases that show where the time goes on this machine, in about a minute. usage: tools/bench.sh build
set -eu
build=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/.." && pwd)
run() {
    echo "ringattn bench $*"
    "$build/ringattn" bench "$@"
    echo
}
dilated="--segment-lengths 2048,4096,8192 --dilation-rates 1,2,4"
if [ -x "$build/ringattn" ]; then
    run --seq 2048 --heads 4 --head-dim 64 --pass both
    run --seq 2048 --heads 4 --head-dim 64 --pass both --causal --dtype bf16
    run --seq 16384 --heads 6 --head-dim 64 --pass both $dilated
    run --seq 16384 --heads 6 --head-dim 64 --pass both $dilated --ring-size 2
else
    echo "ringattn bench left out: the command line was not built (jansson is missing)"
fi

echo "The best kernel for each type, alone:"
kernel=$("$build/bench_kernels" 16 1 2>/dev/null | awk '$2 == "f32" { print $1; exit }')
BENCH_SECONDS=0.2 "$build/bench_kernels" 2048 1 "$kernel"
echo

echo "Beside PyTorch (bench/cpu_peers.py has more):"
RINGATTN_LIBRARY="$build/libringattn.so" PYTHONPATH="$source/python" "${PYTHON:-python3}" "$source/bench/cpu_peers.py" --quick || true
