/* Tiles of AMX, and how matrices are packed for them. This file and those that build on it are written once for all types.
 *
 * Needs, from the type's file, which also includes amx_forward.inc.h or amx_backward.inc.h or both:
 *
 *     LIMBS           the number of bf16 that add up to an element: its leading bits, the next ones, the last
 *     element         how an element is stored
 *     FAMILY(name)    the type's name for a function
 *
 * Gives TILE_* and VEC_* (instructions, which a test replaces), the sizes TILE, SUMS, SQUARE and STEP, which problems
 * are left to AVX-512 (left_to_avx512), powers of two, limbs of a vector, results (put_result), and rows and their packing
 * (take_*, pack_*).
 *
 * Tiles multiply bf16 and add in f32. An element of bf16 is one limb, of f16 exactly two, of f32 exactly three. A product of
 * two elements is the sum of the products of their limbs, less those too small to change a sum in f32: all 4 of f16, 6 of the 9
 * of f32. Tiles are 16 times as fast as FMA, so f16 still gains a factor of 4, and f32 one of 2.7.
 *
 * A tile product C += A B takes 16 rows of A with 32 elements each, and B with its rows in pairs: B's row p holds (element 2p,
 * element 2p+1) of every column. So there are two ways to pack a matrix X of rows for B:
 *
 *     across(X)    the rows of X are B's columns (products with X^T): pairs of a row's elements, transposed as 32-bit words
 *     along(X)     the rows of X are B's rows: rows i and i + 16 of 32 interleaved
 *
 * and for A its rows are only cut into stretches of 32. Every tile, packed or computed, is 1 KiB of consecutive memory: 16
 * lines of the cache that no other tile shares. (Rows that lie apart would touch a page each, and compete for the same sets of
 * the cache.) A product takes two tiles of A by two of B, so tiles come in this order:
 *
 *     A: [depth][limb][2] tiles    B: [depth] times [limb][2] tiles    C: [2 of B][2 of A] tiles
 *
 * so that row i of C lies 16 elements behind row i - 1, and its second half 2 tiles behind the first.
 */
#ifndef RA_DEVICE_CPU_AMX_H
#define RA_DEVICE_CPU_AMX_H

#include <stdint.h>
#include <string.h>

#ifndef RA_AMX_EMULATED /* a test brings its own tiles and vectors */
#include "device/cpu/vec_avx512.h"

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

#define TILES_ON()                                                                                                             \
    do {                                                                                                                       \
        tile_config config = {.palette = 1};                                                                                   \
        for (int i_ = 0; i_ < 8; i_++) config.bytes[i_] = 64, config.rows[i_] = 16;                                            \
        __asm__ volatile("" ::"r"(&config) : "memory"); /* compilers believe that it reads 8 bytes */                          \
        _tile_loadconfig(&config);                                                                                             \
    } while (0)
#define TILES_OFF() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, stride) _tile_loadd(t, p, (size_t)(stride))
/* A load that bypasses L1, to leave it to others. */
#define TILE_STREAM(t, p, stride) _tile_stream_loadd(t, p, (size_t)(stride))
#define TILE_STORE(t, p, stride) _tile_stored(t, p, (size_t)(stride))
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
/* Fills the gap between two tile instructions where there is no work: see amx_products.inc.h. */
#define TILE_REST() __asm__ volatile(".rept 8\n\tnop\n\t.endr")
/* 32 elements of bf16: those of low, then those of high. */
#define VEC_TO_BF16(low, high) ((halves)_mm512_cvtne2ps_pbh(high, low))
/* 16 elements of f16, from them and to them. */
#define VEC_LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)(p)))
#define VEC_STORE_F16(p, x) _mm256_storeu_si256((__m256i_u *)(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))
/* x - floor(x), 0 for infinities; and p 2^floor(x). */
#define VEC_FRACTION(x) _mm512_reduce_ps(x, 0x09)
#define VEC_SCALE(p, x) _mm512_scalef_ps(p, x)
/* x y + z, rounded once. */
#define VEC_FMA(x, y, z) ((vec)_mm512_fmadd_ps(x, y, z))
/* The upper halves of words moved down, over zeros. */
#define VEC_UPPER_HALVES(x)                                                                                                    \
    ((ivec)_mm512_shuffle_epi8(                                                                                                \
        (__m512i)(x), _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15, -1, -1))))
