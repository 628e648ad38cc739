/* Vectors of LANES floats by the compiler's own vector types, and what attention does with them. A kernel's file defines
 *
 *     LANES                    4, 8 or 16
 *     VEC_MAX(a, b)                 the larger; NaN if b is
 *     VEC_CLAMP, VEC_POWER          see exp_of
 *
 * and includes this file.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *(const vec_any *)p; }
INLINE void store(float *p, vec x) { *(vec_any *)p = x; }
INLINE vec splat(float x) { return x - (vec){0}; }

/* exp(x) = 2^n * 2^f with n = round(x / ln 2), |f| <= 1/2, and 2^f by a minimax polynomial: of degree 5, 7.6e-8 off at most, so
 * that the result is within 3e-7 relatively.
 *
 * shifted = 1.5 * 2^23 + n holds n in its low bits. VEC_POWER multiplies p by 2^n. It gives 0 where x <= -88 (VEC_CLAMP may
 * raise x to -88), NaN where x is NaN, and where x > 87 the right value, anything from 2^126 on, or NaN. */
INLINE vec exp_of(vec x) {
    const vec magic = splat(12582912.0f), per_ln2 = splat(1.44269504f);
    x = VEC_CLAMP(x);
    const vec shifted = x * per_ln2 + magic, n = shifted - magic;
#if LANES == 4 /* fmla overwrites its addend: fewer constants to copy, no negation */
    const vec f = x * per_ln2 + (magic - shifted), f2 = f * f;
    const vec p01 = f * splat(6.931469664e-1f) + splat(1.000000072f);
    const vec p23 = f * splat(5.550713876e-2f) + splat(2.402211867e-1f);
    const vec p45 = f * splat(1.327641557e-3f) + splat(9.675598421e-3f);
    const vec p = f2 * (f2 * p45 + p23) + p01;
#else
    const vec f = x * per_ln2 - n;
    vec p = splat(1.327641557e-3f);
    p = p * f + splat(9.675598421e-3f);
    p = p * f + splat(5.550713876e-2f);
    p = p * f + splat(2.402211867e-1f);
    p = p * f + splat(6.931469664e-1f);
    p = p * f + splat(1.000000072f);
#endif
    return VEC_POWER(x, p, n, shifted);
}

INLINE float sum_of(vec x) {
    float lane[LANES];
    store(lane, x);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
}

INLINE float max_of(vec x) {
    float lane[LANES], max = -INFINITY;
    store(lane, x);
    for (int i = 0; i < LANES; i++) max = lane[i] > max ? lane[i] : max;
    return max;
}

static bool all_finite(const float *x, int64_t count) {
    vec zero[4] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int j = 0; j < 4; j++) zero[j] += load(x + i + j * LANES) * splat(0);
    float sum = sum_of(zero[0] + zero[1] + zero[2] + zero[3]);
    for (; i < count; i++) sum += x[i] * 0;
    return sum == 0;
}

/* x[c] = value for the columns of [from, to) that are outside the interval [begin, end) of keys; column 0 is key `first`. */
static inline void mask_row(float *x, int64_t begin, int64_t end, int64_t first, int64_t from, int64_t to, float value) {
    begin = begin - first < from ? from : begin - first > to ? to : begin - first;
    end = end - first > to ? to : end - first < begin ? begin : end - first;
    for (int64_t c = from; c < begin; c++) x[c] = value;
    for (int64_t c = end; c < to; c++) x[c] = value;
}

/* The LANES x LANES transpose by halving: rows i and i+h exchange their halves of every 2h lanes. */
#define PICK_LOW(k, h) ((k) & (h)) ? LANES + (k) - (h) : (k)
#define PICK_HIGH(k, h) ((k) & (h)) ? LANES + (k) : (k) + (h)
#if LANES == 4
#define PICKS(pick, h) pick(0, h), pick(1, h), pick(2, h), pick(3, h)
#elif LANES == 8
#define PICKS(pick, h) pick(0, h), pick(1, h), pick(2, h), pick(3, h), pick(4, h), pick(5, h), pick(6, h), pick(7, h)
#else
#define PICKS(pick, h)                                                                                                         \
    pick(0, h), pick(1, h), pick(2, h), pick(3, h), pick(4, h), pick(5, h), pick(6, h), pick(7, h), pick(8, h), pick(9, h),    \
        pick(10, h), pick(11, h), pick(12, h), pick(13, h), pick(14, h), pick(15, h)
#endif
#define EXCHANGE(h)                                                                                                            \
    for (int i = 0; i < LANES; i++) {                                                                                          \
        if (i & (h)) continue;                                                                                                 \
        const vec low = x[i], high = x[i + (h)];                                                                               \
        x[i] = __builtin_shufflevector(low, high, PICKS(PICK_LOW, h));                                                         \
        x[i + (h)] = __builtin_shufflevector(low, high, PICKS(PICK_HIGH, h));                                                  \
    }

/* dst[j*dst_row + i] = src[i*src_row + j], for i and j below LANES. Bits are moved, whatever they mean. */
INLINE void transpose(float *restrict dst, int64_t dst_row, const float *restrict src, int64_t src_row) {
    vec x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = load(src + i * src_row);
#if LANES > 8
    EXCHANGE(8)
#endif
#if LANES > 4
    EXCHANGE(4)
#endif
    EXCHANGE(2)
    EXCHANGE(1)
    for (int i = 0; i < LANES; i++) store(dst + i * dst_row, x[i]);
}
