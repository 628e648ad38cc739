/* Random kernel steps, and their results by a naive float64 loop over the definition of an item (core/item.h).
 *
 * Every tensor lies in its own mapping between two unreadable pages, 0..63 bytes from one of them.
 * What an item does not address is NaN, and must stay as it was. */
#ifndef KERNEL_CASE_H
#define KERNEL_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/alloc.h"
#include "core/dtype.h"
#include "core/philox.h"
#include "core/workers.h"
#include "device/kernel.h"
#include "device/rows.h"
#include "reference/reference.h"

/* --------------------------------------------------------------------------------------------------------- random */

typedef struct rng {
    uint64_t seed, count;
} rng;

static inline uint32_t rng_word(rng *r) {
    r->count++;
    return ra_philox4x32(r->seed, (uint32_t)r->count, (uint32_t)(r->count >> 32), 7, 7).word[0];
}
static inline int64_t rng_int(rng *r, int64_t low, int64_t high) {
    return low + (int64_t)(rng_word(r) % (uint64_t)(high - low + 1));
}
static inline bool rng_one_in(rng *r, int n) { return rng_int(r, 1, n) == 1; }
static inline double rng_normal(rng *r) {
    const double u = ((double)rng_word(r) + 0.5) / 4294967296.0, v = (double)rng_word(r) / 4294967296.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
/* Small, or next to a multiple of what tiles are made of. */
static inline int64_t rng_count(rng *r, int64_t high) {
    static const int64_t edges[] = {1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512};
    int64_t n = rng_one_in(r, 3) ? rng_int(r, 1, 9) : edges[rng_int(r, 0, 15)] + rng_int(r, -1, 1);
    return n < 1 ? 1 : n > high ? rng_int(r, 1, high) : n;
}

/* -------------------------------------------------------------------------------------------------------- tensors */

typedef struct guarded {
    char *map;
    size_t map_bytes;
    ra_tensor tensor;
    ra_dtype dtype;
    int64_t elements;    /* allocated */
    char *copy;          /* of what was there at first */
    unsigned char *used; /* elements that an index reaches */
    double *values;      /* all elements in float64, as of guarded_read */
    int64_t batches, rows, heads, dim;
} guarded;

static inline double get_element(const void *data, ra_dtype dtype, int64_t i) {
    switch (dtype) {
    case RA_F32: return (double)((const float *)data)[i];
    case RA_BF16: return (double)ra_bf16_to_f32(((const uint16_t *)data)[i]);
    case RA_F16: return (double)ra_f16_to_f32(((const uint16_t *)data)[i]);
    case RA_F64: return ((const double *)data)[i];
    }
    return NAN;
}
static inline void set_element(void *data, ra_dtype dtype, int64_t i, double value) {
    switch (dtype) {
    case RA_F32: ((float *)data)[i] = (float)value; return;
    case RA_BF16: ((uint16_t *)data)[i] = ra_f32_to_bf16((float)value); return;
    case RA_F16: ((uint16_t *)data)[i] = ra_f32_to_f16((float)value); return;
    case RA_F64: ((double *)data)[i] = value; return;
    }
}
static inline int64_t guarded_at(const guarded *g, int64_t b, int64_t row, int64_t head, int64_t d) {
    return b * g->tensor.batch + row * g->tensor.row + head * g->tensor.head + d;
}
static inline double guarded_get(const guarded *g, int64_t b, int64_t row, int64_t head, int64_t d) {
    return get_element(g->tensor.data, g->dtype, guarded_at(g, b, row, head, d));
}
static inline void guarded_set(const guarded *g, int64_t b, int64_t row, int64_t head, int64_t d, double value) {
    set_element(g->tensor.data, g->dtype, guarded_at(g, b, row, head, d), value);
}

static inline void guarded_read(guarded *g) {
    for (int64_t i = 0; i < g->elements; i++) g->values[i] = get_element(g->tensor.data, g->dtype, i);
}
static inline const double *guarded_row(const guarded *g, int64_t b, int64_t row, int64_t head) {
    return g->values + guarded_at(g, b, row, head, 0);
}

static uint64_t tensor_offsets; /* a bit for each distance, in bytes, of a tensor from the page beside it */

/* A tensor of NaN with random strides. dim 0: like lse, without elements. */
static inline guarded guarded_new(rng *r, ra_dtype dtype, int64_t batches, int64_t rows, int64_t heads, int64_t dim) {
    guarded g = {.dtype = dtype, .batches = batches, .rows = rows, .heads = heads, .dim = dim ? dim : 1};
    const int64_t pad = rng_one_in(r, 3) ? rng_int(r, 1, 5) : 0, inner = g.dim + (dim ? pad : 0);
    if (rng_one_in(r, 2)) { /* [B, N, H, D] */
        g.tensor.head = inner;
        g.tensor.row = heads * inner + pad;
        g.tensor.batch = rows * g.tensor.row;
    } else { /* [B, H, N, D] */
        g.tensor.row = inner;
        g.tensor.head = rows * inner + pad;
        g.tensor.batch = heads * g.tensor.head;
    }
    g.elements = batches * g.tensor.batch;
    const size_t size = ra_dtype_size(dtype), page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t bytes = (size_t)g.elements * size, body = (bytes + 64 + page - 1) / page * page;
    g.map_bytes = body + 2 * page;
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(g.map != MAP_FAILED);
    assert_int_equal(mprotect(g.map, page, PROT_NONE), 0);
    assert_int_equal(mprotect(g.map + page + body, page, PROT_NONE), 0);
    const size_t offset = (size_t)rng_int(r, 0, 63) / size * size;
    tensor_offsets |= 1ull << offset;
    g.tensor.data = rng_one_in(r, 2) ? g.map + page + offset : g.map + page + body - bytes - (rng_one_in(r, 2) ? 0 : offset);
    for (int64_t i = 0; i < g.elements; i++) set_element(g.tensor.data, dtype, i, NAN);
    g.used = calloc((size_t)g.elements + 1, 1);
    g.copy = malloc(bytes + 1);
    g.values = malloc((size_t)(g.elements + 1) * sizeof(double));
    assert_true(g.used && g.copy && g.values);
    return g;
}
static inline void guarded_use(guarded *g, int64_t b, int64_t row, int64_t head) {
    for (int64_t d = 0; d < g->dim; d++) g->used[guarded_at(g, b, row, head, d)] = 1;
}
static inline void guarded_keep(guarded *g) { memcpy(g->copy, g->tensor.data, (size_t)g->elements * ra_dtype_size(g->dtype)); }
/* Checks that bytes which no index reaches are as guarded_keep found them; with `all`, the others too. */
static inline void guarded_check(const guarded *g, bool all) {
    const size_t size = ra_dtype_size(g->dtype);
    for (int64_t i = 0; i < g->elements; i++)
        if ((all || !g->used[i]) && memcmp((char *)g->tensor.data + (size_t)i * size, g->copy + (size_t)i * size, size) != 0)
            fail_msg("element %lld was written, and no index reaches it", (long long)i);
}
static inline void guarded_free(guarded *g) {
    if (!g->map) return;
    munmap(g->map, g->map_bytes);
    free(g->used);
    free(g->copy);
    free(g->values);
    memset(g, 0, sizeof *g);
}

/* ----------------------------------------------------------------------------------------------------------- case */

enum { MAX_ITEMS = 4 };

typedef struct kernel_case {
    ra_problem problem;
    int64_t key_begin[4], key_end[4];
    ra_item items[MAX_ITEMS];
    int64_t item_count;
    bool single;
    bool halves; /* sums are split: acc has the lower halves, out the upper ones */
    int64_t rows_k;
    guarded q, dout, k[MAX_ITEMS], v[MAX_ITEMS];
    guarded out, lse, acc, m, l;                     /* forward */
    guarded delta, dq, dk[MAX_ITEMS], dv[MAX_ITEMS]; /* backward; lse is an input there */
    double *want_out, *want_lse, *want_dq;           /* [B, rows, heads(, D)] */
    double *m_out, *m_lse, *m_dq;
    double *want_dk[MAX_ITEMS], *want_dv[MAX_ITEMS]; /* [B, rows_k, head index, D] */
    double *m_dk[MAX_ITEMS], *m_dv[MAX_ITEMS];
    double max_score;
} kernel_case;

typedef struct case_options {
    int64_t max_rows, max_keys; /* of one iteration of an item */
    double amplitude;           /* of q */
    bool dropout;
    bool forbid_limits; /* no window, no key range */
    bool causal;        /* and nothing else */
    bool few;           /* few query rows against many keys */
    bool single;        /* every case is */
    bool steps;         /* no case is single */
    double scale;       /* times the usual one; 0 means 1 */
    bool zero_scale;
    bool two_types;          /* f32 and bf16 only */
    int64_t rows, keys, dim; /* one item of one iteration; 0: random */
    bool several;            /* iterations, heads, batch entries and items, even if rows are given */
    int64_t q_step, k_step;  /* of positions, which then begin at 1 (q) and 0 (k); 0: random */
    int64_t diagonal;        /* not 0: a row meets the key at its own position alone, if that is not before this one */
} case_options;

static inline int64_t case_group(const kernel_case *c) { return c->problem.heads / c->problem.kv_heads; }

/* The calls of `meet`: once for each attended pair. */
typedef struct pair {
    int item;
    int64_t b, h, head, row, x, key, y;
    double factor; /* of dropout */
} pair;
typedef void meet(kernel_case *c, const pair *p, void *arg);

static inline void case_pairs(kernel_case *c, meet *visit, void *arg) {
    const ra_problem *p = &c->problem;
    for (int n = 0; n < c->item_count; n++) {
        const ra_item *t = &c->items[n];
        for (int64_t i0 = 0; i0 < t->loop[0].repeat; i0++)
            for (int64_t i1 = 0; i1 < t->loop[1].repeat; i1++)
                for (int64_t b = 0; b < p->batch; b++)
                    for (int64_t h = 0; h < t->heads.count; h++)
                        for (int64_t u = 0; u < case_group(c); u++)
                            for (int64_t a = 0; a < t->q.count; a++)
                                for (int64_t e = 0; e < t->k.count; e++) {
                                    pair pr = {.item = n, .b = b, .h = h, .factor = 1};
                                    pr.head = (t->heads.start + h * t->heads.step) * case_group(c) + u;
                                    pr.row = t->q.row + a * t->q.row_step + i0 * t->loop[0].q_row + i1 * t->loop[1].q_row;
                                    pr.x = t->q.pos + a * t->q.pos_step + i0 * t->loop[0].q_pos + i1 * t->loop[1].q_pos;
                                    pr.key = t->k.row + e * t->k.row_step + i0 * t->loop[0].k_row + i1 * t->loop[1].k_row;
                                    pr.y = t->k.pos + e * t->k.pos_step + i0 * t->loop[0].k_pos + i1 * t->loop[1].k_pos;
                                    if (p->left != RA_NO_LIMIT && pr.y < pr.x - p->left) continue;
                                    if (p->right != RA_NO_LIMIT && pr.y > pr.x + p->right) continue;
                                    if (p->key_begin && pr.y < p->key_begin[b]) continue;
                                    if (p->key_end && pr.y >= p->key_end[b]) continue;
                                    if (p->dropout > 0) {
                                        const int64_t origin = t->origin + i0 * t->loop[0].origin + i1 * t->loop[1].origin;
                                        const int64_t j = ra_floor_div(pr.y - origin, t->rate);
                                        const ra_philox draw = ra_dropout_draw(
                                            p->seed, pr.x, j >> 2, (uint32_t)(b * p->heads + pr.head), (uint32_t)t->branch);
                                        const bool kept = draw.word[j & 3] >= (uint32_t)floor(p->dropout * 4294967296.0);
                                        pr.factor = kept ? 1 / (1 - p->dropout) : 0;
                                    }
                                    visit(c, &pr, arg);
                                }
    }
}

/* Each query row (key row) of the items, met or not. `head`: as its tensor has it. */
typedef void visit_row(kernel_case *c, int item, int64_t b, int64_t row, int64_t head, void *arg);

static inline void case_rows(kernel_case *c, bool keys, visit_row *visit, void *arg) {
    for (int n = 0; n < c->item_count; n++) {
        const ra_item *t = &c->items[n];
        const ra_item_rows *rows = keys ? &t->k : &t->q;
        for (int64_t i0 = 0; i0 < t->loop[0].repeat; i0++)
            for (int64_t i1 = 0; i1 < t->loop[1].repeat; i1++)
                for (int64_t b = 0; b < c->problem.batch; b++)
                    for (int64_t h = 0; h < t->heads.count; h++)
                        for (int64_t u = 0; u < (keys ? 1 : case_group(c)); u++)
                            for (int64_t a = 0; a < rows->count; a++)
                                visit(c, n, b,
                                      rows->row + a * rows->row_step + i0 * (keys ? t->loop[0].k_row : t->loop[0].q_row) +
                                          i1 * (keys ? t->loop[1].k_row : t->loop[1].q_row),
                                      keys ? h : (t->heads.start + h * t->heads.step) * case_group(c) + u, arg);
    }
}

static inline int64_t row_at(const kernel_case *c, int64_t b, int64_t row, int64_t head) {
    return (b * c->problem.rows_q + row) * c->problem.heads + head;
}
static inline int64_t key_at(const kernel_case *c, const pair *p) {
    return ((p->b * c->rows_k + p->key) * c->items[p->item].heads.count + p->h) * c->problem.head_dim;
}

static inline double pair_score(const kernel_case *c, const pair *p, double *absolute) {
    const double *q = guarded_row(&c->q, p->b, p->row, p->head), *k = guarded_row(&c->k[p->item], p->b, p->key, p->h);
    double s = 0, a = 0;
    for (int64_t d = 0; d < c->problem.head_dim; d++) s += q[d] * k[d];
    for (int64_t d = 0; absolute && d < c->problem.head_dim; d++) a += fabs(q[d] * k[d]);
    if (absolute) *absolute = a * fabs(c->problem.scale);
    return s * c->problem.scale;
}

/* ----------------------------------------------------------------------------------------------------- reference */

typedef struct row_scores {
    double *max, *sum;
} row_scores;

static inline void visit_max(kernel_case *c, const pair *p, void *arg) {
    row_scores *s = arg;
    const int64_t i = row_at(c, p->b, p->row, p->head);
    double absolute;
    const double score = pair_score(c, p, &absolute);
    s->max[i] = fmax(s->max[i], score);
    c->m_lse[i] = fmax(c->m_lse[i], absolute);
    if (isfinite(score)) c->max_score = fmax(c->max_score, fabs(score));
}
static inline void visit_sum(kernel_case *c, const pair *p, void *arg) {
    row_scores *s = arg;
    const int64_t i = row_at(c, p->b, p->row, p->head);
    s->sum[i] += exp(pair_score(c, p, NULL) - (isfinite(s->max[i]) ? s->max[i] : 0));
}
static inline void visit_out(kernel_case *c, const pair *p, void *arg) {
    (void)arg;
    const int64_t i = row_at(c, p->b, p->row, p->head), dim = c->problem.head_dim;
    if (c->want_lse[i] == -INFINITY) return;
    const double weight = exp(pair_score(c, p, NULL) - c->want_lse[i]) * p->factor;
    const double *v = guarded_row(&c->v[p->item], p->b, p->key, p->h);
    for (int64_t d = 0; d < dim; d++) {
        c->want_out[i * dim + d] += weight * v[d];
        c->m_out[i * dim + d] += weight * fabs(v[d]);
    }
}

static inline void case_forward_reference(kernel_case *c) {
    const int64_t rows = c->problem.batch * c->problem.rows_q * c->problem.heads, dim = c->problem.head_dim;
    guarded_read(&c->q);
    guarded_read(&c->dout);
    for (int n = 0; n < c->item_count; n++) {
        guarded_read(&c->k[n]);
        guarded_read(&c->v[n]);
    }
    row_scores s = {.max = malloc((size_t)(rows + 1) * 8), .sum = calloc((size_t)rows + 1, 8)};
    assert_true(s.max && s.sum);
    c->want_out = calloc((size_t)(rows * dim) + 1, 8);
    c->m_out = calloc((size_t)(rows * dim) + 1, 8);
    c->want_lse = malloc((size_t)(rows + 1) * 8);
    c->m_lse = calloc((size_t)rows + 1, 8);
    for (int64_t i = 0; i < rows; i++) {
        s.max[i] = -INFINITY;
        c->m_lse[i] = 1;
    }
    case_pairs(c, visit_max, &s);
    case_pairs(c, visit_sum, &s);
    for (int64_t i = 0; i < rows; i++)
        c->want_lse[i] = s.sum[i] == 0 ? -INFINITY : (isfinite(s.max[i]) ? s.max[i] : 0) + log(s.sum[i]);
    case_pairs(c, visit_out, NULL);
    free(s.max);
    free(s.sum);
}

static inline void visit_gradient(kernel_case *c, const pair *p, void *arg) {
    const double *delta = arg;
    const int64_t i = row_at(c, p->b, p->row, p->head), dim = c->problem.head_dim, key = key_at(c, p);
    if (c->want_lse[i] == -INFINITY) return;
    const double *q = guarded_row(&c->q, p->b, p->row, p->head), *g = guarded_row(&c->dout, p->b, p->row, p->head);
    const double *k = guarded_row(&c->k[p->item], p->b, p->key, p->h), *v = guarded_row(&c->v[p->item], p->b, p->key, p->h);
    double dp = 0, dp_abs = 0, delta_abs = 0;
    for (int64_t d = 0; d < dim; d++) {
        dp += g[d] * v[d];
        dp_abs += fabs(g[d] * v[d]);
        delta_abs += fabs(g[d] * c->want_out[i * dim + d]);
    }
    const double weight = exp(pair_score(c, p, NULL) - c->want_lse[i]), scale = c->problem.scale;
    const double ds = weight * (p->factor * dp - delta[i]), a = weight * (p->factor * dp_abs + delta_abs);
    for (int64_t d = 0; d < dim; d++) {
        c->want_dq[i * dim + d] += scale * ds * k[d];
        c->m_dq[i * dim + d] += fabs(scale) * a * fabs(k[d]);
        c->want_dk[p->item][key + d] += scale * ds * q[d];
        c->m_dk[p->item][key + d] += fabs(scale) * a * fabs(q[d]);
        c->want_dv[p->item][key + d] += weight * p->factor * g[d];
        c->m_dv[p->item][key + d] += weight * p->factor * fabs(g[d]);
    }
}

/* Also fills the inputs lse and delta of the backward step, from float64. */
static inline void case_backward_reference(kernel_case *c) {
    const ra_problem *p = &c->problem;
    const int64_t rows = p->batch * p->rows_q * p->heads, dim = p->head_dim;
    double *delta = calloc((size_t)rows + 1, 8);
    c->want_dq = calloc((size_t)(rows * dim) + 1, 8);
    c->m_dq = calloc((size_t)(rows * dim) + 1, 8);
    for (int n = 0; n < c->item_count; n++) {
        const size_t keys = (size_t)(p->batch * c->rows_k * c->items[n].heads.count * dim) + 1;
        c->want_dk[n] = calloc(keys, 8);
        c->want_dv[n] = calloc(keys, 8);
        c->m_dk[n] = calloc(keys, 8);
        c->m_dv[n] = calloc(keys, 8);
    }
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t row = 0; row < p->rows_q; row++)
            for (int64_t head = 0; head < p->heads; head++) {
                const int64_t i = row_at(c, b, row, head);
                for (int64_t d = 0; d < dim; d++) {
                    const double g = guarded_get(&c->dout, b, row, head, d);
                    if (c->want_lse[i] != -INFINITY) delta[i] += g * c->want_out[i * dim + d];
                }
                guarded_set(&c->delta, b, row, head, 0, delta[i]);
                guarded_set(&c->lse, b, row, head, 0, c->want_lse[i]);
            }
    case_pairs(c, visit_gradient, delta);
    free(delta);
}

