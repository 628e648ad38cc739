/* Attention by register-blocked FMA in f32, written once for every vector length. A family's file defines
 *
 *     COLUMNS         vectors of a register tile: TILE_ROWS x COLUMNS sums stay in registers
 *     FAMILY(name)    the family's name for a function
 *     VEC_LOAD_F16(p) LANES elements of f16
 *
 * and what vec.h asks for, and includes this file. 16-bit types are converted when rows are read.
 *
 * Forward. A tile is up to QUERIES rows. For each block of keys, K is packed as columns (key panels: [panel][d][PANEL keys]) and V as
 * rows; this is also the gather of dilated rows. Then, for each strip of rows:
 *
 *       S = Q K^T            strip x keys, in registers by 6 x PANEL
 *       P = exp(S - m)       in place, with the row sums
 *       acc += P V           strip x D, in registers by 6 x PANEL; the sum over a block is formed before it is added
 *
 * The maximum m of a row is that of its first block, and stays: weights may exceed 1, and f32 bears that, until the sum of a block
 * passes 2^60. Then the strip is computed again with its true maximum. So no pass over the scores looks for a maximum as a rule.
 *
 * Backward. A tile is rows x keys:   S = Q K^T,  dP = dO V^T,  P = exp(S - lse),  dS = P (dP - delta),  then dQ += dS K for the rows and,
 * with the strips of P and dS read as columns, dV += P^T dO and dK += dS^T Q for the keys. Five products on one micro kernel.
 *
 * Masked scores are replaced, never multiplied; but a weight of 0 times a NaN in a masked row of V is a NaN. A result that is not
 * finite is therefore thrown away, and the strip (backward: the tile) computed by the scalar kernel, which touches no masked row.
 */
#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/step.h"
#include "kernels/cpu/vec.h"

enum {
    MAX_DIM = 256,
    TILE_ROWS = 6,
    PANEL = COLUMNS * LANES, /* keys (or dimensions) of a register tile */
    STRIP = 48,              /* rows whose scores are held at a time */
    KEYS = 128,              /* of a block, forward */
    QUERIES = 288,           /* rows of a tile at most: what one packing of K and V serves; more would cost a ring its memory */
    BACK_KEYS = 256,         /* of a tile, backward */
    BACK_ROWS = 240,
    PART = 64,               /* of the head dimension, in a sum */
    SCORES = BACK_KEYS + 16, /* stride of a strip; the tail is for register tiles that stick out */
};

static int64_t padded(int64_t count) { return ra_round_up(count, LANES); }

/* ------------------------------------------------------------------------------------------------------- products */

/* C (TILE_ROWS x nv vectors) = or += A B over `depth`: A(i, k) = a[i*a_row + k*a_step], B's row k at b + k*b_step. */
INLINE void micro(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, int64_t depth, float *c,
                  int64_t c_row, const int nv, const bool add) {
    vec sum[TILE_ROWS][COLUMNS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < nv; j++) sum[i][j] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        vec column[COLUMNS];
        for (int j = 0; j < nv; j++) column[j] = load(b + j * LANES);
        for (int i = 0; i < TILE_ROWS; i++) {
            const vec x = splat(a[i * a_row]);
            for (int j = 0; j < nv; j++) sum[i][j] += x * column[j];
        }
        a += a_step;
        b += b_step;
    }
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < nv; j++) {
            float *to = c + i * c_row + j * LANES;
            store(to, add ? load(to) + sum[i][j] : sum[i][j]);
        }
}

#define MICRO(nv)                                                                                                              \
    case nv:                                                                                                                   \
        for (int64_t i = 0; i < rows; i += TILE_ROWS)                                                                          \
            micro(a + i * a_row, a_row, a_step, panel, b_step, depth, c + i * c_row + j, c_row, nv, add);                      \
        break;

/* The same for `rows` rows (rounded up to TILE_ROWS; A and C have them) and `columns`, a multiple of LANES. B's columns lie in panels:
 * panel j/PANEL at b + j*b_panel. */
INLINE void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b,
                    int64_t b_step, int64_t b_panel, float *c, int64_t c_row, const bool add) {
    for (int64_t j = 0; j < columns; j += PANEL) {
        const float *panel = b + j * b_panel;
        switch (ra_min(PANEL, columns - j) / LANES) {
            MICRO(1)
#if COLUMNS > 1
            MICRO(2)
#endif
#if COLUMNS > 2
            MICRO(3)
            MICRO(4)
#endif
        }
    }
}

