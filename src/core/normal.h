/* Generated data: numbers about normal, with mean 0 and variance 1, that are the same on every machine. */
#ifndef RA_CORE_NORMAL_H
#define RA_CORE_NORMAL_H

#include "core/philox.h"

/* The sum of four uniform 16-bit numbers, centred and scaled: near enough to normal. */
RA_EVERYWHERE static inline float ra_normal(uint32_t a, uint32_t b) {
    int32_t sum = (int32_t)(a & 0xffff) + (int32_t)(a >> 16) + (int32_t)(b & 0xffff) + (int32_t)(b >> 16);
    return (float)(sum - 2 * 65535) * 2.6429e-5f; /* 1 / (65536 / sqrt(3)) */
}

/* Elements 2 * pair and 2 * pair + 1 of a tensor. */
typedef struct ra_normal_pair {
    float element[2];
} ra_normal_pair;
RA_EVERYWHERE static inline ra_normal_pair ra_normal_draw(uint64_t seed, uint32_t tensor, uint64_t pair) {
    const ra_philox draw = ra_philox4x32(seed, (uint32_t)pair, (uint32_t)(pair >> 32), tensor, 0x64617461u);
    ra_normal_pair made = {{ra_normal(draw.word[0], draw.word[1]), ra_normal(draw.word[2], draw.word[3])}};
    return made;
}

#endif