/* ------------------------------------------------------------------------------------------------------ generation */

static inline void fill_rows(rng *r, guarded *g, double amplitude) {
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t row = 0; row < g->rows; row++)
            for (int64_t head = 0; head < g->heads; head++)
                for (int64_t d = 0; d < g->dim; d++)
                    if (g->used[guarded_at(g, b, row, head, d)]) guarded_set(g, b, row, head, d, amplitude * rng_normal(r));
}

static inline void visit_use(kernel_case *c, const pair *p, void *arg) {
    (void)arg;
    if (!c->q.used[guarded_at(&c->q, p->b, p->row, p->head, 0)]) {
        guarded_use(&c->q, p->b, p->row, p->head);
        guarded_use(&c->dout, p->b, p->row, p->head);
    }
    if (!c->k[p->item].used[guarded_at(&c->k[p->item], p->b, p->key, p->h, 0)]) {
        guarded_use(&c->k[p->item], p->b, p->key, p->h);
        guarded_use(&c->v[p->item], p->b, p->key, p->h);
        guarded_use(&c->dk[p->item], p->b, p->key, p->h);
        guarded_use(&c->dv[p->item], p->b, p->key, p->h);
    }
}

static inline void random_item(rng *r, kernel_case *c, int n, const case_options *o) {
    ra_item *t = &c->items[n];
    const ra_problem *p = &c->problem;
    memset(t, 0, sizeof *t);
    t->branch = rng_int(r, 0, 3);
    t->heads.step = rng_int(r, 1, 2);
    t->heads.start = rng_int(r, 0, p->kv_heads - 1);
    t->heads.count = rng_int(r, 1, (p->kv_heads - 1 - t->heads.start) / t->heads.step + 1);
    t->q = (ra_item_rows){.row = rng_int(r, 0, 3),
                          .row_step = rng_int(r, 1, 3),
                          .pos_step = rng_int(r, 1, 4),
                          .count = rng_one_in(r, 20) ? 0 : rng_count(r, o->max_rows)};
    t->k = (ra_item_rows){.row = rng_int(r, 0, 3),
                          .row_step = rng_int(r, 1, 3),
                          .pos_step = rng_int(r, 1, 4),
                          .count = rng_one_in(r, 20) ? 0 : rng_count(r, o->max_keys)};
    t->q.pos = rng_int(r, -20, 20);
    t->k.pos = rng_int(r, 0, 20);
    t->rate = rng_one_in(r, 2) ? t->k.pos_step : 1;
    t->origin = rng_int(r, -3, t->k.pos);
    if (o->few) {
        t->q.row = 0;
        t->q.row_step = 1;
        t->q.count = rng_int(r, 1, 3);
        t->k.count = rng_int(r, 1, o->max_keys);
    }
    if (o->q_step) t->q.pos = 1, t->q.pos_step = o->q_step, t->k.pos = 0, t->k.pos_step = o->k_step;
    if (o->rows) t->q.count = o->rows;
    if (o->keys) t->k.count = o->keys;
    int64_t q_span = t->q.count * t->q.row_step, k_span = t->k.count * t->k.row_step;
    for (int i = 1; i >= 0; i--) { /* turns meet distinct rows, as those of a plan do */
        ra_item_loop *loop = &t->loop[i];
        loop->repeat = rng_one_in(r, 2) || o->few || (o->rows && !o->several) ? 1 : rng_int(r, 1, 3);
        loop->q_row = q_span;
        loop->k_row = k_span;
        loop->q_pos = rng_int(r, 0, 50);
        loop->k_pos = rng_int(r, 0, 50);
        loop->origin = rng_int(r, 0, 9);
        q_span *= loop->repeat;
        k_span *= loop->repeat;
    }
}

