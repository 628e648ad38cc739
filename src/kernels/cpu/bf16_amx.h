/* Tiles of AMX, bf16 vectors, and how matrices are packed for them. bf16_forward_amx.c and bf16_backward_amx.c build on it.
 *
 * A tile product C += A B takes 16 rows of A with 32 elements each, and B with its rows in pairs: B's row p holds (element 2p,
 * element 2p+1) of every column. So there are two ways to pack a matrix X of rows for B:
 *
 *     across(X)    the rows of X are B's columns (products with X^T): pairs of a row's elements, transposed as 32-bit words
 *     along(X)     the rows of X are B's rows: rows i and i + 16 of 32 interleaved
 *
 * and A needs its rows only cut. Every tile, packed or computed, is 1 KiB in one piece: 16 lines of the cache, which no other
 * tile shares and which follow one another. (Rows that lie apart touch a page each, and meet in the same sets of the cache.)
 * Products go two by two, in all matrices alike:
 *
 *     A: [depth][2] tiles    B: [depth] times 2 neighbouring tiles    C: [2 of B][2 of A] tiles
 *
 * so that row i of C lies 16 elements behind row i - 1, and its second half 2 tiles behind the first.
 */
#ifndef RA_KERNELS_CPU_BF16_AMX_H
#define RA_KERNELS_CPU_BF16_AMX_H

#include <stdint.h>
#include <string.h>

#ifndef RA_AMX_EMULATED /* a test brings its own tiles and vectors */
#include "kernels/cpu/vec_avx512.h"

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

#define TILES_ON()                                                                                                             \
    do {                                                                                                                       \
        tile_config config = {.palette = 1};                                                                                   \
        for (int i_ = 0; i_ < 8; i_++) config.bytes[i_] = 64, config.rows[i_] = 16;                                            \
        __asm__ volatile("" ::"r"(&config) : "memory"); /* compilers believe that it takes 8 bytes */                          \
        _tile_loadconfig(&config);                                                                                             \
    } while (0)
#define TILES_OFF() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, stride) _tile_loadd(t, p, (size_t)(stride))
/* A load that leaves the first cache to others. */
#define TILE_STREAM(t, p, stride) _tile_stream_loadd(t, p, (size_t)(stride))
#define TILE_STORE(t, p, stride) _tile_stored(t, p, (size_t)(stride))
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
/* Where no work comes between two tile instructions: see PRODUCT. */
#define TILE_REST() __asm__ volatile(".rept 8\n\tnop\n\t.endr")
/* 32 elements of bf16: those of low, then those of high. */
#define VEC_TO_BF16(low, high) ((halves)_mm512_cvtne2ps_pbh(high, low))
/* x - floor(x), 0 for infinities; and p 2^floor(x). */
#define VEC_FRACTION(x) _mm512_reduce_ps(x, 0x09)
#define VEC_SCALE(p, x) _mm512_scalef_ps(p, x)
/* The upper halves of words moved down, over zeros. */
#define VEC_UPPER_HALVES(x)                                                                                                    \
    ((ivec)_mm512_shuffle_epi8(                                                                                                \
        (__m512i)(x), _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, -1, -1, 6, 7, -1, -1, 10, 11, -1, -1, 14, 15, -1, -1))))
/* x where `bits` says so, else -inf; and the largest element, -inf at least. */
#define VEC_ONLY(bits, x) _mm512_mask_blend_ps((__mmask16)(bits), _mm512_set1_ps(-INFINITY), x)
#define VEC_HIGHEST(x) _mm512_reduce_max_ps(x)
/* A line that passes the caches by (core/stream.h), and what comes before another thread is told of it. */
#define VEC_STREAM(to, x) _mm512_stream_si512((__m512i *)(void *)(to), (__m512i)(x))
#define RESULTS_END() _mm_sfence()
/* Has any of the words that bit? */
#define VEC_ANY_HAS(x, bit) (_mm512_test_epi32_mask((__m512i)(x), _mm512_set1_epi32(bit)) != 0)
#endif

typedef uint16_t halves __attribute__((vector_size(64)));
typedef uint16_t halves_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef int32_t ivec_any __attribute__((vector_size(64), aligned(2), may_alias));

