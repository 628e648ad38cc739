/* bf16 attention for x86-64 with AMX: products of 16x16 tiles, two by two, f32 sums.
 *
 * A tile product C += A B takes 16 rows of A with 32 elements each, and B with its rows in pairs: B's row p holds (element 2p, element
 * 2p+1) of every column. So there are two ways to pack a matrix X of rows for B:
 *
 *     across(X)    the rows of X are B's columns (products X^T): pairs of a row's elements, transposed as 32-bit words
 *     along(X)     the rows of X are B's rows: two rows interleaved
 *
 * Tiles are packed one after the other, 1 KiB each; matrices on the A side are read by rows where they lie in scratch.
 *
 * Forward, a strip of 32 rows against blocks of 128 keys:
 *
 *       tile unit     S(1)  | S(2) PV(0) | S(3) PV(1) | ...        S = Q across(K),  PV: acc += P along(V)
 *       vector unit         | exp(S(1))  | exp(S(2))  | ...
 *
 * The vector unit has about as much to do as the tile unit, so in each step pieces of both alternate in one instruction stream.
 * The maximum of a row stays until a block's sum passes 2^60, as in fma.h.
 *
 * Backward, rows x keys, in transposed form: chunks of 32 keys against all rows of the tile,
 *
 *       S^T = K across(Q),  dP^T = V across(dO),  P^T = exp(S^T - lse),  dS^T = P^T (dP^T - delta)
 *       dV = P^T along(dO),  dK = dS^T along(Q)
 *
 * so that P^T and dS^T are A operands as they are; dS^T is also kept as along(dS^T), and when all chunks are done
 * dQ^T = K^T along(dS^T). Here too the products of the neighbouring chunks alternate with the vector work of this one.
 */
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
        _tile_loadconfig(&config);                                                                                             \
    } while (0)
#define TILES_OFF() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, stride) _tile_loadd(t, p, (size_t)(stride))
#define TILE_STORE(t, p, stride) _tile_stored(t, p, (size_t)(stride))
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
/* 32 elements of bf16: those of low, then those of high. */
#define VEC_TO_BF16(low, high) ((halves)_mm512_cvtne2ps_pbh(high, low))
#endif

typedef uint16_t halves __attribute__((vector_size(64)));
typedef uint16_t halves_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t half16 __attribute__((vector_size(32)));
typedef uint16_t half16_any __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint32_t words_any __attribute__((vector_size(64), aligned(4), may_alias));

#define VEC_EXP_BF16
#include "core/dtype.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

enum {
    MAX_DIM = 256,
    TILE = 512,        /* elements of a tile */
    STRIP = 32,        /* rows (forward) or keys (backward) of two tiles */
    QUERIES = 256,     /* rows of a forward tile */
    KEYS = 128,        /* of a block, forward */
    PACKED = 65536,    /* elements of K (and of V) that are packed at a time */
    SCORES = KEYS + 16,
    WEIGHTS = KEYS + 32,
    ROWS = 512,        /* of a backward tile */
    COLUMNS = 512,     /* keys of a backward tile */
    FLOATS = ROWS + 16, HALVES = ROWS + 32, /* strides that spread over the cache */
};

/* The head dimension in whole tiles. */
static int64_t padded(int64_t count) { return ra_round_up(count, 32); }

/* -------------------------------------------------------------------------------------------------------- packing */

static void load_half_row(uint16_t *dst, const void *data, int64_t offset, int64_t dim) {
    memcpy(dst, (const uint16_t *)data + offset, (size_t)dim * 2);
    memset(dst + dim, 0, (size_t)(padded(dim) - dim) * 2);
}

/* Keys [first, last) as rows of padded(dim), up to a multiple of 32 rows. */
static void load_keys(uint16_t *rows, const ra_place *place, const ra_tensor *view, int64_t first, int64_t last) {
    const int64_t dim = place->problem->head_dim, width = padded(dim), count = last - first;
    for (int64_t c = 0; c < count; c++)
        load_half_row(rows + c * width, view->data, ra_place_key_at(place, view, first + c), dim);
    memset(rows + count * width, 0, (size_t)((padded(count) - count) * width) * 2);
}

