/* The operations of vec.h and of AMX tiles in plain C, so that the kernels of another processor can be tested on this one. */
#ifndef CROSS_VEC_PORTABLE_H
#define CROSS_VEC_PORTABLE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"

#define LANES 16

typedef float portable_vec __attribute__((vector_size(64)));
typedef int32_t portable_words __attribute__((vector_size(64)));
typedef uint16_t portable_halves __attribute__((vector_size(64)));

static inline portable_vec portable_max(portable_vec a, portable_vec b) {
    for (int i = 0; i < 16; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
/* vscalefps under a mask of "x not less or equal -87" */
static inline portable_vec portable_power(portable_vec x, portable_vec p, portable_vec n) {
    for (int i = 0; i < 16; i++)
        p[i] = !(x[i] <= -87.0f) ? ldexpf(p[i], n[i] > 1000 ? 1000 : n[i] < -1000 ? -1000 : (int)n[i]) : 0.0f;
    return p;
}
static inline portable_vec portable_load_f16(const uint16_t *p) {
    portable_vec x = {0};
    for (int i = 0; i < 16; i++) x[i] = ra_f16_to_f32(p[i]);
    return x;
}
static inline void portable_store_f16(uint16_t *p, portable_vec x) {
    for (int i = 0; i < 16; i++) p[i] = ra_f32_to_f16(x[i]);
}
static inline portable_halves portable_to_bf16(portable_vec low, portable_vec high) {
    portable_halves x = {0};
    for (int i = 0; i < 32; i++) x[i] = ra_f32_to_bf16(i < 16 ? low[i] : high[i - 16]);
    return x;
}
/* vreduceps and vscalefps */
static inline portable_vec portable_fraction(portable_vec x) {
    for (int i = 0; i < 16; i++) x[i] = isinf(x[i]) ? 0 : x[i] - floorf(x[i]);
    return x;
}
static inline portable_vec portable_scale(portable_vec p, portable_vec x) {
    for (int i = 0; i < 16; i++) p[i] = isnan(x[i]) ? x[i] : ldexpf(p[i], (int)fmaxf(-1000, fminf(1000, floorf(x[i]))));
    return p;
}
static inline portable_vec portable_fma(portable_vec x, portable_vec y, portable_vec z) {
    for (int i = 0; i < 16; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return z;
}
static inline int portable_any_has(portable_words x, int32_t bit) {
    int any = 0;
    for (int i = 0; i < 16; i++) any |= x[i] & bit;
    return any != 0;
}
static inline portable_vec portable_only(uint32_t bits, portable_vec x) {
    for (int i = 0; i < 16; i++) x[i] = bits >> i & 1 ? x[i] : -INFINITY;
    return x;
}
static inline float portable_highest(portable_vec x) {
    float high = -INFINITY;
    for (int i = 0; i < 16; i++) high = fmaxf(high, x[i]);
    return high;
}
#define VEC_MAX(a, b) portable_max(a, b)
#define VEC_FRACTION(x) portable_fraction(x)
#define VEC_SCALE(p, x) portable_scale(p, x)
#define VEC_FMA(x, y, z) portable_fma(x, y, z)
#define VEC_UPPER_HALVES(x) ((portable_words)((portable_words)(x) >> 16 & 0xffff))
#define VEC_ONLY(bits, x) portable_only((uint16_t)(bits), x)
#define VEC_HIGHEST(x) portable_highest(x)
#define VEC_ANY_HAS(x, bit) portable_any_has((portable_words)(x), bit)
#define VEC_CLAMP(x) (x)
#define VEC_POWER(x, p, n, shifted) ((void)(shifted), portable_power(x, p, n))
#define VEC_LOAD_F16(p) portable_load_f16(p)
#define VEC_STORE_F16(p, x) portable_store_f16(p, x)
#define VEC_TO_BF16(low, high) portable_to_bf16(low, high)

/* Tiles of a thread. What is read before tiles are on, or after, is NaN. Functions of their own, for hundreds of calls. */
#define PORTABLE_TILE static __attribute__((noinline, unused)) void
static _Thread_local uint32_t portable_tiles[8][16][16];
/* Word by word: the thread sanitizer does not see what a memcpy reads that becomes instructions. */
typedef uint32_t portable_word __attribute__((may_alias, aligned(2)));

static inline void portable_tiles_reset(void) { memset(portable_tiles, 0xff, sizeof portable_tiles); }
PORTABLE_TILE portable_tile_load(int t, const void *p, int64_t stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++)
            portable_tiles[t][i][j] = ((const portable_word *)(const void *)((const char *)p + i * stride))[j];
}
PORTABLE_TILE portable_tile_store(int t, void *p, int64_t stride) {
    for (int i = 0; i < 16; i++) memcpy((char *)p + i * stride, portable_tiles[t][i], 64);
}
/* Subnormal operands and sums are 0. Only memory of this thread is touched; sanitizers would take most of a test's time. */
__attribute__((no_sanitize("address", "thread", "undefined"))) PORTABLE_TILE portable_tile_dot(int c, int a, int b) {
    union {
        uint32_t bits;
        float value;
    } x[16][32], y[32][16];
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 32; k++) {
            const uint32_t left = portable_tiles[a][i][k / 2] >> 16 * (k % 2) << 16,
                           right = portable_tiles[b][k / 2][i] >> 16 * (k % 2) << 16;
            x[i][k].bits = left & 0x7f800000 ? left : 0;
            y[k][i].bits = right & 0x7f800000 ? right : 0;
        }
    for (int i = 0; i < 16; i++) {
        float sum[16];
        memcpy(sum, portable_tiles[c][i], sizeof sum);
        for (int k = 0; k < 32; k++)
            for (int j = 0; j < 16; j++) {
                const float next = sum[j] + x[i][k].value * y[k][j].value;
                sum[j] = fabsf(next) < 0x1p-126f ? 0 : next;
            }
        memcpy(portable_tiles[c][i], sum, sizeof sum);
    }
}
#define TILES_ON() portable_tiles_reset()
#define TILES_OFF() portable_tiles_reset()
#define TILE_ZERO(t) memset(portable_tiles[t], 0, sizeof portable_tiles[t])
#define TILE_LOAD(t, p, stride) portable_tile_load(t, p, stride)
#define TILE_STREAM(t, p, stride) portable_tile_load(t, p, stride)
#define TILE_STORE(t, p, stride) portable_tile_store(t, p, stride)
#define TILE_DOT(c, a, b) portable_tile_dot(c, a, b)
#define TILE_REST() ((void)0)
#define VEC_STREAM(to, x) memcpy(to, &(x), sizeof(x))
#define RESULTS_END() ((void)0)
#define UNROLL_STEPS false /* compilers would take minutes */

#endif
