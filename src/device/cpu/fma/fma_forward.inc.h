/* Forward of fma.inc.h, for more than a few rows.
 *
 * Needs   fma_products.inc.h and fma_strips.inc.h before it.
 * Gives   forward_tile() and forward_arrays(), and for fma_few.inc.h load_state() and store_row().
 */

enum {
    STRIP = 48,         /* rows whose scores are held at a time */
    KEYS = 128,         /* of a block */
    SCORES = KEYS + 16, /* stride of a strip: an odd number of cache lines */
    QUERIES = 288,      /* rows of a tile at most: what one packing of K and V serves; more would cost a ring its memory */
    TOO_LARGE = 60,     /* a block's sum of weights beyond 2^60 asks for a new maximum */
};

typedef struct forward_space {
    float *panels, *values, *staged, *q, *acc; /* as long as the head dimension asks for: forward_arrays */
    vec *sums;                                 /* of the weights of each row, by lanes: reduced once, at the end */
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
    f->panels = ra_carve(&at, panel_bytes(KEYS, problem->head_dim));
    f->values = ra_carve(&at, KEYS * row);
    f->staged = ra_carve(&at, staged_bytes(problem->head_dim));
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
        if (!(max > old + 8)) continue; /* also if all scores are -inf */
        const float shrink = expf(old - max);
        for (int64_t d = 0; d < width; d++) f->acc[(row + i) * width + d] *= shrink;
        f->sums[row + i] *= splat(shrink);
        f->l[row + i] *= (double)shrink;
        f->m[row + i] = max;
    }
}

/* s = exp(s * scale - m) in place, with the sums by lanes. False if a sum is too large, NaN, or negative, which exp_of may be
 * far beyond its range. */
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
    const float all = sum_of(total);
    return all >= 0 && all < (float)(1LL << TOO_LARGE);
}

/* Weights of pairs that dropout takes become 0, the others grow. The sums stay those of all. */
static void drop_weights(forward_space *f, const ra_slab *slab, int64_t r, int64_t rows, const span_of_keys *k,
                         int64_t first) {
    const uint32_t threshold = ra_dropout_threshold(slab->problem);
    const float keep = (float)(1 / (1 - slab->problem->dropout));
    uint32_t draws[KEYS];
    for (int64_t i = 0; i < rows; i++) {
        float *s = f->s + i * SCORES;
        ra_dropout_draws(draws, slab, r + i, first, k->begin, k->end);
        for (int64_t c = k->begin; c < k->end; c++) s[c] = draws[c] >= threshold ? s[c] * keep : 0;
    }
}

/* Strip of rows [row, row + rows) of the tile that begins at row `tile` of the slab, against the packed block of keys [first,
 * last). */
static void forward_strip(forward_space *f, const ra_slab *slab, int64_t tile, int64_t row, int64_t rows, int64_t first,
                          int64_t last) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    const float scale = positive_scale(slab->problem);
    const span_of_keys k = keys_of(f->begin + row, f->end + row, rows, first, last);
    if (k.begin >= k.end) return;
    bool renew = false;
    for (int64_t i = 0; i < rows; i++) renew |= f->m[row + i] == -INFINITY;
    for (bool right = false; !right;) {
        scores(rows, k.to - k.from, dim, f->q + row * width, f->panels + k.from * dim, f->s + k.from, SCORES);
        if (!k.whole)
            for (int64_t i = 0; i < rows; i++)
                mask_row(f->s + i * SCORES, f->begin[row + i], f->end[row + i], first, k.from, k.to, -INFINITY);
        if (renew) renew_maxima(f, row, rows, &k, scale, width);
        right = weigh(f, row, rows, &k, scale) || renew;
        renew = true;
    }
    for (int64_t i = 0; i < rows; i++) f->sums[row + i] += f->block_sums[i];
    if (slab->problem->dropout > 0) drop_weights(f, slab, tile + row, rows, &k, first);
    combine(rows, dim, k.end - k.begin, f->s + k.begin, SCORES, f->values, k.begin, KEYS, f->acc + row * width, true);
}

/* The state that row r came with. */
static void load_state(const ra_forward_step *step, const ra_slab *slab, int64_t r, float *acc, float *m, double *l) {
    const int64_t dim = slab->problem->head_dim;
    *m = step->single ? -INFINITY : ((const float *)step->m.data)[ra_slab_at(slab, &step->m, r)];
    *l = step->single ? 0 : (double)((const float *)step->l.data)[ra_slab_at(slab, &step->l, r)];
    const bool empty = ra_state_empty((double)*m, *l);
    if (!empty) ra_sums_load(acc, ra_sums_of_state(step, slab, r), dim);
    for (int64_t d = empty ? 0 : dim; d < padded(dim); d++) acc[d] = 0;
}