/* S = X Y^T: rows of X against key panels of Y. Long sums are formed in parts: an error of a score is one of its exponential. */
static void scores(int64_t rows, int64_t columns, int64_t dim, const float *x, const float *panels, float *s) {
    const int64_t part = ra_min(dim, PART);
    product(rows, columns, part, x, padded(dim), 1, panels, PANEL, dim, s, SCORES, false);
    for (int64_t d = part; d < dim; d += PART)
        product(rows, columns, ra_min(dim - d, PART), x + d, padded(dim), 1, panels + d * PANEL, PANEL, dim, s, SCORES, true);
}
/* Y += W X: rows of weights, X by rows. */
static void combine(int64_t rows, int64_t dim, int64_t keys, const float *w, const float *x, float *y) {
    product(rows, padded(dim), keys, w, SCORES, 1, x, padded(dim), 1, y, padded(dim), true);
}
/* Y += W^T X. */
static void spread(int64_t keys, int64_t dim, int64_t rows, const float *w, const float *x, float *y) {
    product(keys, padded(dim), rows, w, 1, SCORES, x, padded(dim), 1, y, padded(dim), true);
}

/* -------------------------------------------------------------------------------------------------------- packing */

/* dst = one row of a tensor in f32, zeros up to the padded length. */
INLINE void load_row(float *restrict dst, const void *data, ra_dtype dtype, int64_t offset, int64_t dim) {
    int64_t d = 0;
    if (dtype == RA_F32) {
        const float *src = (const float *)data + offset;
        for (; d + LANES <= dim; d += LANES) store(dst + d, load(src + d));
        for (; d < dim; d++) dst[d] = src[d];
    } else if (dtype == RA_BF16) {
        const uint16_t *src = (const uint16_t *)data + offset;
        for (; d < dim; d++) dst[d] = ra_bf16_to_f32(src[d]);
    } else {
        const uint16_t *src = (const uint16_t *)data + offset;
        for (; d + LANES <= dim; d += LANES) store(dst + d, VEC_LOAD_F16(src + d));
        for (; d < dim; d++) dst[d] = ra_f16_to_f32(src[d]);
    }
    for (; d < padded(dim); d++) dst[d] = 0;
}

/* Keys [low, last) of a view as rows, of which the first belongs to key `first` <= low: rows of zeros before low, and after last up to
 * whole vectors of keys. */
static void pack_rows(float *rows, const ra_place *place, const ra_tensor *view, int64_t first, int64_t low, int64_t last) {
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    memset(rows, 0, (size_t)((low - first) * width) * sizeof(float));
    for (int64_t c = low; c < last; c++)
        load_row(rows + (c - first) * width, view->data, place->problem->dtype, ra_place_key_at(place, view, c), dim);
    memset(rows + (last - first) * width, 0, (size_t)((padded(last - first) - (last - first)) * width) * sizeof(float));
}

/* Rows to key panels. The panels have `dim` rows, rounded up to LANES rows in the last panel only: what sticks out of a panel is
 * overwritten by the next. */
static void pack_panels(float *panels, const float *rows, int64_t dim, int64_t count) {
    for (int64_t c = 0; c < padded(count); c += LANES)
        for (int64_t d = 0; d < dim; d += LANES)
            transpose(panels + c / PANEL * PANEL * dim + c % PANEL + d * PANEL, PANEL, rows + c * padded(dim) + d, padded(dim));
}

/* ---------------------------------------------------------------------------------------------------------- strips */

/* The keys of a block that a strip of rows meets: columns [begin, end), and [from, to) rounded out to panels and vectors. `whole`: every
 * row meets all of [from, to). */
typedef struct span_of_keys {
    int64_t begin, end, from, to;
    bool whole;
} span_of_keys;

/* begins and ends: the rows' intervals, which move up from row to row, but for rows that are empty on purpose. */
static span_of_keys keys_of(const int64_t *begins, const int64_t *ends, int64_t rows, int64_t first, int64_t last) {
    span_of_keys k = {.begin = last, .end = first};
    for (int64_t i = 0; i < rows; i++) {
        if (ends[i] <= begins[i]) continue;
        k.begin = ra_min(k.begin, begins[i]);
        k.end = ra_max(k.end, ends[i]);
    }
    k.begin = ra_max(k.begin, first) - first;
    k.end = ra_min(k.end, last) - first;
    k.from = k.begin / PANEL * PANEL;
    k.to = padded(k.end);
    k.whole = k.to <= last - first;
    for (int64_t i = 0; i < rows; i++) k.whole &= begins[i] <= first + k.from && ends[i] >= first + k.to;
    return k;
}