/* [count/16][width/32] tiles. */
static void pack_across(uint16_t *tiles, const uint16_t *rows, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i += 16)
        for (int64_t d = 0; d < width; d += 32, tiles += TILE)
            transpose((float *)(void *)tiles, 16, (const float *)(const void *)(rows + i * width + d), width / 2);
}

INLINE words interleave(half16 even, half16 odd) {
    return __builtin_convertvector(even, words) | __builtin_convertvector(odd, words) << 16;
}

/* [count/32][width/16] tiles. */
static void pack_along(uint16_t *tiles, const uint16_t *rows, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i += 32)
        for (int64_t p = 0; p < 16; p++) {
            const uint16_t *even = rows + (i + 2 * p) * width, *odd = even + width;
            for (int64_t d = 0; d < width; d += 16)
                *(words_any *)(tiles + (i / 32 * (width / 16) + d / 16) * TILE + p * 32) =
                    interleave(*(const half16_any *)(even + d), *(const half16_any *)(odd + d));
        }
}

/* From along(X) to the A tiles of X^T: [width/16][count/32] tiles of 16 dimensions x 32 rows. */
static void pack_turned(uint16_t *turned, const uint16_t *along, int64_t count, int64_t width) {
    const int64_t chunks = count / 32, groups = width / 16;
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t g = 0; g < groups; g++)
            transpose((float *)(void *)(turned + (g * chunks + c) * TILE), 16,
                      (const float *)(const void *)(along + (c * groups + g) * TILE), 16);
}

/* ------------------------------------------------------------------------------------------------------- products */

/* C, 32 x 32, = or += A B over `depth` steps of 32. Rows of C and A are c_row and a_row elements apart; A's second tile lies a_next
 * behind the first, B's b_next; a step moves A by a_step and B by b_step. */
INLINE void product(float *c, int64_t c_row, const uint16_t *a, int64_t a_row, int64_t a_next, int64_t a_step, const uint16_t *b,
                    int64_t b_next, int64_t b_step, int64_t depth, const bool add) {
    float *c1 = c + 16 * c_row;
    __asm__ volatile("" ::: "memory"); /* compilers do not know that a tile load reads memory */
    if (add) {
        TILE_LOAD(0, c, c_row * 4);
        TILE_LOAD(1, c + 16, c_row * 4);
        TILE_LOAD(2, c1, c_row * 4);
        TILE_LOAD(3, c1 + 16, c_row * 4);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t k = 0; k < depth; k++) {
        TILE_LOAD(4, a, a_row * 2);
        TILE_LOAD(6, b, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + b_next, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, a + a_next, a_row * 2);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
        a += a_step;
        b += b_step;
    }
    TILE_STORE(0, c, c_row * 4);
    TILE_STORE(1, c + 16, c_row * 4);
    TILE_STORE(2, c1, c_row * 4);
    TILE_STORE(3, c1 + 16, c_row * 4);
}

/* -------------------------------------------------------------------------------------------------------- forward */

typedef struct forward_space {
    uint16_t k[PACKED], v[PACKED], rows[PACKED];
    uint16_t q[QUERIES * MAX_DIM];
    float acc[QUERIES * MAX_DIM];
    float s[2][STRIP * SCORES];
    uint16_t p[2][STRIP * WEIGHTS];
    float m[QUERIES];
    double l[QUERIES];
    int64_t begin[QUERIES], end[QUERIES];
    float sums[STRIP];
} forward_space;

/* A strip on its way through the packed keys. */
typedef struct strip {
    forward_space *f;
    int64_t row, width;   /* first row; padded head dimension */
    int64_t from, to;     /* columns of the packed keys, in multiples of 32 */
    int64_t blocks;
    float scale;
} strip;

static int64_t block_columns(const strip *t, int64_t block) { return ra_min(KEYS, t->to - t->from - block * KEYS); }

/* 32 columns of the scores of a block. */
INLINE void score_piece(const strip *t, int64_t block, int64_t piece) {
    const int64_t column = t->from + block * KEYS + piece * STRIP, steps = t->width / 32;
    product(t->f->s[block & 1] + piece * STRIP, SCORES, t->f->q + t->row * t->width, t->width, 16 * t->width, 32,
            t->f->k + column / 16 * steps * TILE, steps * TILE, TILE, steps, false);
}

