#!/bin/bash
# test_gpu.sh BUILD [part...]: what needs a GPU, over the build in BUILD.
# Parts: kernels python cli memcheck racecheck (default: all); groups, which kernels includes: Python on several ranks; bits and
# faults, which kernels includes in small: a thousand runs of each shape, and ranks lost at every step.
# JOBS (4) tests run beside each other.
set -u
build=$1
shift
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
export RINGATTN_CUDA_LIBRARY=$build/libringattn_cuda.so RINGATTN_LIBRARY=$build/libringattn.so RINGATTN=$build/ringattn
export PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1
failed=() beside=("$python" tests/gpu/beside.py --jobs "${JOBS:-4}")

# check NAME COMMAND...
check() {
    echo "== $1"
    local name=$1
    shift
    "$@" || failed+=("$name")
}

# sanitize TOOL LIBRARY TEST...: tests on tensors that an instrumented kernel is done with in seconds
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "skipped: compute-sanitizer was not found"; return 0; }
    local tool=$1 library=$2 tests=()
    shift 2
    for name in "$@"; do tests+=(-k "$name"); done
    RINGATTN_CUDA_LIBRARY=$library RINGATTN_GPU_SMALL=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${beside[@]}" "${tests[@]}" \
        --under "compute-sanitizer --tool $tool --error-exitcode 1 --kernel-regex kns=2ra"
}
memcheck() {
    sanitize memcheck "$RINGATTN_CUDA_LIBRARY" hoppers head_dimension lengths windows masked_nan masked_row dilated residues mix \
        outgrow steps take_turns few_keys general anywhere every_height
}
racecheck() {
    cmake --build "$build" --target ringattn_cuda_racecheck >/dev/null || return 1
    sanitize racecheck "$build/racecheck/libringattn_cuda_racecheck.so" hoppers lengths windows mix general_kernel_meets every_height
}

for part in "${@:-kernels python cli memcheck racecheck}"; do
    for name in $part; do
        case $name in
        kernels) check kernels "${beside[@]}" ;;
        python) check python "$python" -m pytest -q -p no:cacheprovider python/tests/test_cuda*.py ;;
        groups) check groups "${beside[@]}" --pattern test_python_groups.py ;;
        bits) check bits "$python" tests/gpu/same_bits.py ;;
        faults) check faults "$python" tests/gpu/faults.py ;;
        cli) check cli "${beside[@]}" --pattern cli.py ;;
        memcheck | racecheck) check "$name" "$name" ;;
        *) echo "test_gpu.sh: no part '$name'" >&2 && exit 2 ;;
        esac
    done
done
[ ${#failed[@]} -eq 0 ] && echo "all parts passed" && exit 0
echo "failed: ${failed[*]}"
exit 1
