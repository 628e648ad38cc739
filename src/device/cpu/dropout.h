/* The draws of dropout for one row and a run of keys, several at a time: the compiler makes vectors of the loops. */
#ifndef RA_DEVICE_CPU_DROPOUT_H
#define RA_DEVICE_CPU_DROPOUT_H

#include "core/philox.h"
#include "device/cpu/step.h"

enum { RA_DROPOUT_QUADS = 16 }; /* at a time */

/* words = the draws of quads [quad, quad + RA_DROPOUT_QUADS), four each. */
static inline void ra_dropout_quads(uint32_t *restrict words, uint64_t seed, int64_t x, int64_t quad, uint32_t row,
                                    uint32_t branch) {
    uint32_t c0[RA_DROPOUT_QUADS], c1[RA_DROPOUT_QUADS], c2[RA_DROPOUT_QUADS], c3[RA_DROPOUT_QUADS];
    for (int i = 0; i < RA_DROPOUT_QUADS; i++) {
        c0[i] = (uint32_t)x;
        c1[i] = (uint32_t)(quad + i);
        c2[i] = row;
        c3[i] = ra_dropout_high(x, quad + i, branch);
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < RA_PHILOX_ROUNDS; round++) {
        for (int i = 0; i < RA_DROPOUT_QUADS; i++) ra_philox_round(&c0[i], &c1[i], &c2[i], &c3[i], k0, k1);
        ra_philox_next_key(&k0, &k1);
    }
    for (int i = 0; i < RA_DROPOUT_QUADS; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

/* A pair is kept iff its draw is at least this. */
static inline uint32_t ra_dropout_threshold(const ra_problem *problem) { return (uint32_t)(problem->dropout * 4294967296.0); }

/* draws[j] = the draw of row r and key first + j, for j in [begin, end). */
static inline void ra_dropout_draws(uint32_t *restrict draws, const ra_slab *slab, int64_t r, int64_t first, int64_t begin,
                                    int64_t end) {
    const ra_problem *problem = slab->problem;
    const uint32_t row = (uint32_t)(slab->batch * problem->heads + ra_slab_head(slab, r)),
                   branch = (uint32_t)slab->item->branch;
    const int64_t x = ra_slab_pos(slab, r), rate = slab->item->rate;
    uint32_t words[4 * RA_DROPOUT_QUADS];
    int64_t quad = INT64_MIN; /* of words[0] */
    for (int64_t j = begin; j < end;) {
        const int64_t y = slab->k.pos + (first + j) * slab->k.pos_step, lattice = ra_floor_div(y - slab->origin, rate);
        if (quad == INT64_MIN || lattice >> 2 >= quad + RA_DROPOUT_QUADS) {
            quad = lattice >> 2;
            ra_dropout_quads(words, problem->seed, x, quad, row, branch);
        }
        if (slab->k.pos_step != rate) { /* keys are not neighbours on the lattice: one by one */
            draws[j++] = words[lattice - 4 * quad];
            continue;
        }
        const int64_t run = ra_min(end - j, 4 * (quad + RA_DROPOUT_QUADS) - lattice);
        for (int64_t i = 0; i < run; i++) draws[j + i] = words[lattice - 4 * quad + i];
        j += run;
    }
}

#endif