/* 32 dimensions of what a block adds to acc. */
INLINE void value_piece(const strip *t, int64_t block, int64_t piece) {
    const int64_t column = t->from + block * KEYS, groups = t->width / 16;
    product(t->f->acc + t->row * t->width + piece * 32, t->width, t->f->p[block & 1], WEIGHTS, 16 * WEIGHTS, 32,
            t->f->v + (column / 32 * groups + piece * 2) * TILE, TILE, groups * TILE, block_columns(t, block) / 32, true);
}

/* Weights of row i of the strip, and their sum. */
INLINE void weigh_row(const strip *t, int64_t block, int64_t i, int64_t columns) {
    const float m = t->f->m[t->row + i];
    const vec base = splat(m == -INFINITY ? 0 : m), factor = splat(t->scale);
    const float *s = t->f->s[block & 1] + i * SCORES;
    uint16_t *p = t->f->p[block & 1] + i * WEIGHTS;
    vec sum0 = splat(0), sum1 = splat(0);
    for (int64_t c = 0; c < columns; c += 32) {
        const vec p0 = exp_of(load(s + c) * factor - base), p1 = exp_of(load(s + c + 16) * factor - base);
        sum0 += p0;
        sum1 += p1;
        *(halves_any *)(p + c) = VEC_TO_BF16(p0, p1);
    }
    t->f->sums[i] = sum_of(sum0 + sum1);
}

/* A row without a maximum takes the one of these scores; so does a row that outgrew its own. */
static void renew_row(const strip *t, int64_t block, int64_t i, int64_t columns) {
    forward_space *f = t->f;
    const int64_t r = t->row + i;
    vec high = splat(-INFINITY);
    for (int64_t c = 0; c < columns; c += 16) high = VEC_MAX(high, load(f->s[block & 1] + i * SCORES + c));
    const float old = f->m[r], max = max_of(high) * t->scale;
    if (!(max > old + 8)) return;
    const float shrink = expf(old - max);
    for (int64_t d = 0; d < t->width; d++) f->acc[r * t->width + d] *= shrink;
    f->l[r] *= (double)shrink;
    f->m[r] = max;
}

static void mask_block(const strip *t, int64_t block, int64_t columns, int64_t packed_first) {
    forward_space *f = t->f;
    const int64_t first = packed_first + t->from + block * KEYS;
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t r = t->row + i;
        if (f->begin[r] <= first && f->end[r] >= first + columns) continue;
        mask_row(f->s[block & 1] + i * SCORES, f->begin[r], f->end[r], first, 0, columns, -INFINITY);
    }
}

/* One turn: weights of `block`, while the tile unit computes the scores of the next and the values of the one before. */
static void forward_block(const strip *t, int64_t block, int64_t packed_first) {
    forward_space *f = t->f;
    const int64_t columns = block_columns(t, block);
    const int64_t score_pieces = block + 1 < t->blocks ? block_columns(t, block + 1) / STRIP : 0;
    int64_t value_pieces = block > 0 ? t->width / 32 : 0;
    mask_block(t, block, columns, packed_first);
    bool renew = false;
    for (int64_t i = 0; i < STRIP; i++) renew |= f->m[t->row + i] == -INFINITY;
    if (renew) { /* acc is scaled: what is due must be in it */
        for (int64_t i = 0; i < value_pieces; i++) value_piece(t, block - 1, i);
        value_pieces = 0;
        for (int64_t i = 0; i < STRIP; i++) renew_row(t, block, i, columns);
    }
    const int64_t pieces = ra_max(score_pieces + value_pieces, STRIP / 4);
    for (int64_t i = 0; i < pieces; i++) {
        if (i < score_pieces)
            score_piece(t, block + 1, i);
        else if (i < score_pieces + value_pieces)
            value_piece(t, block - 1, i - score_pieces);
        for (int64_t r = 4 * i; r < ra_min(4 * i + 4, STRIP); r++) weigh_row(t, block, r, columns);
    }
    for (int64_t i = 0; i < STRIP; i++) {
        if (!(f->sums[i] < (float)(1LL << 60))) {
            renew_row(t, block, i, columns);
            weigh_row(t, block, i, columns);
        }
        f->l[t->row + i] += (double)f->sums[i];
    }
}