static inline int64_t item_rows_end(const ra_item *t, bool keys) {
    const ra_item_rows *rows = keys ? &t->k : &t->q;
    int64_t end = rows->row + rows->count * rows->row_step;
    for (int i = 0; i < 2; i++) end += (t->loop[i].repeat - 1) * (keys ? t->loop[i].k_row : t->loop[i].q_row);
    return end;
}

static inline kernel_case *case_new(uint64_t seed, ra_dtype dtype, const case_options *o) {
    static const int64_t dims[] = {1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17,  24,  31,  32,  33, 40,
                                   63, 64, 65, 72, 80, 96, 100, 127, 128, 129, 160, 192, 250, 255, 256};
    kernel_case *c = calloc(1, sizeof *c);
    rng r = {.seed = seed};
    ra_problem *p = &c->problem;
    p->dtype = dtype;
    const bool one = o->rows && !o->several;
    p->batch = one ? 1 : rng_int(&r, 1, 2);
    p->kv_heads = one ? 1 : rng_int(&r, 1, 3);
    p->heads = p->kv_heads * (one ? 1 : rng_int(&r, 1, 3));
    p->head_dim = rng_one_in(&r, 2)   ? dims[rng_int(&r, 0, (int64_t)(sizeof dims / sizeof *dims) - 1)]
                  : rng_one_in(&r, 2) ? (rng_one_in(&r, 2) ? 64 : 128)
                                      : rng_int(&r, 1, 256);
    p->scale = rng_one_in(&r, 3) ? 0.25 / sqrt((double)p->head_dim) : 1 / sqrt((double)p->head_dim);
    if (o->dim) p->head_dim = o->dim;
    if (o->scale != 0 || o->zero_scale) p->scale *= o->scale;
    p->left = RA_NO_LIMIT;
    p->right = o->causal ? 0 : RA_NO_LIMIT;
    if (!o->forbid_limits && !o->causal) {
        if (rng_one_in(&r, 3)) p->right = rng_one_in(&r, 2) ? 0 : rng_int(&r, -5, 60);
        if (rng_one_in(&r, 4)) p->left = rng_int(&r, 0, 200);
        if (rng_one_in(&r, 4)) {
            for (int64_t b = 0; b < p->batch; b++) c->key_begin[b] = rng_int(&r, 0, 60);
            p->key_begin = c->key_begin;
        }
        if (rng_one_in(&r, 4)) {
            for (int64_t b = 0; b < p->batch; b++) c->key_end[b] = rng_int(&r, 0, 400);
            p->key_end = c->key_end;
        }
    }
    if (o->diagonal) {
        p->left = p->right = 0;
        c->key_begin[0] = o->diagonal;
        p->key_begin = c->key_begin;
    }
    if (o->dropout) p->dropout = rng_one_in(&r, 2) ? 0.1 : 0.5;
    p->seed = seed * 977;
    c->single = (rng_one_in(&r, 2) && !o->steps) || o->single;
    c->halves = ra_dtype_size(dtype) == 2 && seed / 3 % 2;
    c->item_count = c->single || one ? 1 : rng_int(&r, 1, 3);
    for (int n = 0; n < c->item_count; n++) random_item(&r, c, n, o);
    for (int n = 0; n < c->item_count; n++) {
        p->rows_q = ra_max(p->rows_q, item_rows_end(&c->items[n], false));
        p->keys = ra_max(p->keys, c->items[n].k.count);
        c->rows_k = ra_max(c->rows_k, item_rows_end(&c->items[n], true));
    }
    p->rows_q += rng_int(&r, 0, 2);
    const ra_dtype state = dtype == RA_F64 ? RA_F64 : RA_F32;
    c->q = guarded_new(&r, dtype, p->batch, p->rows_q, p->heads, p->head_dim);
    c->dout = guarded_new(&r, dtype, p->batch, p->rows_q, p->heads, p->head_dim);
    c->out = guarded_new(&r, dtype, p->batch, p->rows_q, p->heads, p->head_dim);
    c->acc = guarded_new(&r, c->halves ? dtype : state, p->batch, p->rows_q, p->heads, p->head_dim);
    c->dq = guarded_new(&r, state, p->batch, p->rows_q, p->heads, p->head_dim);
    c->lse = guarded_new(&r, state, p->batch, p->rows_q, p->heads, 0);
    c->delta = guarded_new(&r, state, p->batch, p->rows_q, p->heads, 0);
    c->m = guarded_new(&r, state, p->batch, p->rows_q, p->heads, 0);
    c->l = guarded_new(&r, state, p->batch, p->rows_q, p->heads, 0);
    for (int n = 0; n < c->item_count; n++) {
        ra_item *t = &c->items[n];
        c->k[n] = guarded_new(&r, dtype, p->batch, c->rows_k, t->heads.count, p->head_dim);
        c->v[n] = guarded_new(&r, dtype, p->batch, c->rows_k, t->heads.count, p->head_dim);
        c->dk[n] = guarded_new(&r, state, p->batch, c->rows_k, t->heads.count, p->head_dim);
        c->dv[n] = guarded_new(&r, state, p->batch, c->rows_k, t->heads.count, p->head_dim);
        t->k_view = c->k[n].tensor;
        t->v_view = c->v[n].tensor;
        t->dk_view = c->dk[n].tensor;
        t->dv_view = c->dv[n].tensor;
    }
    /* Only what some pair needs has a value; every other element is NaN. */
    case_pairs(c, visit_use, NULL);
    fill_rows(&r, &c->q, o->amplitude);
    fill_rows(&r, &c->dout, 1);
    for (int n = 0; n < c->item_count; n++) {
        fill_rows(&r, &c->k[n], 1);
        fill_rows(&r, &c->v[n], 1);
    }
    return c;
}

