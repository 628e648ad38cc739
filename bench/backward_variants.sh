#!/bin/bash
# backward_variants.sh TREE: on a machine with a Hopper GPU: builds variants of the backward kernel in
# parallel (sm90_tuning.cuh), checks each against float64, times them in turns, and prints the clocks of two builds. About 4 minutes.
# SET="name name" picks variants; JOBS (16). Logs and the table go to ${OUT:-/tmp/hopper_out}.
set -u
tree=$(cd "$1" && pwd)
out=${OUT:-/tmp/hopper_out}
work=${WORK:-/tmp/hopper_build}
jobs=${JOBS:-16}
python=${PYTHON:-python3}
logs=$work/logs
mkdir -p "$out" "$work/common" "$logs"
cd "$tree" || exit 1

W="-DRA_BACK_UNIFORM=1"          # descriptors in uniform registers
D="-DRA_BACK_DEFER=1"            # the adder hands a turn on one block later
H="-DRA_BACK_HELP=1"             # adders make the results of dq
O="-DRA_BACK_ORDER=1 -DRA_BACK_SPAN=64" # D = 128: dV early; D = 64: blocks in halves
R="-DRA_BACK_PRODUCER=24 -DRA_BACK_CONSUMER=240"
declare -A flags=(
    [main]=""
    [defer]="$D"
    [order1]="$W $O"
    [order1_defer]="$W $O $D"
    [order1_help]="$W $O $D $H"
    [order1_down]="$W $O $D $H -DRA_BACK_DOWN=1"
    [order1_down_s8]="$W $O $D $H -DRA_BACK_DOWN=1 -DRA_BACK_HEAD_START=8"
    [order1_q3]="$W $O $D $H -DRA_BACK_Q_STAGES=3"
    [order1_b2]="$W $O $D $H -DRA_BACK_DQ_BUFFERS=2"
    [order2]="$W $D $R -DRA_BACK_SPAN=64 -DRA_BACK_ORDER=2"
    [order3]="$W $D $R -DRA_BACK_SPAN=64 -DRA_BACK_ORDER=3"
    [any_order]="$W $O $D -DRA_BACK_SUMS=1"
    [no_sums]="$W $O $D -DRA_BACK_SUMS=0"
    [clocks_main]="-DRA_BACK_CLOCKS=1"
    [clocks_order1]="$W $O $D $H -DRA_BACK_CLOCKS=1"
    [dims]="$W $O $D $H -DRA_BACK_ANY_DIM=1"
)
order="main defer order1 order1_defer order1_help order1_down order1_down_s8 order1_q3 order1_b2 order2 order3 any_order no_sums clocks_main clocks_order1 dims"
unchecked=" any_order no_sums clocks_main clocks_order1 " # wrong on purpose, or not for timing
set_=${SET:-$order}

start=$SECONDS
say() { echo "[$((SECONDS - start)) s] $*"; }

# ---------------------------------------------------------------------------------------------------------------- build
nvcc_flags="-std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler=-fPIC,-fvisibility=hidden -Isrc -Iinclude -Isrc/device/cuda"
{
    for name in $set_; do
        echo "nvcc $nvcc_flags -Xptxas=-v ${flags[$name]} -c src/device/cuda/backward/sm90_backward.cu -o $work/$name.o > $logs/$name.ptxas 2>&1 || echo 'build failed: $name'"
    done
    for source in src/device/cuda/*.cu src/device/cuda/backward/*.cu; do
        base=$(basename "$source" .cu)
        [ "$base" = sm90_backward ] || [ -s "$work/common/$base.o" ] || \
            echo "nvcc $nvcc_flags -c $source -o $work/common/$base.o || echo 'build failed: $base'"
    done
} | xargs -d '\n' -P "$jobs" -n 1 bash -c 2>&1 | grep -v "^$" | head -20
for name in $set_; do
    [ -s "$work/$name.o" ] && nvcc -shared -cudart static -gencode=arch=compute_90a,code=sm_90a "$work"/common/*.o "$work/$name.o" -o "$work/$name.so" &
done
wait
say "built: $(ls "$work"/*.so | wc -l) of $(echo $set_ | wc -w)"
for name in $set_; do # spills and serialised products, kernel by kernel
    echo "$name: $(grep -ohE '[0-9]+ bytes spill stores' "$logs/$name.ptxas" | sort -n | tail -1), serialised $(grep -c 'C75' "$logs/$name.ptxas")"
done > "$out/assembled.txt"
cat "$out/assembled.txt"

# ---------------------------------------------------------------------------------------------------------------- check
right=()
check() {
    local dims=64,128
    [ "$1" = dims ] && dims=8,40,72,96,104
    timeout "${CHECK_S:-60}" "$python" bench/backward_variants.py check "$work/$1.so" --dims $dims > "$logs/$1.check" 2>&1
    echo $? > "$logs/$1.rc"
}
running=0
for name in $set_; do
    case $unchecked in *" $name "*) continue ;; esac
    check "$name" &
    running=$((running + 1))
    [ $((running % 5)) -eq 0 ] && wait
done
wait
for name in $set_; do
    case $unchecked in *" $name "*) continue ;; esac
    rc=$(cat "$logs/$name.rc" 2>/dev/null)
    echo "check $name: rc $rc: $(tail -1 "$logs/$name.check" | cut -c1-150)"
    [ "$rc" = 0 ] && right+=("$name=$work/$name.so")
done
say "checked"
[ -n "${GO:-}" ] && while [ ! -e "$GO" ]; do sleep 0.5; done

# ----------------------------------------------------------------------------------------------------------------- time
for name in any_order no_sums; do [ -s "$work/$name.so" ] && case " $set_ " in *" $name "*) right+=("$name=$work/$name.so") ;; esac; done
dims_so=
keep=()
for pair in "${right[@]}"; do case $pair in dims=*) dims_so=$pair ;; *) keep+=("$pair") ;; esac; done
right=("${keep[@]}")
[ ${#right[@]} -gt 0 ] && timeout 90 "$python" bench/backward_variants.py time "${right[@]}" ${DIMS:+--dims $DIMS} 2>&1 | tee "$out/table.txt"
[ -n "$dims_so" ] && timeout 60 "$python" bench/backward_variants.py time "main=$work/main.so" "$dims_so" --dims 96 --repeat 5 2>&1 | tee "$out/dims.txt"
say "timed"
for name in clocks_main clocks_order1; do
    [ -s "$work/$name.so" ] || continue
    for way in "--tokens 16384" "--tokens 16384 --causal"; do
        timeout 40 "$python" bench/backward_variants.py clocks "$work/$name.so" $way
    done
done 2>&1 | tee "$out/clocks.txt"
tar czf "$out/logs.tgz" -C "$work" logs
say "done"