static void forward_strip(forward_space *f, const ra_place *place, int64_t row, int64_t rows, int64_t first, int64_t last) {
    strip t = {.f = f, .row = row, .width = padded(place->problem->head_dim), .scale = (float)place->problem->scale};
    int64_t low = last, high = first;
    for (int64_t r = row; r < ra_min(row + STRIP, rows); r++) {
        if (f->begin[r] >= f->end[r]) continue;
        low = ra_min(low, f->begin[r]);
        high = ra_max(high, f->end[r]);
    }
    low = ra_max(low, first) - first;
    high = ra_min(high, last) - first;
    if (low >= high) return;
    t.from = low / 32 * 32;
    t.to = padded(high);
    t.blocks = ra_ceil_div(t.to - t.from, KEYS);
    for (int64_t i = 0; i < block_columns(&t, 0) / STRIP; i++) score_piece(&t, 0, i);
    for (int64_t block = 0; block < t.blocks; block++) forward_block(&t, block, first);
    for (int64_t i = 0; i < t.width / 32; i++) value_piece(&t, t.blocks - 1, i);
}

static void load_queries(forward_space *f, const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end) {
    const int64_t dim = place->problem->head_dim, width = padded(dim), rows = end - begin, all = padded(rows);
    memset(f->acc, 0, (size_t)(all * width) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = begin + i;
        load_half_row(f->q + i * width, step->q.data, ra_place_at(place, &step->q, r), dim);
        ra_place_interval(place, r, &f->begin[i], &f->end[i]);
        f->m[i] = -INFINITY;
        f->l[i] = 0;
        if (step->single) continue;
        memcpy(f->acc + i * width, (const float *)step->acc.data + ra_place_at(place, &step->acc, r), (size_t)dim * sizeof(float));
        f->m[i] = ((const float *)step->m.data)[ra_place_at(place, &step->m, r)];
        f->l[i] = (double)((const float *)step->l.data)[ra_place_at(place, &step->l, r)];
    }
    /* Rows that fill up the last strip: zeros, which meet every key and go nowhere. */
    memset(f->q + rows * width, 0, (size_t)((all - rows) * width) * 2);
    for (int64_t i = rows; i < all; i++) {
        f->m[i] = 0;
        f->l[i] = 0;
        f->begin[i] = INT64_MIN / 4;
        f->end[i] = INT64_MAX / 4;
    }
}

static void store_half_row(uint16_t *dst, const float *src, float factor, int64_t dim) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32)
        *(halves_any *)(dst + d) = VEC_TO_BF16(load(src + d) * splat(factor), load(src + d + 16) * splat(factor));
    for (; d < dim; d++) dst[d] = ra_f32_to_bf16(src[d] * factor);
}

static void store_rows(const forward_space *f, const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end) {
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    for (int64_t i = 0; i < end - begin; i++) {
        const int64_t r = begin + i;
        const float *acc = f->acc + i * width;
        if (!step->single) {
            memcpy((float *)step->acc.data + ra_place_at(place, &step->acc, r), acc, (size_t)dim * sizeof(float));
            ((float *)step->m.data)[ra_place_at(place, &step->m, r)] = f->m[i];
            ((float *)step->l.data)[ra_place_at(place, &step->l, r)] = (float)f->l[i];
            continue;
        }
        const bool empty = f->l[i] == 0;
        store_half_row((uint16_t *)step->out.data + ra_place_at(place, &step->out, r), acc, empty ? 0 : (float)(1 / f->l[i]), dim);
        if (step->lse.data)
            ((float *)step->lse.data)[ra_place_at(place, &step->lse, r)] =
                empty ? -INFINITY : (float)((double)f->m[i] + log(f->l[i]));
    }
}