static inline void case_free(kernel_case *c) {
    guarded *all[] = {&c->q, &c->dout, &c->out, &c->lse, &c->acc, &c->m, &c->l, &c->delta, &c->dq};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
    double *plain[] = {c->want_out, c->want_lse, c->want_dq, c->m_out, c->m_lse, c->m_dq};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) free(plain[i]);
    for (int n = 0; n < MAX_ITEMS; n++) {
        guarded_free(&c->k[n]);
        guarded_free(&c->v[n]);
        guarded_free(&c->dk[n]);
        guarded_free(&c->dv[n]);
        free(c->want_dk[n]);
        free(c->want_dv[n]);
        free(c->m_dk[n]);
        free(c->m_dv[n]);
    }
    free(c);
}

/* ------------------------------------------------------------------------------------------------------------- run */

static inline void case_poll(void *arg) { ++*(int64_t *)arg; }

/* Scratch ends (but for what rounds it up to 64 bytes) and begins beside pages that nobody may touch. */
static inline size_t scratch_body(int64_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return ((size_t)bytes + page - 1) / page * page;
}
static uint64_t scratch_word = UINT64_MAX; /* NaN: nothing may rest on what scratch held */
static inline void *scratch_new(int64_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), body = scratch_body(bytes);
    char *map = mmap(NULL, body + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    for (size_t i = 0; i < (body + 2 * page) / sizeof scratch_word; i++)
        memcpy(map + i * sizeof scratch_word, &scratch_word, 8);
    assert_int_equal(mprotect(map, page, PROT_NONE), 0);
    assert_int_equal(mprotect(map + page + body, page, PROT_NONE), 0);
    return map + page + (body - (size_t)ra_round_up(bytes, 64));
}
static inline void scratch_free(void *scratch, int64_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), body = scratch_body(bytes);
    munmap((char *)scratch - (body - (size_t)ra_round_up(bytes, 64)) - page, body + 2 * page);
}

