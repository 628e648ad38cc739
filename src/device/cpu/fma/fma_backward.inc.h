/* Backward of fma.inc.h.
 *
 * Needs   fma_products.inc.h and fma_strips.inc.h before it.
 * Gives   backward_tile(), backward_rest(), backward_arrays() and dq_arrays().
 */
#include "device/cpu/dq_queue.h"

#ifndef BACK_KEYS /* a test sets smaller ones */
enum {
    BACK_KEYS = 256, /* of a tile */
    BACK_ROWS = 288, /* that are loaded at a time */
};
#endif
enum {
    BACK_TILE = 4 * BACK_ROWS,    /* rows of a tile: its keys are packed, and dk and dv stored, once for them all */
    BACK_STRIP = 48,              /* rows whose scores are held at a time */
    BACK_DEPTH = 128,             /* keys that dQ is summed over at a time: a panel of them fits into L1 */
    BACK_SCORES = BACK_KEYS + 16, /* stride of a strip; the tail is for register tiles that stick out */
    BACK_KEPT = 12,               /* strips of dq whose turn has not come, at most */
};

typedef struct backward_space {
    float *key_panels, *value_panels, *keys, *staged, *dk, *dv, *q, *dout; /* backward_arrays */
    float p[BACK_STRIP * BACK_SCORES], ds[BACK_STRIP * BACK_SCORES];
    float lse[BACK_ROWS], delta[BACK_ROWS];
    int64_t begin[BACK_ROWS], end[BACK_ROWS];
} backward_space;

static int64_t backward_arrays(const ra_problem *problem, char *base, backward_space *f) {
    const int64_t row = padded(problem->head_dim) * (int64_t)sizeof(float),
                  rows = ra_cpu_tile_rows(problem, TILE_ROWS, BACK_ROWS);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->key_panels = ra_carve(&at, panel_bytes(BACK_KEYS, problem->head_dim));
    f->value_panels = ra_carve(&at, panel_bytes(BACK_KEYS, problem->head_dim));
    f->keys = ra_carve(&at, BACK_KEYS * row);
    f->staged = ra_carve(&at, staged_bytes(problem->head_dim));
    f->dk = ra_carve(&at, (BACK_KEYS + TILE_ROWS) * row);
    f->dv = ra_carve(&at, (BACK_KEYS + TILE_ROWS) * row);
    f->q = ra_carve(&at, rows * row);
    f->dout = ra_carve(&at, rows * row);
    return at - base;
}

static void add_strip(const ra_backward_step *step, const ra_slab *slab, ra_block block, const float *dq) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    const float sign = sign_of(slab->problem);
    for (int64_t r = block.begin; r < block.end; r++, dq += width)
        ra_sums_add(ra_sums_of_query(step, slab, r), dq, sign, dim);
}

/* Sets the queue up at `base`, with its rooms behind it; with base NULL only returns the size of all. */
static int64_t dq_arrays(const ra_problem *problem, int workers, char *base, ra_dq_queue *queue) {
    *queue = (ra_dq_queue){.add = add_strip,
                           .rooms = workers == 1 ? 1 : BACK_KEPT + 1,
                           .size = BACK_STRIP * padded(problem->head_dim)};
    return ra_dq_queue_carve(queue, base, sizeof *queue);
}