#include "core/dtype.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

enum {
    MAX_DIM = 256,
    TILE = 512,  /* elements of bf16 in a tile */
    SUMS = 256,  /* elements of f32 in a tile */
    SQUARE = 32, /* rows and columns of two by two tiles of C */
};

/* A count in whole squares. */
INLINE int64_t padded(int64_t count) { return ra_round_up(count, SQUARE); }

/* What AMX does not compute goes to the kernels of AVX-512, which every processor with AMX has. */
INLINE bool left_to_avx512(const ra_problem *problem) {
    return problem->dtype != RA_BF16 || problem->dropout > 0 || !(problem->scale > 0);
}

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453

/* 2^x by a minimax polynomial for the fraction that is 2.7e-6 off at most: 0 for -inf, inf for inf, NaN for NaN. */
INLINE vec power_of_two(vec x) {
    const vec f = VEC_FRACTION(x);
    vec p = splat(1.353416778e-2f);
    p = p * f + splat(5.201146007e-2f);
    p = p * f + splat(2.414427549e-1f);
    p = p * f + splat(6.930038333e-1f);
    p = p * f + splat(1.000002623f);
    return VEC_SCALE(p, x);
}

/* Words whose upper halves are rounded to the nearest bf16, and pairs of such halves: by integers, to which tile products leave
 * both ports, and without a shuffle across lanes. Of what is no number only a plain NaN is sure to stay one: all ones would
 * become zeros. */
INLINE float plain_nan(float x) { return x == x ? x : NAN; }
INLINE ivec rounded(vec x) { return (ivec)x + 0x8000; }
INLINE void store_pairs(uint16_t *to, ivec low, ivec high) {
    *(ivec_any *)(void *)to = VEC_UPPER_HALVES(low) | (high & (int32_t)0xffff0000);
}

/* -------------------------------------------------------------------------------------------------------- results */

enum { STREAMED = 1 << 21 }; /* elements of a result; a smaller one is better off in the caches, near its reader */

/* Do rows of a result that lie `stride` elements apart pass the caches by? Between others they are no stream that a processor
 * sees coming, and it would read every line to write it. */
INLINE bool results_streamed(const ra_problem *problem, int64_t stride) {
    const int64_t dim = problem->head_dim;
    return stride > dim && ra_sat_mul(ra_sat_mul(problem->batch, problem->rows_q), problem->heads * dim) >= STREAMED;
}

INLINE void put_result(uint16_t *to, halves x, bool streamed) {
    if (streamed && (uintptr_t)to % sizeof x == 0) VEC_STREAM(to, x);
    else *(halves_any *)to = x;
}

/* -------------------------------------------------------------------------------------------------------- packing */

/* 32 rows of `width` elements, where they lie or in a copy: zeros stand for what is not there. */
typedef struct rows32 {
    const uint16_t *data;
    int64_t stride;
} rows32;

/* Rows i of `count` that are in [low, high): row i lies at data + i * stride. A copy is made only if something is missing, or
 * if rows are not in whole words. */
INLINE rows32 take_rows(uint16_t *copy, const uint16_t *data, int64_t stride, int64_t low, int64_t high, int64_t dim) {
    const int64_t width = padded(dim);
    const bool words = (uintptr_t)data % 4 == 0 && stride % 2 == 0;
    if (low <= 0 && high >= SQUARE && dim == width && words) return (rows32){data, stride};
    for (int64_t i = 0; i < SQUARE; i++) {
        for (int64_t d = 0; d < width; d += 32) *(halves_any *)(copy + i * width + d) = (halves){0};
        if (i >= low && i < high) memcpy(copy + i * width, data + i * stride, (size_t)dim * 2);
    }
    return (rows32){copy, width};
}

/* Keys [c, c + 32) of a view; those outside [low, high) are zeros. */
INLINE rows32 take_keys(uint16_t *copy, const ra_place *place, const ra_tensor *view, int64_t c, int64_t low, int64_t high) {
    return take_rows(copy, (const uint16_t *)view->data + ra_place_key_at(place, view, c), place->k.row_step * view->row,
                     low - c, high - c, place->problem->head_dim);
}