static inline void poison_row(kernel_case *c, int item, int64_t b, int64_t row, int64_t head, void *arg) {
    const int *first = arg;
    if (item < *first) return;
    for (int64_t d = 0; d < c->out.dim; d++) guarded_set(&c->out, b, row, head, d, NAN);
    guarded_set(&c->lse, b, row, head, 0, NAN);
}

static inline void poison_sums(kernel_case *c, int item, int64_t b, int64_t row, int64_t head, void *arg) {
    (void)item, (void)arg;
    for (int64_t d = 0; d < c->acc.dim; d++) {
        guarded_set(&c->acc, b, row, head, d, NAN);
        if (c->halves) guarded_set(&c->out, b, row, head, d, NAN);
    }
}

/* Puts the upper halves back that a result was written over. */
typedef struct kept_halves {
    int first;        /* item */
    const char *upper; /* what out held */
} kept_halves;
static inline void restore_upper(kernel_case *c, int item, int64_t b, int64_t row, int64_t head, void *arg) {
    const kept_halves *kept = arg;
    const size_t at = (size_t)guarded_at(&c->out, b, row, head, 0) * 2;
    if (item >= kept->first) memcpy((char *)c->out.tensor.data + at, kept->upper + at, (size_t)c->out.dim * 2);
}

/* Not single: the last item is a step of its own in every other case, which closes its rows. */
static inline void case_forward(kernel_case *c, const ra_kernel *kernel, ra_workers *workers, bool want_lse) {
    guarded *outputs[] = {&c->out, &c->lse, &c->acc, &c->m, &c->l};
    for (int i = 0; i < 5; i++) guarded_keep(outputs[i]);
    const ra_tensor none = {0};
    const ra_used_rows every = {0};
    ra_rows_fill(&c->problem, workers, &every, c->single, c->out.tensor, want_lse ? c->lse.tensor : none, c->m.tensor,
                 c->l.tensor);
    const bool apart = !c->single && c->problem.seed / 2 % 2 && c->item_count > 0;
    const int last = (int)c->item_count - 1;
    if (c->single) case_rows(c, false, poison_row, &(int){0}); /* kernels write all of these */
    else case_rows(c, false, poison_sums, NULL);               /* nobody reads those of an empty state */
    const int64_t bytes = kernel->forward_scratch(&c->problem, ra_workers_count(workers));
    int64_t polls = 0;
    ra_forward_step step = {.problem = &c->problem,
                            .items = c->items,
                            .item_count = apart ? last : c->item_count,
                            .single = c->single,
                            .closes = c->single,
                            .halves = c->halves && !c->single,
                            .q = c->q.tensor,
                            .out = c->out.tensor,
                            .lse = want_lse ? c->lse.tensor : none,
                            .acc = c->acc.tensor,
                            .m = c->m.tensor,
                            .l = c->l.tensor,
                            .workers = workers,
                            .scratch = scratch_new(bytes),
                            .poll = c->problem.seed % 2 ? case_poll : NULL, /* tiles are cut otherwise without */
                            .poll_arg = &polls};
    guarded_keep(&c->q);
    assert_int_equal(kernel->forward(&step), RA_OK);
    guarded_check(&c->q, true);
    const size_t out_bytes = (size_t)c->out.elements * ra_dtype_size(c->problem.dtype);
    char *before = malloc(out_bytes + 1);
    assert_non_null(before);
    memcpy(before, c->out.tensor.data, out_bytes);
    if (!c->single)
        ra_rows_finish(&c->problem, workers, &every, step.halves, c->acc.tensor, c->m.tensor, c->l.tensor, c->out.tensor,
                       step.lse);
    if (apart) {
        case_rows(c, false, poison_row, &(int){last});
        if (c->halves) case_rows(c, false, restore_upper, &(kept_halves){last, before});
        step.items += last;
        step.item_count = 1;
        step.closes = true;
        assert_int_equal(kernel->forward(&step), RA_OK);
    }
    free(before);
    scratch_free(step.scratch, bytes);
    for (int64_t b = 0; b < c->problem.batch; b++)
        for (int64_t row = 0; row < c->problem.rows_q; row++)
            for (int64_t head = 0; head < c->problem.heads; head++)
                for (int i = 0; i < 5; i++) guarded_use(outputs[i], b, row, head);
    for (int i = 0; i < 5; i++) guarded_check(outputs[i], false);
}