/* p: scores to weights; ds: products of dout and v to gradients of the scores, scale included. */
static void differentiate(backward_space *f, const ra_slab *slab, int64_t tile, int64_t row, int64_t rows,
                          const span_of_keys *k, int64_t first) {
    const ra_problem *problem = slab->problem;
    const float scale = positive_scale(problem);
    const vec factor = splat(scale);
    for (int64_t i = 0; i < rows; i++) {
        float *p = f->p + i * BACK_SCORES, *ds = f->ds + i * BACK_SCORES;
        const float lse = f->lse[row + i], delta = f->delta[row + i];
        if (problem->dropout > 0) {
            const uint32_t threshold = ra_dropout_threshold(problem);
            const float keep = (float)(1 / (1 - problem->dropout));
            uint32_t draws[BACK_SCORES] = {0};
            ra_dropout_draws(draws, slab, tile + row + i, first, k->begin, k->end);
            for (int64_t c = k->from; c < k->to; c += LANES) {
                const vec weight = exp_of(load(p + c) * factor - splat(lse));
                float kept[LANES];
                for (int j = 0; j < LANES; j++) kept[j] = draws[c + j] >= threshold ? keep : 0;
                store(p + c, weight * load(kept));
                store(ds + c, weight * (load(ds + c) * load(kept) - splat(delta)) * factor);
            }
        } else {
            for (int64_t c = k->from; c < k->to; c += LANES) {
                const vec weight = exp_of(load(p + c) * factor - splat(lse));
                store(p + c, weight);
                store(ds + c, weight * (load(ds + c) - splat(delta)) * factor);
            }
        }
        if (!k->whole) {
            mask_row(p, f->begin[row + i], f->end[row + i], first, k->from, k->to, 0);
            mask_row(ds, f->begin[row + i], f->end[row + i], first, k->from, k->to, 0);
        }
        /* keys that fill up the last register tile of dk and dv */
        for (int64_t c = k->to; c < k->to + TILE_ROWS; c++) p[c] = ds[c] = 0;
    }
}

/* False if some of what was loaded is not finite, or vast. */
static bool load_gradients(backward_space *f, const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    const ra_problem *problem = slab->problem;
    const int64_t dim = problem->head_dim, width = padded(dim), rows = end - begin,
                  all = ra_ceil_div(rows, TILE_ROWS) * TILE_ROWS;
    bool vast = false;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = begin + i;
        ra_slab_interval(slab, r, &f->begin[i], &f->end[i]);
        f->lse[i] = ((const float *)step->lse.data)[ra_slab_at(slab, &step->lse, r)];
        f->delta[i] = ((const float *)step->delta.data)[ra_slab_at(slab, &step->delta, r)];
        if (f->lse[i] == -INFINITY) f->end[i] = f->begin[i]; /* no key that counts */
        if (f->begin[i] >= f->end[i]) {
            f->lse[i] = f->delta[i] = 0;
            memset(f->q + i * width, 0, (size_t)width * sizeof(float));
            memset(f->dout + i * width, 0, (size_t)width * sizeof(float));
            continue;
        }
        vast |= ra_vast(f->lse[i]);
        load_query(f->q + i * width, &step->q, slab, r);
        load_row(f->dout + i * width, step->dout.data, problem->dtype, ra_slab_at(slab, &step->dout, r), dim);
    }
    memset(f->q + rows * width, 0, (size_t)((all - rows) * width) * sizeof(float));
    memset(f->dout + rows * width, 0, (size_t)((all - rows) * width) * sizeof(float));
    return !vast && all_finite(f->q, rows * width) && all_finite(f->dout, rows * width);
}

/* False if some key is not finite. */
static bool load_keys(backward_space *f, const ra_slab *slab, int64_t first, int64_t last) {
    const ra_item *item = slab->item;
    const int64_t dim = slab->problem->head_dim;
    pack_rows(f->keys, slab, &item->k_view, first, first, last, BACK_KEYS);
    for (int64_t d = 0; d < dim; d += PANEL)
        if (!all_finite(f->keys + d * BACK_KEYS, (last - first) * padded(ra_min(PANEL, dim - d)))) return false;
    pack_panels(f->key_panels, f->staged, slab, &item->k_view, first, first, last);
    pack_panels(f->value_panels, f->staged, slab, &item->v_view, first, first, last);
    return true;
}

static void store_keys(const backward_space *f, const ra_backward_step *step, const ra_slab *slab, int64_t first,
                       int64_t last) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    for (int64_t c = 0; c < last - first; c++) {
        ra_sums_add(ra_sums_of_key(step, slab, false, first + c), f->dk + c * width, 1, dim);
        ra_sums_add(ra_sums_of_key(step, slab, true, first + c), f->dv + c * width, 1, dim);
    }
}

