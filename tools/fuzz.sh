#!/bin/bash
# Builds the fuzzers with clang and the address and undefined behaviour sanitizers and runs each for FUZZ_SECONDS (default 60), or until
# FUZZ_RUNS inputs are through. FUZZERS names those to run (default: all). What they find interesting stays in build-fuzz/corpus/; a
# crash is left beside it and the script exits 1. Leaks are looked for when a fuzzer ends.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build-fuzz
cmake -S . -B $build -G Ninja --log-level=WARNING -DCMAKE_C_COMPILER=clang -DRA_FUZZ=ON -DRA_TESTS=OFF -DRA_MPI=OFF -DRA_CUDA=OFF \
    -DRA_SANITIZE=fuzzer-no-link,address,undefined
ninja --quiet -C $build fuzzers
python3 tests/cli/corpus.py $build/seeds || echo "fuzz: no seeds without python3"
# Short allocation stacks and a small quarantine: a fifth more runs, and an input that fails can be run again with the defaults.
export ASAN_OPTIONS=allocator_may_return_null=1:malloc_context_size=2:quarantine_size_mb=4
status=0
for fuzzer in $build/fuzz/fuzz_*; do
    name=${fuzzer##*/fuzz_}
    [[ -z ${FUZZERS:-} || " $FUZZERS " == *" $name "* ]] || continue
    corpus=$build/corpus/$name
    mkdir -p "$corpus" $build/crashes
    seeds=()
    [ ! -d "$build/seeds/$name" ] || seeds=("$build/seeds/$name")
    echo "fuzz: $name, ${FUZZ_SECONDS:-60} s"
    log=$build/$name.log
    options=(-max_total_time="${FUZZ_SECONDS:-60}" -runs="${FUZZ_RUNS:--1}" -timeout=10 -rss_limit_mb=4096 -detect_leaks=0
        -print_funcs=0 -print_final_stats=1 -artifact_prefix="$build/crashes/$name-")
    # A descriptor takes some hundred bytes: starting with short inputs would only lose time, and so would libFuzzer's weights.
    [[ $name != d* ]] || options+=(-len_control=0 -max_len=200 -entropic=0)
    if "$fuzzer" "${options[@]}" "$corpus" "${seeds[@]}" >"$log" 2>&1; then
        grep -E 'number_of_executed_units' "$log" || true
    else
        tail -n 40 "$log"
        echo "fuzz: $name FAILED; the input is in $build/crashes"
        status=1
    fi
done
exit $status