/* What a single backward step writes to: zeros in rows of which `input` is in no pair. The others hold anything, sums too. */
static inline guarded result_like(rng *r, const kernel_case *c, guarded *sums, const guarded *input) {
    guarded g = guarded_new(r, c->problem.dtype, sums->batches, sums->rows, sums->heads, sums->dim);
    for (int64_t b = 0; b < g.batches; b++)
        for (int64_t row = 0; row < g.rows; row++)
            for (int64_t head = 0; head < g.heads; head++) {
                guarded_use(&g, b, row, head);
                for (int64_t d = 0; d < g.dim; d++) {
                    guarded_set(&g, b, row, head, d, input->used[guarded_at(input, b, row, head, d)] ? NAN : 0);
                    if (sums->used[guarded_at(sums, b, row, head, d)]) guarded_set(sums, b, row, head, d, NAN);
                }
            }
    guarded_keep(&g);
    return g;
}

/* The result takes the place of its sums; where no pair is it must be zero. */
static inline void take_result(guarded *sums, guarded *result) {
    guarded_check(result, false);
    for (int64_t b = 0; b < sums->batches; b++)
        for (int64_t row = 0; row < sums->rows; row++)
            for (int64_t head = 0; head < sums->heads; head++)
                for (int64_t d = 0; d < sums->dim; d++) {
                    const double value = guarded_get(result, b, row, head, d);
                    if (sums->used[guarded_at(sums, b, row, head, d)]) guarded_set(sums, b, row, head, d, value);
                    else assert_true(value == 0);
                }
    guarded_free(result);
}

