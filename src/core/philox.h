/* Philox4x32-10: the counter-based generator behind dropout and generated data. */
#ifndef RA_CORE_PHILOX_H
#define RA_CORE_PHILOX_H

#include <stdint.h>

/* GPUs draw with the same code. */
#ifdef __CUDACC__
#define RA_EVERYWHERE __host__ __device__
#else
#define RA_EVERYWHERE
#endif

typedef struct ra_philox {
    uint32_t word[4];
} ra_philox;

enum { RA_PHILOX_ROUNDS = 10 };

RA_EVERYWHERE static inline void ra_philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t k0,
                                                 uint32_t k1) {
    uint64_t p0 = (uint64_t)0xD2511F53u * *c0, p1 = (uint64_t)0xCD9E8D57u * *c2;
    *c0 = (uint32_t)(p1 >> 32) ^ *c1 ^ k0;
    *c2 = (uint32_t)(p0 >> 32) ^ *c3 ^ k1;
    *c1 = (uint32_t)p1;
    *c3 = (uint32_t)p0;
}
RA_EVERYWHERE static inline void ra_philox_next_key(uint32_t *k0, uint32_t *k1) {
    *k0 += 0x9E3779B9u;
    *k1 += 0xBB67AE85u;
}

RA_EVERYWHERE static inline ra_philox ra_philox4x32(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < RA_PHILOX_ROUNDS; round++) {
        ra_philox_round(&c0, &c1, &c2, &c3, k0, k1);
        ra_philox_next_key(&k0, &k1);
    }
    ra_philox draw = {{c0, c1, c2, c3}};
    return draw;
}

/* The last word of dropout's counter: the branch, and what does not fit into the words of x and quad. */
RA_EVERYWHERE static inline uint32_t ra_dropout_high(int64_t x, int64_t quad, uint32_t branch) {
    uint32_t high = ((uint32_t)((uint64_t)x >> 32) & 0xfffu) | (((uint32_t)((uint64_t)quad >> 32) & 0xfffu) << 12);
    return (branch & 0xffu) | (high << 8);
}

/* The four draws of dropout for query position x and the lattice places 4*quad .. 4*quad+3 of its keys.
 * row = batch*Hq + head. Only global quantities enter, so the mask is the same on any number of ranks and any device. */
RA_EVERYWHERE static inline ra_philox ra_dropout_draw(uint64_t seed, int64_t x, int64_t quad, uint32_t row, uint32_t branch) {
    return ra_philox4x32(seed, (uint32_t)x, (uint32_t)quad, row, ra_dropout_high(x, quad, branch));
}

#endif
