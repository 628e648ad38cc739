#!/bin/bash
# The installed tree serves a stranger: by find_package and by pkg-config, from C and C++, shared and static; and it exports
# nothing but the functions of the public headers.
set -euo pipefail
[ "${RA_SANITIZED:-}" = "" ] || { echo "skipped: consumers are built without the sanitizer's run-time"; exit 77; }
command -v c++ >/dev/null || { echo "skipped: no C++ compiler"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
cmake --install "$RA_BUILD" --prefix "$prefix" >/dev/null
libdir=$(dirname "$(find "$prefix" -name libringattn.a)")

echo "exports are exactly the functions of the public headers"
cat "$prefix"/include/*.h | grep -o '\bra_[a-z0-9_]* *(' | tr -d ' (' | sort -u >"$work/named"
nm -D --defined-only "$libdir/libringattn.so" | awk '$2 == "T" || $2 == "D" || $2 == "B" || $2 == "R" { sub(/@.*/, "", $3); print $3 }' |
    sort -u >"$work/exported"
sed -n 's/^RA_API.*[ *]\(ra_[a-z0-9_]*\)(.*/\1/p' "$prefix/include/ringattn.h" | sort -u >"$work/promised"
[ -s "$work/promised" ]
unexpected=$(comm -23 "$work/exported" "$work/named")
absent=$(comm -23 "$work/promised" "$work/exported")
[ -z "$unexpected" ] || { echo "exported, but in no public header: $unexpected"; exit 1; }
[ -z "$absent" ] || { echo "in ringattn.h, but not exported: $absent"; exit 1; }

echo "the shared library has its SONAME"
readelf -d "$libdir/libringattn.so" | grep -q 'SONAME.*libringattn\.so\.[0-9]*\]'

echo "find_package"
cmake -S "$RA_SOURCE/tests/install" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 &&
    ninja -C "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
for program in c_shared c_static cxx_shared cxx_static; do
    "$work/build/$program" || { echo "$program failed"; exit 1; }
done

echo "pkg-config, as strict C and C++"
export PKG_CONFIG_PATH=$libdir/pkgconfig
strict="-Wall -Wextra -Wpedantic -Werror"
cc -std=c11 $strict $(pkg-config --cflags ringattn) "$RA_SOURCE/tests/install/consumer.c" -o "$work/c" $(pkg-config --libs ringattn) -lm
LD_LIBRARY_PATH=$libdir "$work/c"
c++ -std=c++17 $strict $(pkg-config --cflags ringattn) "$RA_SOURCE/tests/install/consumer.cpp" -o "$work/cxx" $(pkg-config --libs ringattn)
LD_LIBRARY_PATH=$libdir "$work/cxx"
mkdir "$work/static" && ln -s "$libdir/libringattn.a" "$work/static/"
cc -std=c11 $(pkg-config --cflags ringattn) "$RA_SOURCE/tests/install/consumer.c" -o "$work/c_static" -L"$work/static" \
    $(pkg-config --static --libs ringattn | sed 's/-L[^ ]*//')
"$work/c_static"

echo "the examples, by the line that the C API's page gives"
for example in attention ring_threads; do
    cp "$RA_SOURCE/examples/$example.c" "$work/program.c"
    line=$(sed -n 's/^cc program\.c /cc program.c /p' "$RA_SOURCE/docs/c-api.md")
    [ -n "$line" ]
    (cd "$work" && eval "$line -o $example" && LD_LIBRARY_PATH=$libdir "./$example" >/dev/null) || { echo "$example failed: $line"; exit 1; }
done

if [ -x "$prefix/bin/ringattn" ]; then
    echo "the installed command line runs"
    "$prefix/bin/ringattn" --version | grep -q "$(pkg-config --modversion ringattn)"
    echo "it finds the installed modules, wherever the tree lies"
    mv "$prefix" "$work/moved"
    unset RINGATTN_MODULE_PATH
    for module in "$work"/moved/lib*/ringattn/ringattn_mpi_*.so "$work"/moved/lib/*/ringattn/ringattn_mpi_*.so; do
        [ -e "$module" ] || continue
        name=$(basename "$module" .so)
        "$work/moved/bin/ringattn" info >"$work/info"
        grep -q "^  ${name#ringattn_mpi_} .*MPI" "$work/info" || { cat "$work/info"; echo "$module is not found"; exit 1; }
    done
fi
