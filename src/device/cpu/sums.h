/* Rows of f32 sums. They lie whole; or, if they end as 16 bits, in halves: the upper ones where the result will be, the lower
 * ones in the workspace.
 *
 *     sum          [ upper | lower ]
 *     result       [ upper ]                   2 bytes, which wait for the result anyway
 *     workspace            [ lower ]           2 bytes instead of 4
 *
 * Kernels bring a row together, compute with it, and part it again: no bit is lost on the way. */
#ifndef RA_DEVICE_CPU_SUMS_H
#define RA_DEVICE_CPU_SUMS_H

#include <string.h>

#include "core/dtype.h"
#include "device/cpu/step.h"

typedef struct ra_sums {
    void *whole; /* f32, f64; NULL: in halves */
    uint16_t *upper, *lower;
} ra_sums;

/* `at`: offset in sums; `to`: in result. */
static inline ra_sums ra_sums_at(ra_dtype dtype, bool parted, const ra_tensor *sums, int64_t at, const ra_tensor *result,
                                 int64_t to) {
    if (!parted) return (ra_sums){.whole = (char *)sums->data + at * ra_state_size(dtype)};
    return (ra_sums){.upper = (uint16_t *)result->data + to, .lower = (uint16_t *)sums->data + at};
}

/* acc of row r of a slab; dq of it; dk or dv of key c. */
static inline ra_sums ra_sums_of_state(const ra_forward_step *step, const ra_slab *slab, int64_t r) {
    return ra_sums_at(slab->problem->dtype, step->halves, &step->acc, ra_slab_at(slab, &step->acc, r), &step->out,
                      ra_slab_at(slab, &step->out, r));
}
static inline ra_sums ra_sums_of_query(const ra_backward_step *step, const ra_slab *slab, int64_t r) {
    return ra_sums_at(slab->problem->dtype, step->halves, &step->dq_acc, ra_slab_at(slab, &step->dq_acc, r), &step->dq,
                      ra_slab_at(slab, &step->dq, r));
}
static inline ra_sums ra_sums_of_key(const ra_backward_step *step, const ra_slab *slab, bool values, int64_t c) {
    const ra_item *item = slab->item;
    const ra_tensor *sums = values ? &item->dv_view : &item->dk_view, *result = values ? &item->dv_result : &item->dk_result;
    return ra_sums_at(slab->problem->dtype, step->halves && result->data, sums, ra_slab_key_at(slab, sums, c), result,
                      ra_slab_key_at(slab, result, c));
}

/* Of f32. */

static inline float ra_join(uint16_t upper, uint16_t lower) {
    const uint32_t bits = (uint32_t)upper << 16 | lower;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void ra_split(float x, uint16_t *upper, uint16_t *lower) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *upper = (uint16_t)(bits >> 16);
    *lower = (uint16_t)bits;
}

static inline void ra_sums_load(float *restrict to, ra_sums s, int64_t count) {
    if (s.whole) {
        memcpy(to, s.whole, (size_t)count * sizeof *to);
        return;
    }
    const uint16_t *restrict upper = s.upper, *restrict lower = s.lower;
    for (int64_t i = 0; i < count; i++) to[i] = ra_join(upper[i], lower[i]);
}

static inline void ra_sums_store(ra_sums s, const float *restrict from, int64_t count) {
    if (s.whole) {
        memcpy(s.whole, from, (size_t)count * sizeof *from);
        return;
    }
    uint16_t *restrict upper = s.upper, *restrict lower = s.lower;
    for (int64_t i = 0; i < count; i++) ra_split(from[i], &upper[i], &lower[i]);
}

/* sums += factor * from */
static inline void ra_sums_add(ra_sums s, const float *restrict from, float factor, int64_t count) {
    if (s.whole) {
        float *restrict to = s.whole;
        for (int64_t i = 0; i < count; i++) to[i] += factor * from[i];
        return;
    }
    uint16_t *restrict upper = s.upper, *restrict lower = s.lower;
    for (int64_t i = 0; i < count; i++)
        ra_split(ra_join(upper[i], lower[i]) + factor * from[i], &upper[i], &lower[i]);
}

#endif
