#!/bin/bash
# Suites that inject faults and draw random cases, again and again with new seeds, for SOAK_SECONDS (1800): soak.sh BUILD.
# A failure, a leak (with a sanitizer's build) or a hang ends it, with the seed to repeat it.
set -u
build=$1
suites="transport_faults transport_ring transport_deadlock transport_nomem ring_alloc ring_random ring_bits attack_calls
    attack_overlap attack_fork"
end=$((SECONDS + ${SOAK_SECONDS:-1800}))
rounds=0
while [ $SECONDS -lt $end ]; do
    seed=$((RANDOM * 32768 + RANDOM))
    for suite in $suites; do
        [ $SECONDS -lt $end ] || break
        if ! RINGATTN_SEED=$seed RINGATTN_DEBUG=none ASAN_OPTIONS=allocator_may_return_null=1 timeout 900 \
            "$build/tests/$suite" >"$build/soak.log" 2>&1; then
            cat "$build/soak.log"
            echo "soak: $suite fails or hangs; again with RINGATTN_SEED=$seed $build/tests/$suite"
            exit 1
        fi
        rounds=$((rounds + 1))
    done
done
echo "soak: $rounds suites in $SECONDS s: no failure and no hang"