/* -------------------------------------------------------------------------------------------------------- forward */

enum { TOO_LARGE = 60 }; /* a block's sum of weights beyond 2^60 asks for a new maximum */

typedef struct forward_space {
    float *panels, *values, *key_rows, *q, *acc; /* as long as the head dimension asks for: forward_arrays */
    vec *sums;                                   /* of the weights of each row, by lanes: reduced once, at the end */
    float s[STRIP * SCORES];
    vec block_sums[STRIP];
    float m[QUERIES];
    double l[QUERIES]; /* what the sums do not hold: the state that came in */
    int64_t begin[QUERIES], end[QUERIES];
} forward_space;

/* Lays the arrays out behind the space itself; with base NULL only tells how long all of it is. */
static int64_t forward_arrays(const ra_problem *problem, char *base, forward_space *f) {
    const int64_t row = padded(problem->head_dim) * (int64_t)sizeof(float), rows = ra_cpu_tile_rows(problem, STRIP, QUERIES);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->panels = ra_carve(&at, (KEYS + PANEL) * row + PANEL * LANES * (int64_t)sizeof(float));
    f->values = ra_carve(&at, (KEYS + TILE_ROWS) * row);
    f->key_rows = ra_carve(&at, (KEYS + TILE_ROWS) * row);
    f->q = ra_carve(&at, rows * row);
    f->acc = ra_carve(&at, rows * row);
    f->sums = ra_carve(&at, rows * (int64_t)sizeof(vec));
    return at - base;
}

/* Gives rows that have no maximum yet the one of these scores, and rows that outgrew theirs as well. */
static void renew_maxima(forward_space *f, int64_t row, int64_t rows, const span_of_keys *k, float scale, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        vec high = splat(-INFINITY);
        for (int64_t c = k->from; c < k->to; c += LANES) high = VEC_MAX(high, load(f->s + i * SCORES + c));
        const float old = f->m[row + i], max = max_of(high) * scale;
        if (!(max > old + 8)) continue; /* also when there is no score but -inf */
        const float shrink = expf(old - max);
        for (int64_t d = 0; d < width; d++) f->acc[(row + i) * width + d] *= shrink;
        f->sums[row + i] *= splat(shrink);
        f->l[row + i] *= (double)shrink;
        f->m[row + i] = max;
    }
}

/* s = exp(s * scale - m) in place, with the sums by lanes. False if a sum is too large, or is no number. */
static bool weigh(forward_space *f, int64_t row, int64_t rows, const span_of_keys *k, float scale) {
    vec total = splat(0);
    for (int64_t i = 0; i < rows; i++) {
        const float m = f->m[row + i];
        const vec base = splat(m == -INFINITY ? 0 : m), factor = splat(scale);
        float *s = f->s + i * SCORES;
        vec sum0 = splat(0), sum1 = splat(0);
        int64_t c = k->from;
        for (; c + 2 * LANES <= k->to; c += 2 * LANES) {
            const vec p0 = exp_of(load(s + c) * factor - base), p1 = exp_of(load(s + c + LANES) * factor - base);
            store(s + c, p0);
            store(s + c + LANES, p1);
            sum0 += p0;
            sum1 += p1;
        }
        for (; c < k->to; c += LANES) {
            const vec p = exp_of(load(s + c) * factor - base);
            store(s + c, p);
            sum0 += p;
        }
        f->block_sums[i] = sum0 + sum1;
        total += f->block_sums[i];
    }
    return sum_of(total) < (float)(1LL << TOO_LARGE);
}

/* Strip of rows [row, row + rows) against the packed block of keys [first, last). */
static void forward_strip(forward_space *f, const ra_problem *problem, int64_t row, int64_t rows, int64_t first, int64_t last) {
    const int64_t dim = problem->head_dim, width = padded(dim);
    const float scale = (float)problem->scale;
    const span_of_keys k = keys_of(f->begin + row, f->end + row, rows, first, last);
    if (k.begin >= k.end) return;
    bool renew = false;
    for (int64_t i = 0; i < rows; i++) renew |= f->m[row + i] == -INFINITY;
    for (bool right = false; !right;) {
        scores(rows, k.to - k.from, dim, f->q + row * width, f->panels + k.from * dim, f->s + k.from);
        if (!k.whole)
            for (int64_t i = 0; i < rows; i++)
                mask_row(f->s + i * SCORES, f->begin[row + i], f->end[row + i], first, k.from, k.to, -INFINITY);
        if (renew) renew_maxima(f, row, rows, &k, scale, width);
        right = weigh(f, row, rows, &k, scale) || renew;
        renew = true;
    }
    for (int64_t i = 0; i < rows; i++) f->sums[row + i] += f->block_sums[i];
    combine(rows, dim, k.end - k.begin, f->s + k.begin, f->values + k.begin * width, f->acc + row * width);
}