/* Sums of a step in halves: a result, and the lower halves. In a step that is not single both begin with zeros; else the lower
 * ones hold anything. */
typedef struct halves_of {
    guarded *sums; /* takes the outcome */
    guarded result, lower;
} halves_of;

static inline halves_of halves_like(rng *r, const kernel_case *c, guarded *sums, const guarded *input) {
    halves_of h = {.sums = sums};
    if (c->single) h.result = result_like(r, c, sums, input);
    else h.result = guarded_new(r, c->problem.dtype, sums->batches, sums->rows, sums->heads, sums->dim);
    h.lower = guarded_new(r, c->problem.dtype, sums->batches, sums->rows, sums->heads, sums->dim);
    for (int64_t b = 0; b < sums->batches; b++)
        for (int64_t row = 0; row < sums->rows; row++)
            for (int64_t head = 0; head < sums->heads; head++) {
                guarded_use(&h.lower, b, row, head);
                if (c->single) continue;
                guarded_use(&h.result, b, row, head);
                for (int64_t d = 0; d < sums->dim; d++) {
                    guarded_set(&h.result, b, row, head, d, 0);
                    guarded_set(&h.lower, b, row, head, d, 0);
                }
            }
    guarded_keep(&h.result);
    guarded_keep(&h.lower);
    return h;
}

/* Brought together, unless there is a result already. */
static inline void take_halves(const kernel_case *c, halves_of *h) {
    guarded_check(&h->lower, false);
    if (c->single) {
        guarded_free(&h->lower);
        take_result(h->sums, &h->result);
        return;
    }
    guarded_check(&h->result, false);
    for (int64_t b = 0; b < h->sums->batches; b++)
        for (int64_t row = 0; row < h->sums->rows; row++)
            for (int64_t head = 0; head < h->sums->heads; head++)
                for (int64_t d = 0; d < h->sums->dim; d++) {
                    const uint16_t *upper = h->result.tensor.data, *lower = h->lower.tensor.data;
                    const uint32_t bits = (uint32_t)upper[guarded_at(&h->result, b, row, head, d)] << 16 |
                                          lower[guarded_at(&h->lower, b, row, head, d)];
                    float value;
                    memcpy(&value, &bits, sizeof value);
                    if (h->sums->used[guarded_at(h->sums, b, row, head, d)])
                        guarded_set(h->sums, b, row, head, d, (double)value);
                    else assert_true(value == 0);
                }
    guarded_free(&h->result);
    guarded_free(&h->lower);
}

static inline void case_backward_halves(kernel_case *c, const ra_kernel *kernel, ra_backward_step *step, rng *r) {
    halves_of dq = halves_like(r, c, &c->dq, &c->q), of[2 * MAX_ITEMS];
    ra_item whole[MAX_ITEMS];
    memcpy(whole, c->items, sizeof whole);
    step->halves = true;
    step->dq = dq.result.tensor;
    step->dq_acc = dq.lower.tensor;
    /* The last of several items is like those of a message: with whole sums, and without a result. */
    const int64_t parted = c->item_count > 1 ? c->item_count - 1 : c->item_count;
    for (int64_t n = 0; n < parted; n++) {
        ra_item *item = &c->items[n];
        of[2 * n] = halves_like(r, c, &c->dk[n], &c->k[n]);
        of[2 * n + 1] = halves_like(r, c, &c->dv[n], &c->v[n]);
        item->dk_result = of[2 * n].result.tensor;
        item->dv_result = of[2 * n + 1].result.tensor;
        item->dk_view = of[2 * n].lower.tensor;
        item->dv_view = of[2 * n + 1].lower.tensor;
    }
    assert_int_equal(kernel->backward(step), RA_OK);
    take_halves(c, &dq);
    for (int64_t n = 0; n < 2 * parted; n++) take_halves(c, &of[n]);
    memcpy(c->items, whole, sizeof whole);
}

