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
 * The vector unit has about as much to do as the tile unit, so both take turns in one instruction stream: after every two tile products
 * comes a turn of vector work, about as long as the products need to finish. (In larger pieces the one would wait for the other: the
 * reorder buffer holds about 500 instructions, a row of a block has 130.) The maximum of a row stays until a block's sum passes
 * 2^60, as in fma.h.
 *
 * Backward, rows x keys, in transposed form: chunks of 32 keys against all rows of the tile,
 *
 *       S^T = K across(Q),  dP^T = V across(dO),  P^T = exp(S^T - lse),  dS^T = P^T (dP^T - delta)
 *       dV = P^T along(dO),  dK = dS^T along(Q)
 *
 * so that P^T and dS^T are A operands as they are; dS^T is also kept as along(dS^T), and when all chunks are done
 * dQ^T = K^T along(dS^T). Here too the products of the neighbouring chunks take turns with the vector work of this one.
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
    QUERIES = 1024,    /* rows of a forward tile at most: what one packing of K and V serves */
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

/* dst = one row, zeros up to the padded length. */
INLINE void load_half_row(uint16_t *dst, const void *data, int64_t offset, int64_t dim) {
    const uint16_t *src = (const uint16_t *)data + offset;
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) *(halves_any *)(dst + d) = *(const halves_any *)(src + d);
    if (d == dim) return;
    *(halves_any *)(dst + d) = (halves){0};
    for (; d < dim; d++) dst[d] = src[d];
}

INLINE void zero_half_row(uint16_t *dst, int64_t width) {
    for (int64_t d = 0; d < width; d += 32) *(halves_any *)(dst + d) = (halves){0};
}