/* x where `bits` says so, else -inf; and the largest element, -inf at least. */
#define VEC_ONLY(bits, x) _mm512_mask_blend_ps((__mmask16)(bits), _mm512_set1_ps(-INFINITY), x)
#define VEC_HIGHEST(x) _mm512_reduce_max_ps(x)
/* Stores a line past the caches (core/stream.h); and the fence before another thread is told of it. */
#define VEC_STREAM(to, x) _mm512_stream_si512((__m512i *)(void *)(to), (__m512i)(x))
#define RESULTS_END() _mm_sfence()
/* Is that bit set in any of the words? */
#define VEC_ANY_HAS(x, bit) (_mm512_test_epi32_mask((__m512i)(x), _mm512_set1_epi32(bit)) != 0)
#endif

typedef uint16_t halves __attribute__((vector_size(64)));
typedef uint16_t halves_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef int32_t ivec_any __attribute__((vector_size(64), aligned(2), may_alias));

#include "core/dtype.h"
#include "device/cpu/cpu.h"
#include "device/cpu/sums.h"
#include "device/cpu/vec.h"

enum {
    MAX_DIM = LIMBS < 3 ? 256 : 128,
    TILE = 512,               /* elements of bf16 in a tile */
    SUMS = 256,               /* elements of f32 in a tile */
    SQUARE = 32,              /* rows and columns of two by two tiles of C */
    STEP = LIMBS * 2 * TILE, /* elements of bf16 in a step of depth of A or B */
};

/* A count in whole squares. */
INLINE int64_t padded(int64_t count) { return ra_round_up(count, SQUARE); }

/* Problems that AMX does not compute go to the kernels of AVX-512, which every processor with AMX has. So do those that it
 * would compute no faster, where elements have several limbs and many of them would be padding; and f32 with a head dimension
 * above 128, since AVX-512 sums such long scores in parts, which is more exact. */
INLINE bool left_to_avx512(const ra_problem *problem) {
    const int64_t rows = ra_sat_mul(problem->rows_q, problem->heads / problem->kv_heads), dim = problem->head_dim;
    const bool padding = rows < SQUARE / 2 || padded(dim) > dim + dim / 2;
    return (LIMBS > 1 && padding) || dim > MAX_DIM || problem->dropout > 0 || !(problem->scale > 0);
}

/* Keys to make room for: `most`, or fewer if the items have fewer, in whole units. */
INLINE int64_t known_keys(const ra_problem *problem, int64_t unit, int64_t most) {
    return problem->keys > 0 ? ra_min(most, ra_ceil_div(problem->keys, unit) * unit) : most;
}

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453

/* 2^x by a minimax polynomial for the fraction that is 2.7e-6 off at most, or 7.6e-8 for f32: 0 for -inf, inf for inf, NaN for
 * NaN. */
INLINE vec power_of_two(vec x) {
    const vec f = VEC_FRACTION(x);
#if LIMBS < 3
    vec p = splat(1.353416778e-2f);
    p = p * f + splat(5.201146007e-2f);
    p = p * f + splat(2.414427549e-1f);
    p = p * f + splat(6.930038333e-1f);
    p = p * f + splat(1.000002623f);
#else
    vec p = splat(1.877576907e-3f);
    p = p * f + splat(8.989339452e-3f);
    p = p * f + splat(5.582631880e-2f);
    p = p * f + splat(2.401536167e-1f);
    p = p * f + splat(6.931530732e-1f);
    p = p * f + splat(9.999999251e-1f);
#endif
    return VEC_SCALE(p, x);
}

/* The limbs of a vector: words whose upper halves are bf16, rounded to the nearest. Computed with integer instructions, since
 * tile products leave both ports for these free. Only the default NaN is sure to stay NaN: adding 0x8000 to a NaN of all ones
 * gives 0. */
typedef struct limbs {
    ivec limb[LIMBS];
} limbs;

enum { UPPER = (int32_t)0xffff0000 };

INLINE float plain_nan(float x) { return x == x ? x : NAN; }
INLINE limbs limbs_of(vec x) {
    limbs all;
    for (int i = 0; i < LIMBS; i++) {
        all.limb[i] = (ivec)x + 0x8000;
        if (i + 1 < LIMBS) x -= (vec)(all.limb[i] & UPPER);
    }
    return all;
}

/* Stores such halves of two vectors in pairs, which needs no shuffle across lanes; a limb takes two tiles. */
INLINE void store_pairs(uint16_t *to, limbs low, limbs high) {
    for (int i = 0; i < LIMBS; i++)
        *(ivec_any *)(void *)(to + i * 2 * TILE) = VEC_UPPER_HALVES(low.limb[i]) | (high.limb[i] & UPPER);
}

/* -------------------------------------------------------------------------------------------------------- results */

