#!/bin/bash
# Rules of the source that a compiler does not check: which part may include which, and the one way to do each thing.
# Prints every breach as file:line and exits 1 if there is one.
set -u
cd "$(dirname "$0")/.." || exit 1
breaches=$(mktemp)
trap 'rm -f "$breaches"' EXIT

# A part, and the directories of src whose headers its files may include. Public headers and files beside it are always allowed.
rules="
src/core         core
src/geometry     core geometry
src/plan         core geometry device plan
src/device       core device
src/transport    core transport
src/ring         core geometry plan device transport ring
src/reference    reference
src/io           core io
cli              core io reference
"

sources() { find "$@" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | sort; }

while read -r part allowed; do
    [ -n "$part" ] && [ -d "$part" ] || continue
    for file in $(sources "$part"); do
        here=$(dirname "$file")
        # "line:header" of each quoted include
        while IFS=: read -r line header; do
            [ -n "$header" ] || continue
            case $header in
            ringattn*.h) continue ;; # public headers
            esac
            [ -e "$here/$header" ] && continue
            root=${header%%/*}
            case " $allowed " in
            *" $root "*) [ "$root" != "$header" ] && continue ;;
            esac
            echo "$file:$line: $part may not include \"$header\"" >>"$breaches"
        done < <(sed -n '/^ *# *include *"/{=;s/.*"\(.*\)".*/\1/p}' "$file" | paste -d: - -)
    done
done <<<"$rules"

# forbid PATTERN SENTENCE PATH...: no line of these files, comments apart, may match
forbid() {
    pattern=$1 sentence=$2
    shift 2
    for file in $(sources "$@"); do
        grep -nE "$pattern" "$file" | grep -vE '^[0-9]+: *(/\*|\*|//)' | sed "s|^\([0-9]*\):.*|$file:\1: $sentence|" >>"$breaches"
    done
}
library="src/core src/geometry src/plan src/device src/ring src/transport"
forbid '(^|[^a-z_])(malloc|calloc|realloc|strdup|strndup|asprintf) *\(' "memory comes from ra_alloc" $library
forbid '(^|[^a-z_])(printf|puts|putchar|vprintf) *\(|[^a-z_]stdout[^a-z_]' "the library writes nothing to stdout" $library src/io
forbid '(^|[^a-z_.>])(sigaction|signal|exit|abort) *\(' "the library installs no signal handler and never ends the process" $library src/io
forbid '(^|[^a-z_])(sprintf|strcat|gets|alloca|atoi|atol|strtok) *\(' "unbounded or unchecked" $library src/io cli
forbid '(^|[^A-Za-z])(TODO|FIXME|XXX)([^A-Za-z]|$)' "unfinished" include src cli tests
forbid '^ *# *include *"device/(cpu|cuda|kernel|rows|state)' "device/device.h is all there is to know of a device" src/plan src/ring
forbid 'RA_DEVICE_(CPU|CUDA)|[-]>kind' "which device it is, is the device's affair" src/plan src/ring
forbid 'RA_(LINK|FRAME)_HEADER' "headers are the link's" src/plan src/ring
forbid '(^|[^a-z_])(ra_comm|ra_link[a-z_]*|ra_transfer|ra_pool[a-z_]*) *[*(]' "a plan knows neither peers nor memory" src/plan
forbid 'pthread_create *\(' "threads come from ra_thread_start, which keeps the program's signals from them" \
    $(sources $library | grep -v '^src/core/thread.h$')
for file in $(sources include src cli tests fuzz examples bench); do
    awk 'length > 128 { print FILENAME ":" FNR ": longer than 128 columns" }' "$file" >>"$breaches"
done

if [ -s "$breaches" ]; then
    cat "$breaches"
    echo "check: $(wc -l <"$breaches") breaches"
    exit 1
fi
echo "check: include rules and source rules hold"