/* 32 keys from c as rows; zeros for keys outside [low, high). */
static void load_keys(uint16_t *rows, const ra_place *place, const ra_tensor *view, int64_t c, int64_t low, int64_t high) {
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    for (int64_t i = 0; i < 32; i++, rows += width) {
        if (c + i >= low && c + i < high)
            load_half_row(rows, view->data, ra_place_key_at(place, view, c + i), dim);
        else
            zero_half_row(rows, width);
    }
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

/* From along(X) of 32 rows to A tiles of X^T, 16 dimensions x 32 rows: chunk c of [width/16][chunks] tiles. */
static void pack_turned(uint16_t *turned, const uint16_t *along, int64_t c, int64_t chunks, int64_t width) {
    for (int64_t g = 0; g < width / 16; g++)
        transpose((float *)(void *)(turned + (g * chunks + c) * TILE), 16, (const float *)(const void *)(along + g * TILE), 16);
}

/* ------------------------------------------------------------------------------------------------------- products */

/* Where the tiles of C = A B lie, 32 x 32, `depth` steps of 32 deep. Rows of C and A are c_row and a_row elements apart; A's second tile
 * lies a_next behind the first, B's b_next; a step moves A by a_step and B by b_step. */
typedef struct factors {
    float *c;
    const uint16_t *a, *b;
    int64_t c_row, a_row, a_next, a_step, b_next, b_step, depth;
} factors;

/* C = A B, or += with `add`, with a turn of other work after every two products. */
#define PRODUCT(name, work_type, turn)                                                                                         \
    INLINE void name(const factors *t, const bool add, work_type *work) {                                                      \
        float *c0 = t->c, *c1 = t->c + 16 * t->c_row;                                                                          \
        const uint16_t *a = t->a, *b = t->b;                                                                                   \
        __asm__ volatile("" ::: "memory"); /* compilers do not know that a tile load reads memory */                           \
        if (add) {                                                                                                             \
            TILE_LOAD(0, c0, t->c_row * 4);                                                                                    \
            TILE_LOAD(1, c0 + 16, t->c_row * 4);                                                                               \
            TILE_LOAD(2, c1, t->c_row * 4);                                                                                    \
            TILE_LOAD(3, c1 + 16, t->c_row * 4);                                                                               \
        } else {                                                                                                               \
            TILE_ZERO(0);                                                                                                      \
            TILE_ZERO(1);                                                                                                      \
            TILE_ZERO(2);                                                                                                      \
            TILE_ZERO(3);                                                                                                      \
        }                                                                                                                      \
        for (int64_t k = 0; k < t->depth; k++) {                                                                               \
            TILE_LOAD(4, a, t->a_row * 2);                                                                                     \
            TILE_LOAD(6, b, 64);                                                                                               \
            TILE_DOT(0, 4, 6);                                                                                                 \
            TILE_LOAD(7, b + t->b_next, 64);                                                                                   \
            TILE_DOT(1, 4, 7);                                                                                                 \
            TILE_LOAD(5, a + t->a_next, t->a_row * 2);                                                                         \
            turn(work);                                                                                                        \
            TILE_DOT(2, 5, 6);                                                                                                 \
            TILE_DOT(3, 5, 7);                                                                                                 \
            turn(work);                                                                                                        \
            a += t->a_step;                                                                                                    \
            b += t->b_step;                                                                                                    \
        }                                                                                                                      \
        TILE_STORE(0, c0, t->c_row * 4);                                                                                       \
        TILE_STORE(1, c0 + 16, t->c_row * 4);                                                                                  \
        TILE_STORE(2, c1, t->c_row * 4);                                                                                       \
        TILE_STORE(3, c1 + 16, t->c_row * 4);                                                                                  \
    }

#define NO_TURN(work) ((void)(work))
PRODUCT(product_alone, void, NO_TURN)

/* Deals `count` units of vector work out to `turns` turns. */
typedef struct dealer {
    int64_t count, turns, done, turn;
} dealer;

INLINE bool is_due(dealer *d) { return d->done * d->turns < ++d->turn * d->count && d->done < d->count; }

/* -------------------------------------------------------------------------------------------------------- forward */

typedef struct forward_space {
    uint16_t *k, *v, *q; /* forward_arrays */
    float *acc;
    vec *sums; /* of the weights of each row, by lanes: reduced once, at the end */
    uint16_t rows[32 * MAX_DIM];
    float s[2][STRIP * SCORES];
    uint16_t p[2][STRIP * WEIGHTS];
    vec block_sums[STRIP];
    float m[QUERIES];
    double l[QUERIES]; /* what the sums do not hold: the state that came in */
    int64_t begin[QUERIES], end[QUERIES];
} forward_space;

/* Lays the arrays out behind the space itself; with base NULL only tells how long all of it is. */
static int64_t forward_arrays(const ra_problem *problem, char *base, forward_space *f) {
    const int64_t width = padded(problem->head_dim), rows = ra_cpu_tile_rows(problem, STRIP, QUERIES);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->k = ra_carve(&at, PACKED * 2);
    f->v = ra_carve(&at, PACKED * 2);
    f->q = ra_carve(&at, rows * width * 2);
    f->acc = ra_carve(&at, rows * width * (int64_t)sizeof(float));
    f->sums = ra_carve(&at, rows * (int64_t)sizeof(vec));
    return at - base;
}

/* A strip on its way through the packed keys. */
typedef struct strip {
    forward_space *f;
    int64_t row, width;   /* first row; padded head dimension */
    int64_t from, to;     /* columns of the packed keys: a multiple of KEYS, and of 32 */
    int64_t blocks;
    int64_t begin, end;   /* columns that every row meets */
    bool settled;         /* every row has a maximum */
    float scale;
} strip;

static int64_t block_columns(const strip *t, int64_t block) { return ra_min(KEYS, t->to - t->from - block * KEYS); }

/* 32 columns of the scores of a block. */
INLINE factors score_factors(const strip *t, int64_t block, int64_t piece) {
    const int64_t column = t->from + block * KEYS + piece * STRIP, steps = t->width / 32;
    return (factors){.c = t->f->s[block & 1] + piece * STRIP, .c_row = SCORES,
                     .a = t->f->q + t->row * t->width, .a_row = t->width, .a_next = 16 * t->width, .a_step = 32,
                     .b = t->f->k + column / 16 * steps * TILE, .b_next = steps * TILE, .b_step = TILE, .depth = steps};
}

/* 32 dimensions of what a block adds to acc. */
INLINE factors value_factors(const strip *t, int64_t block, int64_t piece) {
    const int64_t column = t->from + block * KEYS, groups = t->width / 16;
    return (factors){.c = t->f->acc + t->row * t->width + piece * 32, .c_row = t->width,
                     .a = t->f->p[block & 1], .a_row = WEIGHTS, .a_next = 16 * WEIGHTS, .a_step = 32,
                     .b = t->f->v + (column / 32 * groups + piece * 2) * TILE, .b_next = TILE, .b_step = groups * TILE,
                     .depth = block_columns(t, block) / 32};
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
    t->f->block_sums[i] = sum0 + sum1;
}

typedef struct forward_work {
    const strip *t;
    int64_t block, columns;
    dealer rows;
} forward_work;

INLINE void forward_turn(forward_work *w) {
    if (is_due(&w->rows)) weigh_row(w->t, w->block, w->rows.done++, w->columns);
}

PRODUCT(product_forward, forward_work, forward_turn)

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
    f->sums[r] *= splat(shrink);
    f->l[r] *= (double)shrink;
    f->m[r] = max;
}

