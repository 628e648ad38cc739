#!/bin/sh
# A few cases that show where the time goes on this machine. usage: tools/bench.sh build/ringattn
set -eu
ringattn=$1
run() {
    echo "ringattn bench $*"
    "$ringattn" bench "$@"
    echo
}
dilated="--segment-lengths 2048,4096,8192 --dilation-rates 1,2,4"
run --seq 2048 --heads 4 --head-dim 64 --pass both
run --seq 2048 --heads 4 --head-dim 64 --pass both --causal --dtype bf16
run --seq 16384 --heads 6 --head-dim 64 --pass both $dilated
run --seq 16384 --heads 6 --head-dim 64 --pass both $dilated --ring-size 2