static void forward_tile(const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end, void *scratch) {
    forward_space *f = scratch;
    const int64_t width = padded(place->problem->head_dim), rows = end - begin;
    const int64_t packed = PACKED / width / KEYS * KEYS;
    load_queries(f, step, place, begin, end);
    int64_t low, high;
    ra_place_hull(place, begin, end, &low, &high);
    TILES_ON();
    for (int64_t first = low; first < high; first += packed) {
        const int64_t last = ra_min(first + packed, high), count = padded(last - first);
        load_keys(f->rows, place, &place->item->k_view, first, last);
        pack_across(f->k, f->rows, count, width);
        load_keys(f->rows, place, &place->item->v_view, first, last);
        pack_along(f->v, f->rows, count, width);
        for (int64_t row = 0; row < rows; row += STRIP) forward_strip(f, place, row, rows, first, last);
    }
    TILES_OFF();
    bool finite = all_finite(f->acc, rows * width);
    for (int64_t i = 0; i < rows; i++) finite &= isfinite(f->l[i]) && f->m[i] < INFINITY;
    if (finite)
        store_rows(f, step, place, begin, end);
    else
        ra_scalar_forward_tile(step, place, begin, end, scratch);
}

/* ------------------------------------------------------------------------------------------------------- backward */

typedef struct backward_space {
    uint16_t rows[ROWS * MAX_DIM];
    uint16_t q_across[ROWS * MAX_DIM], q_along[ROWS * MAX_DIM], dout_across[ROWS * MAX_DIM], dout_along[ROWS * MAX_DIM];
    uint16_t k[COLUMNS * MAX_DIM], v[COLUMNS * MAX_DIM], k_turned[COLUMNS * MAX_DIM];
    uint16_t ds_along[COLUMNS * ROWS];
    float s[2][STRIP * FLOATS], dp[2][STRIP * FLOATS];     /* transposed: [key][row] */
    uint16_t p[2][STRIP * HALVES], ds[2][STRIP * HALVES];  /* likewise */
    float dk[COLUMNS * MAX_DIM], dv[COLUMNS * MAX_DIM], dq[MAX_DIM * FLOATS]; /* dq is transposed */
    float lse[ROWS], delta[ROWS];
    int32_t begin[ROWS], end[ROWS]; /* columns that a row meets */
} backward_space;

typedef struct chunk_job {
    backward_space *f;
    int64_t rows, width; /* both padded */
    int64_t chunks;
    float scale;
} chunk_job;

/* 32 rows of S^T, then of dP^T. */
INLINE void chunk_scores(const chunk_job *t, int64_t chunk, int64_t piece) {
    backward_space *f = t->f;
    const int64_t steps = t->width / 32, groups = t->rows / 32, g = piece % groups;
    const bool scores = piece < groups;
    product((scores ? f->s : f->dp)[chunk & 1] + g * 32, FLOATS, (scores ? f->k : f->v) + chunk * STRIP * t->width, t->width,
            16 * t->width, 32, (scores ? f->q_across : f->dout_across) + 2 * g * steps * TILE, steps * TILE, TILE, steps,
            false);
}

/* 32 dimensions of dV, then of dK. */
INLINE void chunk_gradients(const chunk_job *t, int64_t chunk, int64_t piece) {
    backward_space *f = t->f;
    const int64_t groups = t->width / 32, g = piece % groups;
    const bool values = piece < groups;
    product((values ? f->dv : f->dk) + chunk * STRIP * t->width + g * 32, t->width, (values ? f->p : f->ds)[chunk & 1], HALVES,
            16 * HALVES, 32, (values ? f->dout_along : f->q_along) + 2 * g * TILE, TILE, 2 * groups * TILE, t->rows / 32, false);
}

/* Rows of P^T and dS^T of keys 2*pair and 2*pair + 1. */
INLINE void chunk_pair(const chunk_job *t, int64_t chunk, int64_t pair, const bool masked) {
    backward_space *f = t->f;
    const vec factor = splat(t->scale);
    for (int64_t r = 0; r < t->rows; r += 32) {
        halves ds_of[2];
        for (int odd = 0; odd < 2; odd++) {
            const int64_t key = 2 * pair + odd;
            const float *s = f->s[chunk & 1] + key * FLOATS + r, *dp = f->dp[chunk & 1] + key * FLOATS + r;
            vec p[2], ds[2];
            for (int half = 0; half < 2; half++) {
                const int64_t i = r + 16 * half;
                p[half] = exp_of(load(s + 16 * half) * factor - load(f->lse + i));
                ds[half] = p[half] * (load(dp + 16 * half) - load(f->delta + i)) * factor;
                if (masked) {
                    const ivec column = (int32_t)(chunk * STRIP + key) - (ivec){0};
                    const ivec begin = (ivec)load((const float *)(const void *)(f->begin + i)),
                               end = (ivec)load((const float *)(const void *)(f->end + i));
                    const ivec met = (column >= begin) & (column < end);
                    p[half] = (vec)((ivec)p[half] & met);
                    ds[half] = (vec)((ivec)ds[half] & met);
                }
            }
            *(halves_any *)(f->p[chunk & 1] + key * HALVES + r) = VEC_TO_BF16(p[0], p[1]);
            ds_of[odd] = VEC_TO_BF16(ds[0], ds[1]);
            *(halves_any *)(f->ds[chunk & 1] + key * HALVES + r) = ds_of[odd];
        }
        half16 part[2][2];
        memcpy(part, ds_of, sizeof part);
        for (int half = 0; half < 2; half++)
            *(words_any *)(f->ds_along + (chunk * (t->rows / 16) + r / 16 + half) * TILE + pair * 32) =
                interleave(part[0][half], part[1][half]);
    }
}