static void load_queries(forward_space *f, const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end) {
    const int64_t dim = place->problem->head_dim, width = padded(dim), rows = end - begin;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = begin + i;
        load_row(f->q + i * width, step->q.data, place->problem->dtype, ra_place_at(place, &step->q, r), dim);
        ra_place_interval(place, r, &f->begin[i], &f->end[i]);
        f->m[i] = -INFINITY;
        f->l[i] = 0;
        f->sums[i] = splat(0);
        if (step->single) {
            memset(f->acc + i * width, 0, (size_t)width * sizeof(float));
        } else {
            load_row(f->acc + i * width, step->acc.data, RA_F32, ra_place_at(place, &step->acc, r), dim);
            f->m[i] = ((const float *)step->m.data)[ra_place_at(place, &step->m, r)];
            f->l[i] = (double)((const float *)step->l.data)[ra_place_at(place, &step->l, r)];
        }
    }
    /* Rows that fill up the last register tile: their results are finite, and go nowhere. */
    const size_t rest = (size_t)((ra_ceil_div(rows, TILE_ROWS) * TILE_ROWS - rows) * width) * sizeof(float);
    memset(f->q + rows * width, 0, rest);
    memset(f->acc + rows * width, 0, rest);
}

/* Writes rows [row, row + rows) of the tile that begins at `begin`. False, and nothing written, if they are not finite. */
static bool store_rows(forward_space *f, const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t row, int64_t rows) {
    const ra_dtype dtype = place->problem->dtype;
    const int64_t dim = place->problem->head_dim, width = padded(dim);
    bool finite = all_finite(f->acc + row * width, rows * width);
    for (int64_t i = row; i < row + rows; i++) {
        f->l[i] += (double)sum_of(f->sums[i]);
        finite &= isfinite(f->l[i]) && f->m[i] < INFINITY;
    }
    for (int64_t i = row; finite && i < row + rows; i++) {
        const int64_t r = begin + i;
        float *acc = f->acc + i * width;
        if (!step->single) {
            memcpy((float *)step->acc.data + ra_place_at(place, &step->acc, r), acc, (size_t)dim * sizeof(float));
            ((float *)step->m.data)[ra_place_at(place, &step->m, r)] = f->m[i];
            ((float *)step->l.data)[ra_place_at(place, &step->l, r)] = (float)f->l[i];
            continue;
        }
        const bool empty = f->l[i] == 0;
        const float share = empty ? 0 : (float)(1 / f->l[i]);
        for (int64_t d = 0; d < dim; d++) acc[d] *= share;
        ra_convert((char *)step->out.data + ra_place_at(place, &step->out, r) * (int64_t)ra_dtype_size(dtype), dtype, acc, RA_F32, dim);
        if (step->lse.data)
            ((float *)step->lse.data)[ra_place_at(place, &step->lse, r)] =
                empty ? -INFINITY : (float)((double)f->m[i] + log(f->l[i]));
    }
    return finite;
}

static void forward_tile(const ra_forward_step *step, const ra_place *place, int64_t begin, int64_t end, void *scratch) {
    forward_space *f = scratch;
    const int64_t dim = place->problem->head_dim, rows = end - begin;
    forward_arrays(place->problem, scratch, f);
    load_queries(f, step, place, begin, end);
    int64_t low, high;
    ra_place_hull(place, begin, end, &low, &high);
    /* Blocks begin at multiples of KEYS, whatever the tile: so a row's sums do not depend on the rows beside it. */
    for (int64_t first = low / KEYS * KEYS; first < high; first += KEYS) {
        const int64_t last = ra_min(first + KEYS, high);
        pack_rows(f->key_rows, place, &place->item->k_view, first, ra_max(first, low), last);
        pack_panels(f->panels, f->key_rows, dim, last - first);
        pack_rows(f->values, place, &place->item->v_view, first, ra_max(first, low), last);
        for (int64_t row = 0; row < rows; row += STRIP)
            forward_strip(f, place->problem, row, ra_min(STRIP, rows - row), first, last);
    }
    /* Strips, not tiles, are given up: which rows a tile holds depends on the number of workers. */
    uint32_t bad = 0;
    for (int64_t row = 0; row < rows; row += STRIP)
        if (!store_rows(f, step, place, begin, row, ra_min(STRIP, rows - row))) bad |= 1u << row / STRIP;
    for (int64_t row = 0; bad && row < rows; row += STRIP)
        if (bad >> row / STRIP & 1) ra_scalar_forward_tile(step, place, begin + row, begin + ra_min(row + STRIP, rows), scratch);
}