enum { STREAMED = 1 << 19 }; /* elements of a result that bypasses the caches; a smaller one is better off near its reader */

/* Do rows of a result that lie `stride` elements apart bypass the caches? Rows with others in between are no stream that the
 * hardware recognises: it would read every line before writing it. */
INLINE bool results_streamed(const ra_problem *problem, int64_t stride) {
    const int64_t dim = problem->head_dim;
    return stride > dim && ra_sat_mul(ra_sat_mul(problem->batch, problem->rows_q), problem->heads * dim) >= STREAMED;
}

/* 32 elements, and one. */
INLINE void put_result(element *to, vec low, vec high, bool streamed) {
    streamed &= (uintptr_t)to % 64 == 0;
#if LIMBS == 1
    const halves x = VEC_TO_BF16(low, high);
    if (streamed) VEC_STREAM(to, x);
    else *(halves_any *)to = x;
#elif LIMBS == 2
    (void)streamed;
    VEC_STORE_F16(to, low);
    VEC_STORE_F16(to + 16, high);
#else
    if (streamed) {
        VEC_STREAM(to, low);
        VEC_STREAM(to + 16, high);
        return;
    }
    store(to, low);
    store(to + 16, high);
#endif
}

#if LIMBS == 1
INLINE element element_of(float x) { return ra_f32_to_bf16(x); }
#elif LIMBS == 2
INLINE element element_of(float x) { return ra_f32_to_f16(x); }
#else
INLINE element element_of(float x) { return x; }
#endif

/* -------------------------------------------------------------------------------------------------------- packing */

/* 32 rows of `width` elements, in place or in a copy; in a copy, missing ones are zeros. A copy has the first limb of all rows,
 * then the next. */
typedef struct rows32 {
    const uint16_t *data;
    int64_t stride;
} rows32;

/* Row i of a copy, from where it lies; NULL: of zeros. */
#if LIMBS == 1
INLINE void copy_row(uint16_t *copy, int64_t i, const element *row, int64_t dim, int64_t width) {
    for (int64_t d = 0; d < width; d += 32) *(halves_any *)(copy + i * width + d) = (halves){0};
    if (row) memcpy(copy + i * width, row, (size_t)dim * 2);
}
#else
/* 16 elements of bf16 in f32. */
typedef uint16_t half_line __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64)));
INLINE vec widened(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const half_line *)p, uvec) << 16); }

INLINE vec load_elements(const element *p) {
#if LIMBS == 2
    return VEC_LOAD_F16(p);
#else
    return load(p);
#endif
}

static inline void copy_row(uint16_t *copy, int64_t i, const element *row, int64_t dim, int64_t width) {
    for (int64_t d = 0; d < width; d += 32) {
        element some[32] = {0}; /* of a row's end */
        if (row && d + 32 > dim) memcpy(some, row + d, (size_t)(dim - d) * sizeof *some);
        const element *from = row && d + 32 <= dim ? row + d : some;
        vec low = load_elements(from), high = load_elements(from + 16);
        for (int64_t limb = 0; limb < LIMBS; limb++) {
            uint16_t *to = copy + (limb * SQUARE + i) * width + d;
            *(halves_any *)to = VEC_TO_BF16(low, high); /* NaN and infinities stay so */
            low -= widened(to);
            high -= widened(to + 16);
        }
    }
}
#endif

/* Tiles take subnormal numbers for 0, so that f32 below 2^-110 loses its last limbs. Beside larger numbers that does not show.
 * Where there are none, every row of the copy is made NaN (every one, since a mask may hide some): then the kernel finds that
 * the result is not finite, drops it, and leaves these rows to the scalar kernel. */
INLINE void give_up_tiny(uint16_t *copy, int64_t width) {
    enum { LARGE = 0x1780 }; /* 2^-80 */
    bool nothing = true;
    for (int64_t i = 0; LIMBS == 3 && i < SQUARE * width; i += 32) {
        const halves x = *(const halves_any *)(copy + i) & 0x7fff;
        if (VEC_ANY_HAS(x >= LARGE, -1)) return;
        nothing &= !VEC_ANY_HAS(x, -1);
    }
    for (int64_t i = 0; !nothing && i < SQUARE; i++) copy[i * width] = 0x7fc0;
}

/* The rows i in [low, high): row i lies at data + i * stride. A copy is made only if there are several limbs, if something is
 * missing, or if rows are not whole words. */
