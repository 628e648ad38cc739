#!/usr/bin/env bash
# The x86-64 kernels, built by a cross compiler and run by qemu: a Nehalem picks the scalar kernel and passes the kernel tests, a Haswell
# picks avx2 and passes. On x86-64 itself no cross compiler is needed. Skipped where a tool is missing.
set -euo pipefail

skip() {
    echo "skipped: $1"
    exit 77
}

source_dir=${RA_SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}
case $(uname -m) in
x86_64) compiler=${CC:-cc} root=() ;;
*) compiler=x86_64-linux-gnu-gcc root=(-L /usr/x86_64-linux-gnu) ;;
esac
command -v "$compiler" >/dev/null || skip "no $compiler (gcc-x86-64-linux-gnu)"
command -v qemu-x86_64 >/dev/null || skip "no qemu-x86_64 (qemu-user)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=c17 -D_GNU_SOURCE -O2 -ffp-contract=fast -fno-math-errno -DRA_HAVE_X86_KERNELS=1
    -I"$source_dir/src" -I"$source_dir/include" -I"$source_dir/tests" -I"$source_dir/tests/cross")
avx2=(-mavx2 -mfma -mf16c)
avx512=("${avx2[@]}" -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
amx=("${avx512[@]}" -mavx512bf16 -mamx-tile -mamx-bf16 -O0) # qemu has no AMX to run them: that they compile is all

for file in "$source_dir"/src/core/*.c "$source_dir"/src/device/*.c "$source_dir"/src/device/cpu/*.c "$source_dir"/src/device/cpu/*/*.c \
    "$source_dir"/src/device/cuda/*.c "$source_dir"/src/reference/*.c; do
    isa=()
    case $file in
    *_neon.c) continue ;;
    *_avx2.c) isa=("${avx2[@]}") ;;
    *_avx512.c) isa=("${avx512[@]}") ;;
    *_amx.c) isa=("${amx[@]}") ;;
    esac
    object=${file#"$source_dir"/} # files of different folders may have the same name
    "$compiler" "${flags[@]}" "${isa[@]}" -c "$file" -o "$work/${object//\//_}.o"
done
for test in kernel_step kernel_table kernel_rows; do
    "$compiler" "${flags[@]}" "$source_dir/tests/$test.c" "$work"/*.o -o "$work/$test" -lm -lpthread
done

run() { # cpu kernel
    echo "== -cpu $1: expects $2"
    RA_TEST_BEST=$2 qemu-x86_64 "${root[@]}" -cpu "$1" "$work/kernel_table" 2>"$work/log" || { cat "$work/log"; exit 1; }
    for test in kernel_step kernel_rows; do
        RA_TEST_SHARE=60 qemu-x86_64 "${root[@]}" -cpu "$1" "$work/$test" 2>"$work/log" || { cat "$work/log"; exit 1; }
    done
}
run Nehalem scalar
run Haswell avx2
