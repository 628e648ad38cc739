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

O="-DRA_BACK_ASK=0 -DRA_BACK_DQ_BUFFERS=1" # descriptors in uniform registers; D = 128: dV early; D = 64: halves
D="-DRA_BACK_DEFER=1"            # the adder hands a turn on one block later
N="-DRA_BACK_DOWN=1"
R="-DRA_BACK_PRODUCER=24 -DRA_BACK_CONSUMER=240"
declare -A flags=(
    [main]="$O"
    [ask]="-DRA_BACK_DQ_BUFFERS=1"
    [b2]="-DRA_BACK_ASK=0"
    [ask_b2]=""
    [ask_b2_s8]=" -DRA_BACK_HEAD_START=8"
    [ask_b2_s16]=" -DRA_BACK_HEAD_START=16"
    [ask_b2_down]=" $N"
    [ask_b2_down_s8]=" $N -DRA_BACK_HEAD_START=8"
    [ask_b2_down_s16]=" $N -DRA_BACK_HEAD_START=16"
    [ask_down_s16]="-DRA_BACK_DQ_BUFFERS=1 $N -DRA_BACK_HEAD_START=16"
    [defer_b2_down_s8]="$D -DRA_BACK_ASK=0 $N -DRA_BACK_HEAD_START=8"
    [order2_ask_b2]="$R -DRA_BACK_ORDER=2"
    [any_order]=" -DRA_BACK_SUMS=1"
    [no_sums]=" -DRA_BACK_SUMS=0"
    [clocks]=" -DRA_BACK_CLOCKS=1"
)
order="main ask b2 ask_b2 ask_b2_s8 ask_b2_s16 ask_b2_down ask_b2_down_s8 ask_b2_down_s16 ask_down_s16 defer_b2_down_s8 order2_ask_b2 any_order no_sums clocks"
unchecked=" any_order no_sums clocks " # wrong on purpose, or not for timing
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
    [ "$1" = main ] && dims=8,40,64,72,96,104,128
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
[ ${#right[@]} -gt 0 ] && timeout 90 "$python" bench/backward_variants.py time "${right[@]}" ${DIMS:+--dims $DIMS} 2>&1 | tee "$out/table.txt"
[ -s "$work/main.so" ] && timeout 60 "$python" bench/backward_variants.py time "main=$work/main.so" --dims 96 --repeat 5 2>&1 | tee "$out/dims.txt"
say "timed"
for name in clocks; do
    [ -s "$work/$name.so" ] || continue
    for way in "--tokens 16384" "--tokens 16384 --causal"; do
        timeout 40 "$python" bench/backward_variants.py clocks "$work/$name.so" $way
    done
done 2>&1 | tee "$out/clocks.txt"
tar czf "$out/logs.tgz" -C "$work" logs
say "done"
