# The public headers compile as C++ and as strict C, alone and together, without a warning.
set -eu
cxx=$(command -v "${CXX:-c++}" || true)
if [ -z "$cxx" ]; then
    echo "skipped: no C++ compiler"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for header in "$RA_SOURCE"/include/ringattn*.h; do
    name=$(basename "$header")
    case $name in
    ringattn_mpi.h) command -v mpicc >/dev/null && grep -q '#include <mpi.h>' "$header" && continue ;;
    esac
    printf '#include "%s"\n#include "%s"\nint main() { ra_attention_desc desc; ra_attention_desc_init(&desc); return 0; }\n' \
        "$name" "$name" >"$work/t.cpp"
    cp "$work/t.cpp" "$work/t.c"
    sed -i 's/main()/main(void)/' "$work/t.c"
    for standard in c++11 c++20; do
        "$cxx" -std=$standard -Wall -Wextra -Wpedantic -Werror -I"$RA_SOURCE/include" -c "$work/t.cpp" -o "$work/t.o"
    done
    "${CC:-cc}" -std=c11 -Wall -Wextra -Wpedantic -Wstrict-prototypes -Werror -I"$RA_SOURCE/include" -c "$work/t.c" -o "$work/t.o"
    echo "$name: C++11, C++20 and C11"
done