INLINE rows32 take_rows(uint16_t *copy, const element *data, int64_t stride, int64_t low, int64_t high, int64_t dim) {
    const int64_t width = padded(dim);
#if LIMBS == 1
    const bool words = (uintptr_t)data % 4 == 0 && stride % 2 == 0;
    if (low <= 0 && high >= SQUARE && dim == width && words) return (rows32){data, stride};
#endif
    for (int64_t i = 0; i < SQUARE; i++) copy_row(copy, i, i >= low && i < high ? data + i * stride : NULL, dim, width);
    give_up_tiny(copy, width);
    return (rows32){copy, width};
}

/* Keys [c, c + 32) of a view; those outside [low, high) are zeros. */
INLINE rows32 take_keys(uint16_t *copy, const ra_slab *slab, const ra_tensor *view, int64_t c, int64_t low, int64_t high) {
    return take_rows(copy, (const element *)view->data + ra_slab_key_at(slab, view, c), slab->k.row_step * view->row,
                     low - c, high - c, slab->problem->head_dim);
}

/* Rows [r, r + 32) of a slab; those from `end` on are zeros. Rows of several heads do not lie at one stride. */
INLINE rows32 take_queries(uint16_t *copy, const ra_slab *slab, const ra_tensor *tensor, int64_t r, int64_t end) {
    const element *data = (const element *)tensor->data;
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    if (slab->group == 1)
        return take_rows(copy, data + ra_slab_at(slab, tensor, r), slab->q.row_step * tensor->row, 0, end - r, dim);
    for (int64_t i = 0; i < SQUARE; i++)
        copy_row(copy, i, r + i < end ? data + ra_slab_at(slab, tensor, r + i) : NULL, dim, width);
    give_up_tiny(copy, width);
    return (rows32){copy, width};
}

/* Prefetches a row of a tensor into L2: rows that lie apart are no stream that the hardware recognises. */
INLINE void fetch_row(const ra_tensor *tensor, int64_t at, int64_t dim) {
    const element *row = (const element *)tensor->data + at;
    for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(element)) __builtin_prefetch(row + d, 0, 2);
}

/* The same with keys [c, end) of an item's views. */
INLINE void fetch_keys(const ra_slab *slab, int64_t c, int64_t end) {
    const ra_tensor *k = &slab->item->k_view, *v = &slab->item->v_view;
    for (; c < end; c++) {
        fetch_row(k, ra_slab_key_at(slab, k, c), slab->problem->head_dim);
        fetch_row(v, ra_slab_key_at(slab, v, c), slab->problem->head_dim);
    }
}

/* 32 rows for A: [width/32][limb][2] tiles. */
static inline void pack_rows(uint16_t *tiles, rows32 rows, int64_t width) {
    for (int64_t d = 0; d < width; d += 32)
        for (int64_t i = 0; i < LIMBS * SQUARE; i++, tiles += 32)
            *(halves_any *)tiles = *(const halves_any *)(rows.data + i * rows.stride + d);
}

/* 32 rows across: [width/32][limb][2] tiles; and tile i of them. */
INLINE void pack_tile_across(uint16_t *tiles, rows32 rows, int64_t i) {
    const int64_t d = i / (2 * LIMBS) * 32, row = i % (2 * LIMBS) * 16;
    transpose((float *)(void *)(tiles + i * TILE), 16, (const float *)(const void *)(rows.data + row * rows.stride + d),
              rows.stride / 2);
}
static inline void pack_across(uint16_t *tiles, rows32 rows, int64_t width) {
    for (int64_t i = 0; i < width / 16 * LIMBS; i++) pack_tile_across(tiles, rows, i);
}

/* 32 rows along: [limb][2] tiles for every 32 columns, `step` elements apart; and the two tiles i of them. */
INLINE void pack_tiles_along(uint16_t *tiles, rows32 rows, int64_t step, int64_t i) {
    const uint16_t *from = rows.data + i % LIMBS * SQUARE * rows.stride + i / LIMBS * 32;
    uint16_t *to = tiles + i / LIMBS * step + i % LIMBS * 2 * TILE;
    for (int64_t row = 0; row < 16; row++) {
        const halves low = *(const halves_any *)(from + row * rows.stride);
        const halves high = *(const halves_any *)(from + (row + 16) * rows.stride);
        *(halves_any *)(to + row * 32) =
            __builtin_shufflevector(low, high, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11,
                                    43, 12, 44, 13, 45, 14, 46, 15, 47);
        *(halves_any *)(to + TILE + row * 32) =
            __builtin_shufflevector(low, high, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
                                    26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
    }
}
static inline void pack_along(uint16_t *tiles, rows32 rows, int64_t width, int64_t step) {
    for (int64_t i = 0; i < width / 32 * LIMBS; i++) pack_tiles_along(tiles, rows, step, i);
}

#endif
