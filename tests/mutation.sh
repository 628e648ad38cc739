# Mutation check: would the suite notice? Each mutant is one small mistake in the library (a comparison, an offset, a merge, ...), made in a
# copy of the tree. The suite must pass on the copy as it is and fail on every mutant. A pattern that does not match exactly once is an
# error too: it has to follow the code.
set -eu
if [ "${RINGATTN_LONG:-0}" = 0 ]; then
    echo "skipped: builds the library some 20 times; set RINGATTN_LONG=1"
    exit 77
fi
source_tree=${RA_SOURCE:-$(cd "$(dirname "$0")/.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
(cd "$source_tree" && cp -r CMakeLists.txt bench cmake include src tests "$work/tree/")

# The suite, quick to notice first.
suite="plan_shards plan_coverage ring_exact ring_gradient plan_counts ring_schedules ring_random ring_small"
unset RINGATTN_LONG
export RINGATTN_EFFORT=30 RINGATTN_WATCHDOG=30

build() {
    # shellcheck disable=SC2086
    ninja -C "$work/build" $suite >"$work/log" 2>&1
}

# Prints the first test that fails; succeeds if there is one.
notices() {
    for test in $suite; do
        if ! timeout 300 "$work/build/tests/$test" >"$work/log" 2>&1; then
            echo "$test"
            return 0
        fi
    done
    return 1
}

cmake -S "$work/tree" -B "$work/build" -G Ninja -DRA_MPI=OFF -DRA_CUDA=OFF -DRA_WERROR=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
build || { tail -40 "$work/log"; exit 1; }
if test=$(notices); then
    tail -40 "$work/log"
    echo "$test fails without any mutation"
    exit 1
fi

mutants=0
bad=0
# mutate WHAT FILE OLD NEW: fixed strings, OLD on one line.
mutate() {
    file=$work/tree/$2
    mutants=$((mutants + 1))
    count=$(OLD=$3 perl -ne '$n += () = /\Q$ENV{OLD}\E/g; END { print $n + 0 }' "$file")
    if [ "$count" != 1 ]; then
        echo "PATTERN   $1: matches $count times in $2: $3"
        bad=$((bad + 1))
        return
    fi
    cp -p "$file" "$work/kept"
    OLD=$3 NEW=$4 perl -pi -e 's/\Q$ENV{OLD}\E/$ENV{NEW}/' "$file"
    if ! build; then
        tail -5 "$work/log"
        echo "NO BUILD  $1"
        bad=$((bad + 1))
    elif test=$(notices); then
        echo "noticed   $1 (by $test)"
    else
        echo "SURVIVED  $1"
        bad=$((bad + 1))
    fi
    cp "$work/kept" "$file" # newer than the mutant's objects, so it is built again
}

mutate "causal stops one key early" src/core/mask.h \
    'ra_floor_div(right - ahead, step) + 1' 'ra_floor_div(right - ahead, step)'
mutate "causal sees one key of the future" src/geometry/config.c 'if (desc->causal) c.right = 0;' 'if (desc->causal) c.right = 1;'
mutate "a key range begins one lattice point early" src/core/item.h \
    'ra_ceil_div(p->key_begin[b] - kpos, kstep)' 'ra_floor_div(p->key_begin[b] - kpos, kstep)'
mutate "the offset of a branch is the next one's" src/geometry/pattern.c 'class.offset = i % rate;' 'class.offset = (i + 1) % rate;'
mutate "the offset of a head is the next one's" src/geometry/pattern.c 'class.offset = g % rate;' 'class.offset = (g + 1) % rate;'
mutate "head blocks are cut elsewhere" src/geometry/pattern.c 'class.offset = g / block;' 'class.offset = g % rate;'
mutate "the lattice starts with the sequence, not the segment" src/geometry/pattern.c \
    'ra_mod(origin + class->offset - first, class->rate)' 'ra_mod(class->offset - first, class->rate)'
mutate "a residue loses its last key" src/geometry/items.c \
    '(rows.count - 1 - first) / period + 1 : 0' '(rows.count - 1 - first) / period : 0'
mutate "dropout forgets which segment it is in" src/geometry/items.c '.origin = ring->shift}' '.origin = 0}'
mutate "the scalar kernel does not rescale the denominator" src/device/cpu/scalar/scalar_tile.inc.h \
    's->l[r] = s->l[r] * shrink + l;' 's->l[r] = s->l[r] + l;'
mutate "merging does not rescale the denominator" src/device/cpu/merge.c \
    'l[at] = l[at] * one + l2[at] * two;' 'l[at] = l[at] + l2[at];     '
mutate "dlse has the wrong sign" src/device/cpu/rows.c 'sum -= load(&job->c' 'sum += load(&job->c'
mutate "lse forgets the maximum" src/device/cpu/rows.c 'm + log(l)' 'log(l)'
mutate "buckets go the longer way" src/geometry/route.c 'bool goes_down = down < up;' 'bool goes_down = down > up;'
mutate "zigzag gives the late run to its neighbour" src/geometry/shard.c '2 * (int64_t)ranks - 1 - rank)' '(int64_t)ranks + rank)'
mutate "the last bucket that is needed stays at home" src/geometry/route.c 'ra_ceil_div(*end, ring->cap)' '*end / ring->cap'
mutate "gradients of the members before are lost" src/device/cpu/pack.c \
    'run(queue, ra_ceil_div(count, TASK), add_task, &job);' '(void)queue, (void)job, (void)add_task;'
mutate "the vector kernels do not rescale what came in" src/device/cpu/fma/fma_few.inc.h 'into->l[i] * (double)mine' 'into->l[i]'
mutate "dropout draws from the neighbouring word" src/device/cpu/dropout.h 'words[lattice - 4 * quad + i]' \
    'words[(lattice - 4 * quad + i) ^ 1]'
mutate "of a group of query heads one alone counts as used" src/geometry/used.c 'places = neighbours ? 1 : group;' 'places = 1;'
mutate "the gradients of unused rows stay as they were" src/device/cpu/rows.c \
    'if (job->gaps) memset(by_image ? image : out, 0, (size_t)bytes);' ''
mutate "branches that share a head share the sums of their rows" src/geometry/used.c \
    'modulus = ra_gcd(modulus, sets[i].rows.start - sets[j].rows.start);' ';'

echo "$mutants mutants, $bad of them not noticed or not made"
[ "$bad" = 0 ]