static void load_queries(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim), rows = end - begin;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = begin + i;
        load_query(f->q + i * width, &step->q, slab, r);
        ra_slab_interval(slab, r, &f->begin[i], &f->end[i]);
        f->sums[i] = splat(0);
        load_state(step, slab, r, f->acc + i * width, &f->m[i], &f->l[i]);
    }
    /* Rows that fill up the last register tile: their results are finite, and go nowhere. */
    const size_t rest = (size_t)((ra_ceil_div(rows, TILE_ROWS) * TILE_ROWS - rows) * width) * sizeof(float);
    memset(f->q + rows * width, 0, rest);
    memset(f->acc + rows * width, 0, rest);
}

/* Writes the state of row r, or its result if the step closes. acc is not the same after. */
static void store_row(const ra_forward_step *step, const ra_slab *slab, int64_t r, float *acc, float m, double l) {
    const ra_dtype dtype = slab->problem->dtype;
    const int64_t dim = slab->problem->head_dim;
    if (!step->closes) {
        ra_sums_store(ra_sums_of_state(step, slab, r), acc, dim);
        ((float *)step->m.data)[ra_slab_at(slab, &step->m, r)] = m;
        ((float *)step->l.data)[ra_slab_at(slab, &step->l, r)] = (float)l;
        return;
    }
    const float share = l == 0 ? 0 : (float)(1 / l);
    for (int64_t d = 0; d < dim; d++) acc[d] *= share;
    ra_convert((char *)step->out.data + ra_slab_at(slab, &step->out, r) * (int64_t)ra_dtype_size(dtype), dtype, acc, RA_F32,
               dim);
    if (step->lse.data)
        ((float *)step->lse.data)[ra_slab_at(slab, &step->lse, r)] = l == 0 ? -INFINITY : (float)((double)m + log(l));
}

/* Writes rows [row, row + rows) of the tile that begins at `begin`. False, and nothing written, if they are not finite, or
 * have vast scores. */
static bool store_rows(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t row,
                       int64_t rows) {
    const int64_t width = padded(slab->problem->head_dim);
    bool finite = all_finite(f->acc + row * width, rows * width);
    for (int64_t i = row; i < row + rows; i++) {
        f->l[i] += (double)sum_of(f->sums[i]);
        finite &= isfinite(f->l[i]) && f->m[i] < INFINITY && !ra_vast(f->m[i]);
    }
    for (int64_t i = row; finite && i < row + rows; i++)
        store_row(step, slab, begin + i, f->acc + i * width, f->m[i], f->l[i]);
    return finite;
}

static void forward_tile(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end, void *scratch) {
    forward_space *f = scratch;
    const int64_t rows = end - begin;
    forward_arrays(slab->problem, scratch, f);
    load_queries(f, step, slab, begin, end);
    int64_t low, high;
    ra_slab_hull(slab, begin, end, &low, &high);
    /* Blocks begin at multiples of KEYS, whatever the tile: so a row's sums do not depend on the rows beside it. */
    for (int64_t first = low / KEYS * KEYS; first < high; first += KEYS) {
        const int64_t last = ra_min(first + KEYS, high);
        pack_panels(f->panels, f->staged, slab, &slab->item->k_view, first, ra_max(first, low), last);
        pack_rows(f->values, slab, &slab->item->v_view, first, ra_max(first, low), last, KEYS);
        for (int64_t row = 0; row < rows; row += STRIP)
            forward_strip(f, slab, begin, row, ra_min(STRIP, rows - row), first, last);
    }
    /* Strips, not tiles, are given up: which rows a tile holds depends on the number of workers. */
    uint32_t bad = 0;
    for (int64_t row = 0; row < rows; row += STRIP)
        if (!store_rows(f, step, slab, begin, row, ra_min(STRIP, rows - row))) bad |= 1u << row / STRIP;
    for (int64_t row = 0; bad && row < rows; row += STRIP)
        if (bad >> row / STRIP & 1)
            ra_scalar_forward_tile(step, slab, begin + row, begin + ra_min(row + STRIP, rows), scratch);
}
