#!/bin/sh
# Installs what a task needs and this machine lacks, by apt-get as root; anybody else is told what to install.
# usage: tools/setup.sh build|test|ci|fuzz ...      Quiet and quick when nothing is missing.
set -u

missing=""
need() { # need PACKAGE CHECK...: the package is missing when the check fails
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
have() { command -v "$1"; }
have_module() { have pkg-config && pkg-config --exists "$1"; }
# One interpreter has all of these modules. Looking at Debian's directory first saves the half second of an import.
debian_python_has() {
    [ -x /usr/bin/python3 ] || return 1
    for module; do
        [ -d "/usr/lib/python3/dist-packages/$module" ] || return 1
    done
}
python_has() {
    modules=$(echo "$*" | tr ' ' ,)
    debian_python_has "$@" || python3 -c "import $modules" || /usr/bin/python3 -c "import $modules"
}

need_for_build() {
    need gcc have cc
    need libc6-dev test -e /usr/include/stdio.h
    need cmake have cmake
    need ninja-build have ninja
    need pkg-config have pkg-config
    need libjansson-dev have_module jansson
}
need_for_test() {
    need_for_build
    need libcmocka-dev have_module cmocka
    need g++ have c++ # the header is tried from C++ too
    need python3 have python3
    need python3-numpy python_has numpy
    [ ! -d python/tests ] || need "python3-numpy python3-pytest" python_has numpy pytest
    if [ -d src/transport/host/mpi ]; then
        need libopenmpi-dev have mpicc.openmpi
        need openmpi-bin have mpirun.openmpi
        need libmpich-dev have mpicc.mpich
        need mpich have mpirun.mpich
    fi
}
have_fuzzer() { ls "$(clang -print-resource-dir)"/lib/linux/libclang_rt.fuzzer-*.a; }
need_for_fuzz() {
    need_for_build
    need clang have clang
    need libclang-rt-14-dev have_fuzzer
}
need_for_ci() {
    need_for_test
    need python3-venv python3 -c 'import ensurepip, venv'
    need_for_fuzz
    need ccache have ccache
    need qemu-user have qemu-x86_64
    case $(uname -m) in
    x86_64) ;;
    *)
        need gcc-x86-64-linux-gnu have x86_64-linux-gnu-gcc
        need libc6-dev-amd64-cross test -e /usr/x86_64-linux-gnu/include/stdio.h
        ;;
    esac
}

cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- build
for task; do
    case $task in
    build | test | ci | fuzz) "need_for_$task" ;;
    *)
        echo "setup: unknown task '$task'; known are build, test, ci, fuzz" >&2
        exit 2
        ;;
    esac
done
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
missing=${missing% }
[ -n "$missing" ] || exit 0

if ! have apt-get >/dev/null; then
    echo "setup: this machine lacks what Debian calls: $missing" >&2
    echo "setup: there is no apt-get here; install them your way, then run this again" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "setup: missing: $missing" >&2
    echo "setup: installing needs root; run: apt-get install --no-install-recommends $missing" >&2
    exit 1
fi

echo "setup: installing by apt-get: $missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
install() { apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 $missing >"$log" 2>&1; }
# The package lists may be empty or stale: fetch them only when it turns out so.
if ! install && ! { apt-get update -o DPkg::Lock::Timeout=300 >"$log" 2>&1 && install; }; then
    tail -n 20 "$log" >&2
    echo "setup: apt-get could not install: $missing (its last lines are above)" >&2
    exit 1
fi
echo "setup: done"