/* Rows [r, r + 32) of a place; those from `end` on are zeros. Rows of several heads do not lie at one stride. */
INLINE rows32 take_queries(uint16_t *copy, const ra_place *place, const ra_tensor *tensor, int64_t r, int64_t end) {
    const uint16_t *data = (const uint16_t *)tensor->data;
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    if (place->group == 1)
        return take_rows(copy, data + ra_place_at(place, tensor, r), place->q.row_step * tensor->row, 0, end - r, dim);
    for (int64_t i = 0; i < SQUARE; i++) {
        for (int64_t d = 0; d < width; d += 32) *(halves_any *)(copy + i * width + d) = (halves){0};
        if (r + i < end) memcpy(copy + i * width, data + ra_place_at(place, tensor, r + i), (size_t)dim * 2);
    }
    return (rows32){copy, width};
}

/* Lets keys [c, end) of an item's views come into the second cache: dilated rows are no stream that a processor sees coming. */
INLINE void fetch_keys(const ra_place *place, int64_t c, int64_t end) {
    const ra_tensor *k = &place->item->k_view, *v = &place->item->v_view;
    for (; c < end; c++)
        for (int64_t d = 0; d < place->problem->head_dim; d += 32) {
            __builtin_prefetch((const uint16_t *)k->data + ra_place_key_at(place, k, c) + d, 0, 2);
            __builtin_prefetch((const uint16_t *)v->data + ra_place_key_at(place, v, c) + d, 0, 2);
        }
}

/* 32 rows for A: [width/32][2] tiles. */
static inline void pack_rows(uint16_t *tiles, rows32 rows, int64_t width) {
    for (int64_t d = 0; d < width; d += 32)
        for (int64_t i = 0; i < SQUARE; i++, tiles += 32)
            *(halves_any *)tiles = *(const halves_any *)(rows.data + i * rows.stride + d);
}

/* 32 rows across: [width/32][2] tiles. */
static inline void pack_across(uint16_t *tiles, rows32 rows, int64_t width) {
    for (int64_t d = 0; d < width; d += 32)
        for (int64_t i = 0; i < SQUARE; i += 16, tiles += TILE)
            transpose((float *)(void *)tiles, 16, (const float *)(const void *)(rows.data + i * rows.stride + d),
                      rows.stride / 2);
}

