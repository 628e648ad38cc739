# Sourced by bits.sh and speed.sh, which compare the working tree with another version of it.

# find_base COMMIT: sets commit, its full name, and base, a folder with its source/ and room for more that is kept for the next time.
find_base() {
    commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "${0##*/}: there is no commit $1"; exit 2; }
    base=$PWD/build-bits/$commit
    [ -d "$base/source" ] || { mkdir -p "$base/source" && git archive "$commit" | tar -x -C "$base/source"; }
}

# build_program SOURCE BUILD PROGRAM FILE [CMAKE-OPTION...]: the library of SOURCE, and the PROGRAM of the C file FILE over it.
build_program() {
    local source=$1 build=$2 program=$3 file=$4
    shift 4
    [ -e "$build/CMakeCache.txt" ] || cmake -S "$source" -B "$build" -G Ninja -DRA_TESTS=OFF ${CMAKE_ARGS:-} "$@" --log-level=WARNING
    ninja -C "$build" libringattn.so | tail -1
    "${compiler:-${CC:-cc}}" -std=c17 -D_GNU_SOURCE -O2 -I"$source/include" "$file" -o "$program" "$build/libringattn.so" \
        -Wl,-rpath,"$build" -lpthread -lm
}