/* ------------------------------------------------------------------------------------------------------- backward */

typedef struct backward_space {
    float *key_panels, *value_panels, *keys, *dk, *dv, *q, *dout, *dq; /* backward_arrays */
    float p[STRIP * SCORES], ds[STRIP * SCORES];
    float lse[BACK_ROWS], delta[BACK_ROWS];
    int64_t begin[BACK_ROWS], end[BACK_ROWS];
} backward_space;

static int64_t backward_arrays(const ra_problem *problem, char *base, backward_space *f) {
    const int64_t row = padded(problem->head_dim) * (int64_t)sizeof(float), rows = ra_cpu_tile_rows(problem, TILE_ROWS, BACK_ROWS);
    const int64_t panels = (BACK_KEYS + PANEL) * row + PANEL * LANES * (int64_t)sizeof(float);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->key_panels = ra_carve(&at, panels);
    f->value_panels = ra_carve(&at, panels);
    f->keys = ra_carve(&at, (BACK_KEYS + TILE_ROWS) * row);
    f->dk = ra_carve(&at, (BACK_KEYS + TILE_ROWS) * row);
    f->dv = ra_carve(&at, (BACK_KEYS + TILE_ROWS) * row);
    f->q = ra_carve(&at, rows * row);
    f->dout = ra_carve(&at, rows * row);
    f->dq = ra_carve(&at, rows * row);
    return at - base;
}

/* p: scores to weights; ds: products of dout and v to gradients of the scores, scale included. */
static void differentiate(backward_space *f, int64_t row, int64_t rows, const span_of_keys *k, int64_t first, float scale) {
    const vec factor = splat(scale);
    for (int64_t i = 0; i < rows; i++) {
        float *p = f->p + i * SCORES, *ds = f->ds + i * SCORES;
        const vec lse = splat(f->lse[row + i]), delta = splat(f->delta[row + i]);
        for (int64_t c = k->from; c < k->to; c += LANES) {
            const vec weight = exp_of(load(p + c) * factor - lse);
            store(p + c, weight);
            store(ds + c, weight * (load(ds + c) - delta) * factor);
        }
        if (!k->whole) {
            mask_row(p, f->begin[row + i], f->end[row + i], first, k->from, k->to, 0);
            mask_row(ds, f->begin[row + i], f->end[row + i], first, k->from, k->to, 0);
        }
        /* keys that fill up the last register tile of dk and dv */
        for (int64_t c = k->to; c < k->to + TILE_ROWS; c++) p[c] = ds[c] = 0;
    }
}

static void load_gradients(backward_space *f, const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end) {
    const ra_problem *problem = place->problem;
    const int64_t dim = problem->head_dim, width = padded(dim), rows = end - begin, all = ra_ceil_div(rows, TILE_ROWS) * TILE_ROWS;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = begin + i;
        ra_place_interval(place, r, &f->begin[i], &f->end[i]);
        f->lse[i] = ((const float *)step->lse.data)[ra_place_at(place, &step->lse, r)];
        f->delta[i] = ((const float *)step->delta.data)[ra_place_at(place, &step->delta, r)];
        if (f->lse[i] == -INFINITY) f->end[i] = f->begin[i]; /* no key that counts */
        if (f->begin[i] >= f->end[i]) {
            f->lse[i] = f->delta[i] = 0;
            memset(f->q + i * width, 0, (size_t)width * sizeof(float));
            memset(f->dout + i * width, 0, (size_t)width * sizeof(float));
            continue;
        }
        load_row(f->q + i * width, step->q.data, problem->dtype, ra_place_at(place, &step->q, r), dim);
        load_row(f->dout + i * width, step->dout.data, problem->dtype, ra_place_at(place, &step->dout, r), dim);
    }
    memset(f->q + rows * width, 0, (size_t)((all - rows) * width) * sizeof(float));
    memset(f->dout + rows * width, 0, (size_t)((all - rows) * width) * sizeof(float));
    memset(f->dq, 0, (size_t)(all * width) * sizeof(float));
}