static void add_values(const strip *t, int64_t block, int64_t piece) {
    const factors of = value_factors(t, block, piece);
    product_alone(&of, true, NULL);
}

static void mask_block(const strip *t, int64_t block, int64_t columns, int64_t packed_first) {
    forward_space *f = t->f;
    const int64_t first = packed_first + t->from + block * KEYS;
    for (int64_t i = 0; i < STRIP; i++) {
        const int64_t r = t->row + i;
        mask_row(f->s[block & 1] + i * SCORES, f->begin[r], f->end[r], first, 0, columns, -INFINITY);
    }
}

/* One turn: weights of `block`, while the tile unit computes the scores of the next and the values of the one before. */
static void forward_block(strip *t, int64_t block, int64_t packed_first) {
    forward_space *f = t->f;
    const int64_t columns = block_columns(t, block), first = t->from + block * KEYS;
    const int64_t score_pieces = block + 1 < t->blocks ? block_columns(t, block + 1) / STRIP : 0;
    int64_t value_pieces = block > 0 ? t->width / 32 : 0;
    if (t->begin > first || t->end < first + columns) mask_block(t, block, columns, packed_first);
    if (!t->settled) { /* acc is scaled: what is due must be in it */
        for (int64_t i = 0; i < value_pieces; i++) add_values(t, block - 1, i);
        value_pieces = 0;
        t->settled = true;
        for (int64_t i = 0; i < STRIP; i++) {
            renew_row(t, block, i, columns);
            t->settled &= f->m[t->row + i] > -INFINITY;
        }
    }
    forward_work work = {.t = t, .block = block, .columns = columns, .rows = {.count = STRIP}};
    work.rows.turns = 2 * (score_pieces * (t->width / 32) + value_pieces * (KEYS / 32));
    for (int64_t i = 0; i < score_pieces; i++) {
        const factors of = score_factors(t, block + 1, i);
        product_forward(&of, false, &work);
    }
    for (int64_t i = 0; i < value_pieces; i++) {
        const factors of = value_factors(t, block - 1, i);
        product_forward(&of, true, &work);
    }
    while (work.rows.done < STRIP) weigh_row(t, block, work.rows.done++, columns);
    vec total = splat(0);
    for (int64_t i = 0; i < STRIP; i++) total += f->block_sums[i];
    if (!(sum_of(total) < (float)(1LL << 60)))
        for (int64_t i = 0; i < STRIP; i++) {
            renew_row(t, block, i, columns);
            weigh_row(t, block, i, columns);
        }
    for (int64_t i = 0; i < STRIP; i++) f->sums[t->row + i] += f->block_sums[i];
}

/* Rows [row, row + STRIP) against the packed keys, of which column 0 is key `first`. */
static void forward_strip(forward_space *f, const ra_problem *problem, int64_t row, int64_t first, int64_t last) {
    strip t = {.f = f, .row = row, .width = padded(problem->head_dim), .end = last - first, .settled = true, .scale = (float)problem->scale};
    int64_t low = last, high = first;
    for (int64_t r = row; r < row + STRIP; r++) {
        t.settled &= f->m[r] > -INFINITY;
        t.begin = ra_max(t.begin, f->begin[r] - first);
        t.end = ra_min(t.end, f->end[r] - first);
        if (f->begin[r] >= f->end[r]) continue;
        low = ra_min(low, f->begin[r]);
        high = ra_max(high, f->end[r]);
    }
    low = ra_max(low, first) - first;
    high = ra_min(high, last) - first;
    if (low >= high) return;
    t.from = low / KEYS * KEYS;
    t.to = padded(high);
    t.blocks = ra_ceil_div(t.to - t.from, KEYS);
    for (int64_t i = 0; i < block_columns(&t, 0) / STRIP; i++) {
        const factors of = score_factors(&t, 0, i);
        product_alone(&of, false, NULL);
    }
    for (int64_t block = 0; block < t.blocks; block++) forward_block(&t, block, first);
    for (int64_t i = 0; i < t.width / 32; i++) add_values(&t, t.blocks - 1, i);
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
        f->sums[i] = splat(0);
        if (step->single) continue;
        memcpy(f->acc + i * width, (const float *)step->acc.data + ra_place_at(place, &step->acc, r), (size_t)dim * sizeof(float));
        f->m[i] = ((const float *)step->m.data)[ra_place_at(place, &step->m, r)];
        f->l[i] = (double)((const float *)step->l.data)[ra_place_at(place, &step->l, r)];
    }
    /* Rows that fill up the last strip: zeros, which meet what the last row meets and go nowhere. */
    memset(f->q + rows * width, 0, (size_t)((all - rows) * width) * 2);
    for (int64_t i = rows; i < all; i++) {
        f->m[i] = 0;
        f->sums[i] = splat(0);
        f->begin[i] = f->begin[rows - 1];
        f->end[i] = f->end[rows - 1];
    }
}