static bool chunk_is_whole(const chunk_job *t, int64_t chunk) {
    int32_t begin = INT32_MIN, end = INT32_MAX;
    for (int64_t i = 0; i < t->rows; i++) {
        begin = t->f->begin[i] > begin ? t->f->begin[i] : begin;
        end = t->f->end[i] < end ? t->f->end[i] : end;
    }
    return begin <= chunk * STRIP && end >= (chunk + 1) * STRIP;
}

/* One turn: P and dS of `chunk`, while the tile unit computes the scores of the next and the gradients of the one before. */
static void backward_chunk(const chunk_job *t, int64_t chunk) {
    const int64_t score_pieces = chunk + 1 < t->chunks ? 2 * (t->rows / 32) : 0, gradient_pieces = chunk > 0 ? 2 * (t->width / 32) : 0;
    const int64_t pieces = score_pieces + gradient_pieces;
    const bool masked = !chunk_is_whole(t, chunk);
    for (int64_t pair = 0, done = 0; pair < STRIP / 2; pair++) {
        for (; done * (STRIP / 2) < (pair + 1) * pieces; done++) {
            if (done < score_pieces)
                chunk_scores(t, chunk + 1, done);
            else
                chunk_gradients(t, chunk - 1, done - score_pieces);
        }
        if (masked)
            chunk_pair(t, chunk, pair, true);
        else
            chunk_pair(t, chunk, pair, false);
    }
}

static void load_gradients(backward_space *f, const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end,
                           int64_t first, int64_t last) {
    const int64_t dim = place->problem->head_dim, width = padded(dim), rows = end - begin, all = padded(rows);
    for (int64_t i = 0; i < all; i++) {
        const int64_t r = begin + i;
        int64_t low = 0, high = 0;
        f->lse[i] = f->delta[i] = 0;
        if (i < rows) {
            ra_place_interval(place, r, &low, &high);
            f->lse[i] = ((const float *)step->lse.data)[ra_place_at(place, &step->lse, r)];
            f->delta[i] = ((const float *)step->delta.data)[ra_place_at(place, &step->delta, r)];
        }
        low = ra_max(low, first) - first;
        high = ra_min(high, last) - first;
        if (f->lse[i] == -INFINITY || low >= high) { /* nothing: and its q and dout may be anything */
            f->lse[i] = f->delta[i] = 0;
            low = high = 0;
        }
        f->begin[i] = (int32_t)low;
        f->end[i] = (int32_t)high;
    }
    for (int pass = 0; pass < 2; pass++) {
        const ra_tensor *tensor = pass ? &step->dout : &step->q;
        for (int64_t i = 0; i < all; i++) {
            if (f->begin[i] < f->end[i])
                load_half_row(f->rows + i * width, tensor->data, ra_place_at(place, tensor, begin + i), dim);
            else
                memset(f->rows + i * width, 0, (size_t)width * 2);
        }
        pack_across(pass ? f->dout_across : f->q_across, f->rows, all, width);
        pack_along(pass ? f->dout_along : f->q_along, f->rows, all, width);
    }
}

INLINE void add_row(float *restrict to, const float *restrict from, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) to[d] += from[d];
}