/* The rows that are loaded, [begin, end), with the keys that are packed. *fresh: dk and dv hold nothing yet. */
static void backward_rows(ra_dq_queue *queue, const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end,
                          int64_t first, int64_t last, bool *fresh) {
    backward_space *f = queue->behind;
    const int64_t dim = slab->problem->head_dim, width = padded(dim), rows = end - begin, keys = last - first;
    for (int64_t row = 0; row < rows; row += BACK_STRIP) {
        const int64_t count = ra_min(BACK_STRIP, rows - row);
        const span_of_keys k = keys_of(f->begin + row, f->end + row, count, first, last);
        if (k.begin >= k.end) continue;
        const int64_t met = k.end - k.begin;
        scores(count, k.to - k.from, dim, f->q + row * width, f->key_panels + k.from * dim, f->p + k.from, BACK_SCORES);
        scores(count, k.to - k.from, dim, f->dout + row * width, f->value_panels + k.from * dim, f->ds + k.from, BACK_SCORES);
        differentiate(f, slab, begin, row, count, &k, first);
        const float *p = f->p + k.begin, *ds = f->ds + k.begin;
        if (*fresh && met == keys) {
            spread(met, dim, count, p, BACK_SCORES, f->dout + row * width, f->dv, false);
            spread(met, dim, count, ds, BACK_SCORES, f->q + row * width, f->dk, false);
        } else {
            if (*fresh) {
                memset(f->dk, 0, (size_t)((keys + TILE_ROWS) * width) * sizeof(float));
                memset(f->dv, 0, (size_t)((keys + TILE_ROWS) * width) * sizeof(float));
            }
            spread(met, dim, count, p, BACK_SCORES, f->dout + row * width, f->dv + k.begin * width, true);
            spread(met, dim, count, ds, BACK_SCORES, f->q + row * width, f->dk + k.begin * width, true);
        }
        *fresh = false;
        float *dq = ra_dq_queue_next(queue);
        combine(count, dim, ra_min(met, BACK_DEPTH), ds, BACK_SCORES, f->keys, k.begin, BACK_KEYS, dq, false);
        for (int64_t c = BACK_DEPTH; c < met; c += BACK_DEPTH)
            combine(count, dim, ra_min(met - c, BACK_DEPTH), ds + c, BACK_SCORES, f->keys, k.begin + c, BACK_KEYS, dq, true);
        ra_dq_queue_add(queue, step, slab, (ra_block){.begin = begin + row, .end = begin + row + count});
    }
}

/* What is not finite is left to the scalar kernel, which uses the same scratch: what is in it is added to the sums before. */
static void backward_tile(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end, int64_t first,
                          int64_t last, void *scratch) {
    ra_dq_queue *queue = scratch;
    backward_space *f = queue->behind;
    bool fresh = true;
    backward_arrays(slab->problem, (char *)f, f);
    if (!load_keys(f, slab, first, last)) {
        ra_dq_queue_settle(queue, step);
        ra_scalar_backward_tile(step, slab, begin, end, first, last, f);
        return;
    }
    for (int64_t row = begin; row < end; row += BACK_ROWS) {
        const int64_t stop = ra_min(row + BACK_ROWS, end);
        if (load_gradients(f, step, slab, row, stop)) {
            backward_rows(queue, step, slab, row, stop, first, last, &fresh);
            continue;
        }
        ra_dq_queue_settle(queue, step);
        if (!fresh) {
            ra_keys_wait(slab);
            store_keys(f, step, slab, first, last);
        }
        ra_scalar_backward_tile(step, slab, row, stop, first, last, f);
        backward_arrays(slab->problem, (char *)f, f);
        load_keys(f, slab, first, last);
        fresh = true;
    }
    if (!fresh) {
        ra_dq_queue_wait_for_keys(queue, step, slab);
        store_keys(f, step, slab, first, last);
    }
    ra_dq_queue_end_tile(queue, slab->turn);
}

static void backward_rest(const ra_backward_step *step, void *scratch) { ra_dq_queue_settle(scratch, step); }