static inline void case_backward(kernel_case *c, const ra_kernel *kernel, ra_workers *workers) {
    const ra_problem *p = &c->problem;
    for (int n = -1; n < c->item_count; n++) { /* the driver hands zeros */
        guarded *g[2] = {n < 0 ? &c->dq : &c->dk[n], n < 0 ? NULL : &c->dv[n]};
        for (int i = 0; i < 2; i++) {
            if (!g[i]) continue;
            for (int64_t b = 0; b < g[i]->batches; b++)
                for (int64_t row = 0; row < g[i]->rows; row++)
                    for (int64_t head = 0; head < g[i]->heads; head++) {
                        if (n < 0) guarded_use(g[i], b, row, head);
                        for (int64_t d = 0; d < g[i]->dim; d++)
                            if (g[i]->used[guarded_at(g[i], b, row, head, d)]) guarded_set(g[i], b, row, head, d, 0);
                    }
            guarded_keep(g[i]);
        }
    }
    const int64_t bytes = kernel->backward_scratch(p, ra_workers_count(workers));
    ra_backward_step step = {.problem = p,
                             .items = c->items,
                             .item_count = c->item_count,
                             .single = c->single,
                             .q = c->q.tensor,
                             .dout = c->dout.tensor,
                             .lse = c->lse.tensor,
                             .delta = c->delta.tensor,
                             .dq_acc = c->dq.tensor,
                             .workers = workers,
                             .scratch = scratch_new(bytes)};
    rng r = {.seed = p->seed};
    if (c->halves) {
        case_backward_halves(c, kernel, &step, &r);
        scratch_free(step.scratch, bytes);
        return;
    }
    guarded *sums[3] = {&c->dq, &c->dk[0], &c->dv[0]}, *inputs[3] = {&c->q, &c->k[0], &c->v[0]}, results[3] = {0};
    for (int i = 0; c->single && i < 3; i++) results[i] = result_like(&r, c, sums[i], inputs[i]);
    ra_item *item = &c->items[0];
    const ra_tensor dk_view = item->dk_view, dv_view = item->dv_view;
    if (c->single) {
        step.dq = results[0].tensor;
        item->dk_result = results[1].tensor;
        item->dv_result = results[2].tensor;
    }
    if (c->single && ra_dtype_size(p->dtype) > 2) { /* sums where the results are */
        step.dq_acc = step.dq;
        item->dk_view = item->dk_result;
        item->dv_view = item->dv_result;
    }
    assert_int_equal(kernel->backward(&step), RA_OK);
    scratch_free(step.scratch, bytes);
    item->dk_view = dk_view;
    item->dv_view = dv_view;
    for (int i = 0; c->single && i < 3; i++) take_result(sums[i], &results[i]);
    for (int n = 0; !c->single && n < c->item_count; n++) {
        guarded_check(&c->dk[n], false);
        guarded_check(&c->dv[n], false);
    }
    if (!c->single) guarded_check(&c->dq, false);
}

/* ---------------------------------------------------------------------------------------------------------- compare */

static inline double *read_all(const guarded *g) {
    double *values = malloc((size_t)(g->batches * g->rows * g->heads * g->dim + 1) * 8);
    double *at = values;
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t row = 0; row < g->rows; row++)
            for (int64_t head = 0; head < g->heads; head++)
                for (int64_t d = 0; d < g->dim; d++) {
                    const bool used = g->used[guarded_at(g, b, row, head, d)];
                    *at++ = used ? guarded_get(g, b, row, head, d) : 0;
                }
    return values;
}

static inline void check_error(const char *kernel, uint64_t seed, const char *what, ref_error error, double bound,
                               const kernel_case *c) {
    if (error.ratio <= bound) return;
    print_error(
        "%s, %s, case %llu: %s is %.3g off at %lld (at most %.3g); D %lld, heads %lld/%lld, items %lld, single %d, rows %lld, "
        "keys %lld\n",
        kernel, ra_dtype_name(c->problem.dtype), (unsigned long long)seed, what, error.ratio, (long long)error.where, bound,
        (long long)c->problem.head_dim, (long long)c->problem.heads, (long long)c->problem.kv_heads, (long long)c->item_count,
        c->single, (long long)c->problem.rows_q, (long long)c->rows_k);
    fail();
}

static inline void case_check_forward(const kernel_case *c, const char *kernel, uint64_t seed, bool lse) {
    const ra_dtype dtype = c->problem.dtype;
    const int64_t rows = c->problem.batch * c->problem.rows_q * c->problem.heads;
    double *out = read_all(&c->out), *got_lse = read_all(&c->lse);
    check_error(kernel, seed, "out", ref_compare(out, c->want_out, c->m_out, rows * c->problem.head_dim, dtype),
                ref_bound(dtype, false, c->max_score), c);
    if (lse)
        check_error(kernel, seed, "lse", ref_compare_lse(got_lse, c->want_lse, c->m_lse, rows),
                    ref_bound(dtype, true, c->max_score), c);
    free(out);
    free(got_lse);
}

static inline void case_check_backward(const kernel_case *c, const char *kernel, uint64_t seed) {
    const ra_problem *p = &c->problem;
    const ra_dtype state = p->dtype == RA_F64 ? RA_F64 : RA_F32;
    const double bound = ref_bound(p->dtype, false, c->max_score);
    double *dq = read_all(&c->dq);
    check_error(kernel, seed, "dq", ref_compare(dq, c->want_dq, c->m_dq, p->batch * p->rows_q * p->heads * p->head_dim, state),
                bound, c);
    free(dq);
    for (int n = 0; n < c->item_count; n++) {
        const int64_t count = p->batch * c->rows_k * c->items[n].heads.count * p->head_dim;
        double *dk = read_all(&c->dk[n]), *dv = read_all(&c->dv[n]);
        check_error(kernel, seed, "dk", ref_compare(dk, c->want_dk[n], c->m_dk[n], count, state), bound, c);
        check_error(kernel, seed, "dv", ref_compare(dv, c->want_dv[n], c->m_dv[n], count, state), bound, c);
        free(dk);
        free(dv);
    }
}

/* ---------------------------------------------------------------------------------------------------------- kernels */

/* Fewer cases where each takes long: RA_TEST_SHARE=10 runs one in ten. */
static inline int case_share(int cases) {
    const char *share = getenv("RA_TEST_SHARE");
    return share && atoi(share) > 1 ? (cases + atoi(share) - 1) / atoi(share) : cases;
}

/* Small ones where an emulator runs them. */
static inline bool case_small(void) { return case_share(60) < 6; }

#ifndef KERNEL_AT /* a test may bring its own list */
#define KERNEL_AT kernel_at
/* The CPU kernels of the table that can run here and compute this type, each in turn. */
static inline const ra_kernel *kernel_at(int index, ra_dtype dtype) {
    const ra_problem any = {.dtype = dtype,
                            .batch = 1,
                            .heads = 1,
                            .kv_heads = 1,
                            .head_dim = 64,
                            .rows_q = 1,
                            .scale = 0.125,
                            .left = RA_NO_LIMIT,
                            .right = RA_NO_LIMIT};
    ra_kernel_info info;
    const ra_kernel *kernel = NULL;
    for (int i = 0; ra_kernel_list(i, &info); i++) {
        if (!info.available || ra_kernel_find(info.name, RA_DEVICE_CPU, &any, &kernel) != RA_OK) continue;
        if (index-- == 0) return kernel;
    }
    return NULL;
}

#endif

#endif