/* 32 rows along: 2 tiles for every 32 columns, `step` elements apart. */
static inline void pack_along(uint16_t *tiles, rows32 rows, int64_t width, int64_t step) {
    for (int64_t d = 0; d < width; d += 32, tiles += step)
        for (int64_t p = 0; p < 16; p++) {
            const halves low = *(const halves_any *)(rows.data + p * rows.stride + d);
            const halves high = *(const halves_any *)(rows.data + (p + 16) * rows.stride + d);
            *(halves_any *)(tiles + p * 32) =
                __builtin_shufflevector(low, high, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
            *(halves_any *)(tiles + TILE + p * 32) =
                __builtin_shufflevector(low, high, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25,
                                        57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
        }
}

/* ------------------------------------------------------------------------------------------------------- products */

/* What a kernel has too much of for the first cache streams past it. */
#ifndef TILE_LOAD_A
#define TILE_LOAD_A TILE_LOAD
#endif

/* Tile i of C goes where it is owed, and begins anew in the first step. */
#define SETTLE_AND(i, offset)                                                                                                  \
    do {                                                                                                                       \
        if (owed_) {                                                                                                           \
            TILE_STORE(i, owed_ + (offset), 64);                                                                               \
            TILE_REST();                                                                                                       \
        }                                                                                                                      \
        if (!first_) break;                                                                                                    \
        if (!add) {                                                                                                            \
            TILE_ZERO(i);                                                                                                      \
            break;                                                                                                             \
        }                                                                                                                      \
        TILE_LOAD(i, c + (offset), 64);                                                                                        \
        TILE_REST();                                                                                                           \
    } while (0)

/* The share of units [from, to) that is due when `part` of `parts` is done. */
INLINE int64_t due_at(int64_t from, int64_t to, int64_t part, int64_t parts) { return from + (to - from) * part / parts; }

#ifndef UNROLL_STEPS
#define UNROLL_STEPS true /* where depth is known, so that units and their places are */
#endif

/* Behind a tile instruction of a product: its share of the units. */
#define TURN(unit, unroll)                                                                                                     \
    do {                                                                                                                       \
        const int64_t begin_ = due_at(from, to, part_, 8 * depth), end_ = due_at(from, to, part_ + 1, 8 * depth);              \
        part_++;                                                                                                               \
        if (begin_ == end_) TILE_REST();                                                                                       \
        _Pragma(unroll) for (int64_t unit_ = begin_; unit_ < end_; unit_++) unit(work, unit_);                                 \
    } while (0)
#define PRODUCT_STEPS(unit, unroll)                                                                                            \
    _Pragma(unroll) for (int64_t step_ = 0; step_ < depth; step_++) {                                                          \
        const bool first_ = step_ == 0;                                                                                        \
        TILE_LOAD_A(4, a, 64);                                                                                                 \
        TURN(unit, unroll);                                                                                                    \
        TILE_STREAM(6, b, 64);                                                                                                 \
        TURN(unit, unroll);                                                                                                    \
        TILE_LOAD_A(5, a + TILE, 64);                                                                                          \
        TURN(unit, unroll);                                                                                                    \
        SETTLE_AND(0, 0);                                                                                                      \
        TILE_DOT(0, 4, 6);                                                                                                     \
        TURN(unit, unroll);                                                                                                    \
        TILE_STREAM(7, b + TILE, 64);                                                                                          \
        TURN(unit, unroll);                                                                                                    \
        SETTLE_AND(2, SUMS);                                                                                                   \
        TILE_DOT(2, 5, 6);                                                                                                     \
        TURN(unit, unroll);                                                                                                    \
        SETTLE_AND(1, 2 * SUMS);                                                                                               \
        TILE_DOT(1, 4, 7);                                                                                                     \
        TURN(unit, unroll);                                                                                                    \
        SETTLE_AND(3, 3 * SUMS);                                                                                               \
        TILE_DOT(3, 5, 7);                                                                                                     \
        TURN(unit, unroll);                                                                                                    \
        a += 2 * TILE;                                                                                                         \
        b += b_step;                                                                                                           \
        owed_ = NULL;                                                                                                          \
    }

/* C = A B, or += with `add`, `depth` steps of 32 deep, of which each moves B by b_step elements; and units [from, to) of other
 * work, which must not touch C, dealt out evenly behind the tile instructions. A processor looks ahead some 500 instructions,
 * so tiles and vectors are computed at the same time. Where the other thread of its core is busy it looks ahead half as far,
 * and a tile instruction takes half as long again if there was another within the 8 instructions before it: hence a turn behind
 * every single one.
 *
 * C stays in the tiles: they are owed to memory, and the next product stores each of them when it needs the tile, which hides
 * most of what a store takes. B streams past the first cache. */
#define PRODUCT(name, work_type, unit)                                                                                         \
    INLINE void name(float **owed, float *c, const uint16_t *a, const uint16_t *b, int64_t b_step, int64_t depth,              \
                     const bool add, work_type *work, const int64_t from, const int64_t to) {                                  \
        __asm__ volatile("" ::: "memory"); /* compilers do not know that a tile load reads memory */                           \
        float *owed_ = *owed;                                                                                                  \
        int64_t part_ = 0;                                                                                                     \
        if (UNROLL_STEPS && __builtin_constant_p(depth)) PRODUCT_STEPS(unit, "GCC unroll 8")                                   \
        else PRODUCT_STEPS(unit, "GCC unroll 1")                                                                               \
        *owed = c;                                                                                                             \
    }

/* Stores what is owed. */
INLINE void settle(float **owed) {
    if (!*owed) return;
    TILE_STORE(0, *owed, 64);
    TILE_STORE(1, *owed + 2 * SUMS, 64);
    TILE_STORE(2, *owed + SUMS, 64);
    TILE_STORE(3, *owed + 3 * SUMS, 64);
    *owed = NULL;
}

#define NO_UNIT(work, unit) ((void)(work), (void)(unit))
PRODUCT(multiply_beside, void, NO_UNIT)
/* Nothing but the product. */
#define multiply(...) multiply_beside(__VA_ARGS__, NULL, 0, 0)

#endif