INLINE void add_row(float *restrict to, const float *restrict from, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) to[d] += from[d];
}

static void backward_tile(const ra_backward_step *step, const ra_place *place, int64_t begin, int64_t end, int64_t first, int64_t last,
                          void *scratch) {
    backward_space *f = scratch;
    const ra_item *item = place->item;
    const int64_t dim = place->problem->head_dim, width = padded(dim), rows = end - begin, keys = last - first;
    backward_arrays(place->problem, scratch, f);
    load_gradients(f, step, place, begin, end);
    pack_rows(f->keys, place, &item->v_view, first, first, last);
    pack_panels(f->value_panels, f->keys, dim, keys);
    pack_rows(f->keys, place, &item->k_view, first, first, last);
    pack_panels(f->key_panels, f->keys, dim, keys);
    memset(f->dk, 0, (size_t)((keys + TILE_ROWS) * width) * sizeof(float));
    memset(f->dv, 0, (size_t)((keys + TILE_ROWS) * width) * sizeof(float));
    for (int64_t row = 0; row < rows; row += STRIP) {
        const int64_t count = ra_min(STRIP, rows - row);
        const span_of_keys k = keys_of(f->begin + row, f->end + row, count, first, last);
        if (k.begin >= k.end) continue;
        scores(count, k.to - k.from, dim, f->q + row * width, f->key_panels + k.from * dim, f->p + k.from);
        scores(count, k.to - k.from, dim, f->dout + row * width, f->value_panels + k.from * dim, f->ds + k.from);
        differentiate(f, row, count, &k, first, (float)place->problem->scale);
        spread(k.end - k.begin, dim, count, f->p + k.begin, f->dout + row * width, f->dv + k.begin * width);
        spread(k.end - k.begin, dim, count, f->ds + k.begin, f->q + row * width, f->dk + k.begin * width);
        combine(count, dim, k.end - k.begin, f->ds + k.begin, f->keys + k.begin * width, f->dq + row * width);
    }
    if (!all_finite(f->dq, rows * width) || !all_finite(f->dk, keys * width) || !all_finite(f->dv, keys * width)) {
        ra_scalar_backward_tile(step, place, begin, end, first, last, scratch);
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        add_row((float *)step->dq_acc.data + ra_place_at(place, &step->dq_acc, begin + i), f->dq + i * width, dim);
    for (int64_t c = 0; c < keys; c++) {
        add_row((float *)item->dk_view.data + ra_place_key_at(place, &item->dk_view, first + c), f->dk + c * width, dim);
        add_row((float *)item->dv_view.data + ra_place_key_at(place, &item->dv_view, first + c), f->dv + c * width, dim);
    }
}

/* --------------------------------------------------------------------------------------------------------- family */

/* What is left to the scalar kernel: float64, dropout, and scales that turn a masked score of -inf into something else. */
static bool left_to_scalar(const ra_problem *problem) {
    return problem->dtype == RA_F64 || problem->dropout > 0 || !(problem->scale > 0);
}

int64_t FAMILY(forward_scratch)(const ra_problem *problem, int workers) {
    if (left_to_scalar(problem)) return ra_scalar_forward_scratch(problem, workers);
    forward_space space;
    return workers * ra_max(forward_arrays(problem, NULL, &space), ra_scalar_forward_scratch(problem, 1));
}

int64_t FAMILY(backward_scratch)(const ra_problem *problem, int workers) {
    if (left_to_scalar(problem)) return ra_scalar_backward_scratch(problem, workers);
    backward_space space;
    return workers * ra_max(backward_arrays(problem, NULL, &space), ra_scalar_backward_scratch(problem, 1));
}

ra_status FAMILY(forward)(const ra_forward_step *step) {
    if (left_to_scalar(step->problem)) return ra_scalar_forward(step);
    return ra_cpu_forward(step, forward_tile, STRIP, QUERIES, FAMILY(forward_scratch)(step->problem, 1));
}

ra_status FAMILY(backward)(const ra_backward_step *step) {
    if (left_to_scalar(step->problem)) return ra_scalar_backward(step);
    return ra_cpu_backward(step, backward_tile, BACK_ROWS, BACK_KEYS, FAMILY(backward_scratch)(step->problem, 1));
}