static void add_gradients(const backward_space *f, const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end,
                          int64_t first, int64_t last) {
    const ra_item *item = place->item;
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    for (int64_t i = 0; i < end - begin; i += 16)
        for (int64_t d = 0; d < dim; d += 16) {
            float block[16 * 16];
            transpose(block, 16, f->dq + d * FLOATS + i, FLOATS);
            for (int64_t r = i; r < ra_min(i + 16, end - begin); r++)
                add_row((float *)step->dq_acc.data + ra_place_at(place, &step->dq_acc, begin + r) + d, block + (r - i) * 16,
                        ra_min(16, dim - d));
        }
    for (int64_t c = 0; c < last - first; c++) {
        add_row((float *)item->dk_view.data + ra_place_key_at(place, &item->dk_view, first + c), f->dk + c * width, dim);
        add_row((float *)item->dv_view.data + ra_place_key_at(place, &item->dv_view, first + c), f->dv + c * width, dim);
    }
}

static void backward_tile(const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end, int64_t first, int64_t last,
                          void *scratch) {
    backward_space *f = scratch;
    const ra_problem *problem = place->problem;
    const int64_t width = padded(problem->head_dim), keys = padded(last - first);
    const chunk_job t = {.f = f, .rows = padded(end - begin), .width = width, .chunks = keys / STRIP, .scale = (float)problem->scale};
    load_gradients(f, step, place, begin, end, first, last);
    load_keys(f->v, place, &place->item->v_view, first, last);
    load_keys(f->k, place, &place->item->k_view, first, last);
    pack_along(f->ds_along, f->k, keys, width); /* room that is free until the first chunk */
    pack_turned(f->k_turned, f->ds_along, keys, width);
    TILES_ON();
    for (int64_t i = 0; i < 2 * (t.rows / 32); i++) chunk_scores(&t, 0, i);
    for (int64_t chunk = 0; chunk < t.chunks; chunk++) backward_chunk(&t, chunk);
    for (int64_t i = 0; i < 2 * (width / 32); i++) chunk_gradients(&t, t.chunks - 1, i);
    for (int64_t d = 0; d < width; d += 32)
        for (int64_t i = 0; i < t.rows; i += 32)
            product(f->dq + d * FLOATS + i, FLOATS, f->k_turned + d / 16 * t.chunks * TILE, 32, t.chunks * TILE, TILE,
                    f->ds_along + i / 16 * TILE, TILE, t.rows / 16 * TILE, t.chunks, false);
    TILES_OFF();
    bool finite = all_finite(f->dk, (last - first) * width) && all_finite(f->dv, (last - first) * width);
    for (int64_t d = 0; d < problem->head_dim; d++) finite &= all_finite(f->dq + d * FLOATS, end - begin);
    if (finite)
        add_gradients(f, step, place, begin, end, first, last);
    else
        ra_scalar_backward_tile(step, place, begin, end, first, last, scratch);
}

/* --------------------------------------------------------------------------------------------------------- family */

/* What AMX does not compute goes to the kernels of AVX-512, which every processor with AMX has. */
static bool left_to_avx512(const ra_problem *problem) {
    return problem->dtype != RA_BF16 || problem->dropout > 0 || !(problem->scale > 0);
}

int64_t ra_amx_forward_scratch(const ra_problem *problem, int workers) {
    if (left_to_avx512(problem)) return ra_avx512_forward_scratch(problem, workers);
    return workers * ra_round_up(ra_max((int64_t)sizeof(forward_space), ra_scalar_forward_scratch(problem, 1)), 64);
}

int64_t ra_amx_backward_scratch(const ra_problem *problem, int workers) {
    if (left_to_avx512(problem)) return ra_avx512_backward_scratch(problem, workers);
    return workers * ra_round_up(ra_max((int64_t)sizeof(backward_space), ra_scalar_backward_scratch(problem, 1)), 64);
}

ra_status ra_amx_forward(const ra_forward_step *step) {
    if (left_to_avx512(step->problem)) return ra_avx512_forward(step);
    return ra_cpu_forward(step, forward_tile, QUERIES, ra_amx_forward_scratch(step->problem, 1));
}

ra_status ra_amx_backward(const ra_backward_step *step) {
    if (left_to_avx512(step->problem)) return ra_avx512_backward(step);
    return ra_cpu_backward(step, backward_tile, ROWS, COLUMNS, ra_amx_backward_scratch(step->problem, 1));
}