static void store_half_row(uint16_t *dst, const float *src, float factor, int64_t dim) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32)
        *(halves_any *)(dst + d) = VEC_TO_BF16(load(src + d) * splat(factor), load(src + d + 16) * splat(factor));
    for (; d < dim; d++) dst[d] = ra_f32_to_bf16(src[d] * factor);
}

/* Writes rows [row, row + rows) of the tile that begins at `begin`. False, and nothing written, if they are not finite. */
static bool store_rows(forward_space *f, const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t row, int64_t rows) {
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    bool finite = all_finite(f->acc + row * width, rows * width);
    for (int64_t i = row; i < row + rows; i++) {
        f->l[i] += (double)sum_of(f->sums[i]);
        finite &= isfinite(f->l[i]) && f->m[i] < INFINITY;
    }
    for (int64_t i = row; finite && i < row + rows; i++) {
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
    return finite;
}

static void pack_values(forward_space *f, const ra_place *place, int64_t first, int64_t low, int64_t high) {
    const int64_t width = padded(place->problem->head_dim);
    for (int64_t c = first; c < high; c += 32) {
        load_keys(f->rows, place, &place->item->k_view, c, low, high);
        pack_across(f->k + (c - first) * width, f->rows, 32, width);
        load_keys(f->rows, place, &place->item->v_view, c, low, high);
        pack_along(f->v + (c - first) * width, f->rows, 32, width);
    }
}

static void forward_tile(const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end, void *scratch) {
    forward_space *f = scratch;
    const ra_problem *problem = place->problem;
    const int64_t rows = end - begin, packed = PACKED / padded(problem->head_dim) / KEYS * KEYS;
    forward_arrays(problem, scratch, f);
    load_queries(f, step, place, begin, end);
    int64_t low, high;
    ra_place_hull(place, begin, end, &low, &high);
    TILES_ON();
    /* Blocks begin at multiples of KEYS, whatever the tile: so a row's sums do not depend on the rows beside it. */
    for (int64_t first = low / KEYS * KEYS; first < high; first += packed) {
        const int64_t last = ra_min(first + packed, high);
        pack_values(f, place, first, low, last);
        for (int64_t row = 0; row < rows; row += STRIP) forward_strip(f, problem, row, first, last);
    }
    TILES_OFF();
    /* Strips, not tiles, are given up: which rows a tile holds depends on the number of workers. */
    uint32_t bad = 0;
    for (int64_t row = 0; row < rows; row += STRIP)
        if (!store_rows(f, step, place, begin, row, ra_min(STRIP, rows - row))) bad |= 1u << row / STRIP;
    for (int64_t row = 0; bad && row < rows; row += STRIP)
        if (bad >> row / STRIP & 1) ra_scalar_forward_tile(step, place, begin + row, begin + ra_min(row + STRIP, rows), scratch);
}

/* ------------------------------------------------------------------------------------------------------- backward */

typedef struct backward_space {
    uint16_t *q_across, *q_along, *dout_across, *dout_along, *k, *v, *k_turned, *ds_along; /* backward_arrays */
    float *dk, *dv, *dq;                                                                   /* likewise; dq is transposed */
    uint16_t rows[32 * MAX_DIM], along[32 * MAX_DIM];
    float s[2][STRIP * FLOATS], dp[2][STRIP * FLOATS];    /* transposed: [key][row] */
    uint16_t p[2][STRIP * HALVES], ds[2][STRIP * HALVES]; /* likewise */
    float lse[ROWS], delta[ROWS];
    int32_t begin[ROWS], end[ROWS]; /* columns that a row meets */
} backward_space;

static int64_t backward_arrays(const ra_problem *problem, char *base, backward_space *f) {
    const int64_t width = padded(problem->head_dim), rows = ra_cpu_tile_rows(problem, 32, ROWS), size = (int64_t)sizeof(float);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->q_across = ra_carve(&at, rows * width * 2);
    f->q_along = ra_carve(&at, rows * width * 2);
    f->dout_across = ra_carve(&at, rows * width * 2);
    f->dout_along = ra_carve(&at, rows * width * 2);
    f->k = ra_carve(&at, COLUMNS * width * 2);
    f->v = ra_carve(&at, COLUMNS * width * 2);
    f->k_turned = ra_carve(&at, COLUMNS * width * 2);
    f->ds_along = ra_carve(&at, COLUMNS * rows * 2);
    f->dk = ra_carve(&at, COLUMNS * width * size);
    f->dv = ra_carve(&at, COLUMNS * width * size);
    f->dq = ra_carve(&at, width * FLOATS * size);
    return at - base;
}

typedef struct chunk_job {
    backward_space *f;
    int64_t rows, width; /* both padded */
    int64_t chunks;
    int64_t begin, end;  /* columns that every row meets */
    float scale;
} chunk_job;

/* 32 rows of S^T, then of dP^T. */
INLINE factors score_chunk(const chunk_job *t, int64_t chunk, int64_t piece) {
    backward_space *f = t->f;
    const int64_t steps = t->width / 32, groups = t->rows / 32, g = piece % groups;
    const bool scores = piece < groups;
    return (factors){.c = (scores ? f->s : f->dp)[chunk & 1] + g * 32, .c_row = FLOATS,
                     .a = (scores ? f->k : f->v) + chunk * STRIP * t->width, .a_row = t->width, .a_next = 16 * t->width, .a_step = 32,
                     .b = (scores ? f->q_across : f->dout_across) + 2 * g * steps * TILE, .b_next = steps * TILE, .b_step = TILE,
                     .depth = steps};
}

/* 32 dimensions of dV, then of dK. */
INLINE factors gradient_chunk(const chunk_job *t, int64_t chunk, int64_t piece) {
    backward_space *f = t->f;
    const int64_t groups = t->width / 32, g = piece % groups;
    const bool values = piece < groups;
    return (factors){.c = (values ? f->dv : f->dk) + chunk * STRIP * t->width + g * 32, .c_row = t->width,
                     .a = (values ? f->p : f->ds)[chunk & 1], .a_row = HALVES, .a_next = 16 * HALVES, .a_step = 32,
                     .b = (values ? f->dout_along : f->q_along) + 2 * g * TILE, .b_next = TILE, .b_step = 2 * groups * TILE,
                     .depth = t->rows / 32};
}

/* P^T and dS^T of keys 2*pair and 2*pair + 1, for 32 rows from r. */
INLINE void differentiate(const chunk_job *t, int64_t chunk, int64_t pair, int64_t r, const bool masked) {
    backward_space *f = t->f;
    const vec factor = splat(t->scale);
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

typedef struct backward_work {
    const chunk_job *t;
    int64_t chunk;
    int64_t pair, row; /* of the next unit */
    bool masked;
    dealer units;
} backward_work;

INLINE void backward_unit(backward_work *w) {
    if (w->masked)
        differentiate(w->t, w->chunk, w->pair, w->row, true);
    else
        differentiate(w->t, w->chunk, w->pair, w->row, false);
    w->units.done++;
    w->row += 32;
    if (w->row == w->t->rows) {
        w->row = 0;
        w->pair++;
    }
}

INLINE void backward_turn(backward_work *w) {
    if (is_due(&w->units)) backward_unit(w);
}

PRODUCT(product_backward, backward_work, backward_turn)

/* One turn: P and dS of `chunk`, while the tile unit computes the scores of the next and the gradients of the one before. */
static void backward_chunk(const chunk_job *t, int64_t chunk) {
    const int64_t score_pieces = chunk + 1 < t->chunks ? 2 * (t->rows / 32) : 0, gradient_pieces = chunk > 0 ? 2 * (t->width / 32) : 0;
    backward_work work = {.t = t, .chunk = chunk, .masked = t->begin > chunk * STRIP || t->end < (chunk + 1) * STRIP,
                          .units = {.count = STRIP / 2 * (t->rows / 32)}};
    work.units.turns = 2 * (score_pieces * (t->width / 32) + gradient_pieces * (t->rows / 32));
    for (int64_t i = 0; i < score_pieces; i++) {
        const factors of = score_chunk(t, chunk + 1, i);
        product_backward(&of, false, &work);
    }
    for (int64_t i = 0; i < gradient_pieces; i++) {
        const factors of = gradient_chunk(t, chunk - 1, i);
        product_backward(&of, false, &work);
    }
    while (work.units.done < work.units.count) backward_unit(&work);
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
        for (int64_t i = 0; i < all; i += 32) {
            for (int64_t j = i; j < i + 32; j++) {
                uint16_t *row = f->rows + (j - i) * width;
                if (f->begin[j] < f->end[j])
                    load_half_row(row, tensor->data, ra_place_at(place, tensor, begin + j), dim);
                else
                    zero_half_row(row, width);
            }
            pack_across((pass ? f->dout_across : f->q_across) + i * width, f->rows, 32, width);
            pack_along((pass ? f->dout_along : f->q_along) + i * width, f->rows, 32, width);
        }
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
    chunk_job t = {.f = f, .rows = padded(end - begin), .width = width, .chunks = keys / STRIP, .end = keys, .scale = (float)problem->scale};
    backward_arrays(problem, scratch, f);
    load_gradients(f, step, place, begin, end, first, last);
    for (int64_t i = 0; i < t.rows; i++) {
        t.begin = ra_max(t.begin, f->begin[i]);
        t.end = ra_min(t.end, f->end[i]);
    }
    for (int64_t c = 0; c < t.chunks; c++) {
        load_keys(f->v + c * 32 * width, place, &place->item->v_view, first + c * 32, first, last);
        load_keys(f->k + c * 32 * width, place, &place->item->k_view, first + c * 32, first, last);
        pack_along(f->along, f->k + c * 32 * width, 32, width);
        pack_turned(f->k_turned, f->along, c, t.chunks, width);
    }
    TILES_ON();
    for (int64_t i = 0; i < 2 * (t.rows / 32); i++) {
        const factors of = score_chunk(&t, 0, i);
        product_alone(&of, false, NULL);
    }
    for (int64_t chunk = 0; chunk < t.chunks; chunk++) backward_chunk(&t, chunk);
    for (int64_t i = 0; i < 2 * (width / 32); i++) {
        const factors of = gradient_chunk(&t, t.chunks - 1, i);
        product_alone(&of, false, NULL);
    }
    for (int64_t d = 0; d < width; d += 32)
        for (int64_t i = 0; i < t.rows; i += 32) {
            const factors of = {.c = f->dq + d * FLOATS + i, .c_row = FLOATS,
                                .a = f->k_turned + d / 16 * t.chunks * TILE, .a_row = 32, .a_next = t.chunks * TILE, .a_step = TILE,
                                .b = f->ds_along + i / 16 * TILE, .b_next = TILE, .b_step = t.rows / 16 * TILE, .depth = t.chunks};
            product_alone(&of, false, NULL);
        }
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
    forward_space space;
    return workers * ra_max(forward_arrays(problem, NULL, &space), ra_scalar_forward_scratch(problem, 1));
}

int64_t ra_amx_backward_scratch(const ra_problem *problem, int workers) {
    if (left_to_avx512(problem)) return ra_avx512_backward_scratch(problem, workers);
    backward_space space;
    return workers * ra_max(backward_arrays(problem, NULL, &space), ra_scalar_backward_scratch(problem, 1));
}

ra_status ra_amx_forward(const ra_forward_step *step) {
    if (left_to_avx512(step->problem)) return ra_avx512_forward(step);
    return ra_cpu_forward(step, forward_tile, STRIP, QUERIES, ra_amx_forward_scratch(step->problem, 1));
}

ra_status ra_amx_backward(const ra_backward_step *step) {
    if (left_to_avx512(step->problem)) return ra_avx512_backward(step);
    return ra_cpu_backward(step, backward_tile, ROWS, COLUMNS, ra_amx_backward_scratch(step->problem, 1));
}
