/* The scalar tiles for one type of arithmetic. Included by scalar.c, once for float and once for double.
 *
 * Needs   real, REAL_TYPE (its ra_dtype), NAME(x) to tell the functions apart, NAME(exp); RA_MAX_DIM, ROWS and KEYS.
 * Gives   NAME(forward_tile), NAME(backward_tile), and NAME(forward_arrays), NAME(backward_arrays) for their scratch.
 *
 * Rows are handled one by one, each over its own interval of keys, so that a masked key is never part of any arithmetic. Loops
 * run over consecutive keys or over the head dimension: the compiler vectorises them.
 *
 * Keys come in blocks; within a block sums are of type real, and the running sums over blocks are double, so that the error
 * does not grow with the number of keys.
 */

/* Copies one row to real. */
static void NAME(load)(real *dst, const void *base, ra_dtype dtype, int64_t offset, int64_t count) {
    ra_convert(dst, REAL_TYPE, (const char *)base + offset * (int64_t)ra_dtype_size(dtype), dtype, count);
}

/* Keys [begin, end) of a view as rows: dst[key][d]. */
static void NAME(gather)(real *restrict dst, const ra_slab *slab, const ra_tensor *view, int64_t begin, int64_t end) {
    const int64_t dim = slab->problem->head_dim;
    for (int64_t c = begin; c < end; c++)
        NAME(load)(dst + (c - begin) * dim, view->data, slab->problem->dtype, ra_slab_key_at(slab, view, c), dim);
}

/* The same as columns: dst[d][key], a row of KEYS keys. */
static void NAME(gather_columns)(real *restrict dst, const ra_slab *slab, const ra_tensor *view, int64_t begin, int64_t end) {
    const int64_t dim = slab->problem->head_dim;
    real row[RA_MAX_DIM];
    for (int64_t c = begin; c < end; c++) {
        NAME(load)(row, view->data, slab->problem->dtype, ra_slab_key_at(slab, view, c), dim);
        for (int64_t d = 0; d < dim; d++) dst[d * KEYS + (c - begin)] = row[d];
    }
}

/* dots[j] = sum over d of x[d] * columns[d][j], for j in [begin, end). */
static void NAME(dots)(real *restrict dots, const real *restrict x, const real *restrict columns, int64_t dim, int64_t begin,
                       int64_t end) {
    for (int64_t j = begin; j < end; j++) dots[j] = 0;
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
        const real x0 = x[d], x1 = x[d + 1], x2 = x[d + 2], x3 = x[d + 3];
        const real *restrict column = columns + d * KEYS;
        for (int64_t j = begin; j < end; j++)
            dots[j] += (x0 * column[j] + x1 * column[KEYS + j]) + (x2 * column[2 * KEYS + j] + x3 * column[3 * KEYS + j]);
    }
    for (; d < dim; d++) {
        const real x0 = x[d];
        for (int64_t j = begin; j < end; j++) dots[j] += x0 * columns[d * KEYS + j];
    }
}

/* y += sum over j in [begin, end) of w[j] * rows[j]. */
static void NAME(combine)(real *restrict y, const real *restrict w, const real *restrict rows, int64_t dim, int64_t begin,
                          int64_t end) {
    int64_t j = begin;
    for (; j + 4 <= end; j += 4) {
        const real w0 = w[j], w1 = w[j + 1], w2 = w[j + 2], w3 = w[j + 3];
        const real *restrict row = rows + j * dim;
        for (int64_t d = 0; d < dim; d++)
            y[d] += (w0 * row[d] + w1 * row[dim + d]) + (w2 * row[2 * dim + d] + w3 * row[3 * dim + d]);
    }
    for (; j < end; j++)
        for (int64_t d = 0; d < dim; d++) y[d] += w[j] * rows[j * dim + d];
}

/* rows[j] += w[j] * x, for j in [begin, end). */
static void NAME(spread)(real *restrict rows, const real *restrict w, const real *restrict x, int64_t dim, int64_t begin,
                         int64_t end) {
    for (int64_t j = begin; j < end; j++)
        for (int64_t d = 0; d < dim; d++) rows[j * dim + d] += w[j] * x[d];
}

/* factors[j] = 1/(1-p) where dropout keeps key first + j of row r, else 0, for j in [begin, end). */
static void NAME(dropout)(real *factors, const ra_slab *slab, int64_t r, int64_t first, int64_t begin, int64_t end) {
    const uint32_t threshold = ra_dropout_threshold(slab->problem);
    const real keep = (real)(1 / (1 - slab->problem->dropout));
    uint32_t draws[KEYS];
    ra_dropout_draws(draws, slab, r, first, begin, end);
    for (int64_t j = begin; j < end; j++) factors[j] = draws[j] >= threshold ? keep : 0;
}

/* Scratch of a worker, forward. */
typedef struct NAME(forward_space) {
    real *keys, *values, *q; /* forward_arrays */
    double *acc;
    double m[ROWS], l[ROWS];
    int64_t begin[ROWS], end[ROWS];
    real scores[KEYS], factors[KEYS], sum[RA_MAX_DIM];
} NAME(forward_space);

/* Lays the arrays out behind the space itself; with base NULL only tells how long all of it is. */
static int64_t NAME(forward_arrays)(int64_t dim, char *base, NAME(forward_space) * s) {
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *s);
    s->keys = ra_carve(&at, dim * KEYS * (int64_t)sizeof(real));
    s->values = ra_carve(&at, dim * KEYS * (int64_t)sizeof(real));
    s->q = ra_carve(&at, dim * ROWS * (int64_t)sizeof(real));
    s->acc = ra_carve(&at, dim * ROWS * (int64_t)sizeof(double));
    return at - base;
}

/* Row r of the tile meets keys [begin, end) of the block that starts at key `first`. */
static void NAME(forward_row)(NAME(forward_space) * s, const ra_slab *slab, int64_t r, int64_t row, int64_t first,
                              int64_t begin, int64_t end) {
    const int64_t dim = slab->problem->head_dim;
    const real scale = (real)slab->problem->scale;
    double *acc = s->acc + r * dim;
    NAME(dots)(s->scores, s->q + r * dim, s->keys, dim, begin, end);
    real m = (real)s->m[r];
    for (int64_t j = begin; j < end; j++) {
        s->scores[j] *= scale;
        m = s->scores[j] > m ? s->scores[j] : m;
    }
    /* While every score is -inf (or not a number) weights are taken relative to 0: exp gives 0, and NaN stays NaN. */
    const real base = m == -(real)INFINITY ? 0 : m;
    double l = 0;
    for (int64_t j = begin; j < end; j++) s->scores[j] = NAME(exp)(s->scores[j] - base);
    for (int64_t j = begin; j < end; j++) l += (double)s->scores[j];
    if (slab->problem->dropout > 0) {
        NAME(dropout)(s->factors, slab, row, first, begin, end);
        for (int64_t j = begin; j < end; j++) s->scores[j] *= s->factors[j];
    }
    for (int64_t d = 0; d < dim; d++) s->sum[d] = 0;
    NAME(combine)(s->sum, s->scores, s->values, dim, begin, end);
    const double shrink = s->m[r] == (double)m ? 1 : exp(s->m[r] - (double)base);
    for (int64_t d = 0; d < dim; d++) acc[d] = acc[d] * shrink + (double)s->sum[d];
    s->l[r] = s->l[r] * shrink + l;
    s->m[r] = (double)m;
}

static void NAME(forward_tile)(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end, void *scratch) {
    NAME(forward_space) *s = scratch;
    NAME(forward_arrays)(slab->problem->head_dim, scratch, s);
    const ra_problem *problem = slab->problem;
    const int64_t dim = problem->head_dim;
    for (int64_t r = begin; r < end; r++) {
        const int64_t i = r - begin;
        NAME(load)(s->q + i * dim, step->q.data, problem->dtype, ra_slab_at(slab, &step->q, r), dim);
        ra_slab_interval(slab, r, &s->begin[i], &s->end[i]);
        s->m[i] = -INFINITY;
        s->l[i] = 0;
        for (int64_t d = 0; d < dim; d++) s->acc[i * dim + d] = 0;
        if (step->single) continue;
        s->m[i] = (double)((const real *)step->m.data)[ra_slab_at(slab, &step->m, r)];
        s->l[i] = (double)((const real *)step->l.data)[ra_slab_at(slab, &step->l, r)];
        if (ra_state_empty(s->m[i], s->l[i])) continue;
        NAME(load_sums)(s->sum, ra_sums_of_state(step, slab, r), dim);
        for (int64_t d = 0; d < dim; d++) s->acc[i * dim + d] = (double)s->sum[d];
    }
    int64_t low, high;
    ra_slab_hull(slab, begin, end, &low, &high);
    for (int64_t first = low; first < high; first += KEYS) {
        const int64_t last = ra_min(first + KEYS, high);
        NAME(gather_columns)(s->keys, slab, &slab->item->k_view, first, last);
        NAME(gather)(s->values, slab, &slab->item->v_view, first, last);
        for (int64_t i = 0; i < end - begin; i++) {
            const int64_t b = ra_max(s->begin[i], first) - first, e = ra_min(s->end[i], last) - first;
            if (b < e) NAME(forward_row)(s, slab, i, begin + i, first, b, e);
        }
    }
    for (int64_t r = begin; r < end; r++) {
        const int64_t i = r - begin;
        const double *acc = s->acc + i * dim;
        if (!step->closes) {
            for (int64_t d = 0; d < dim; d++) s->sum[d] = (real)acc[d];
            NAME(store_sums)(ra_sums_of_state(step, slab, r), s->sum, dim);
            ((real *)step->m.data)[ra_slab_at(slab, &step->m, r)] = (real)s->m[i];
            ((real *)step->l.data)[ra_slab_at(slab, &step->l, r)] = (real)s->l[i];
            continue;
        }
        const bool empty = s->l[i] == 0;
        for (int64_t d = 0; d < dim; d++) s->sum[d] = empty ? 0 : (real)(acc[d] / s->l[i]);
        ra_convert((char *)step->out.data + ra_slab_at(slab, &step->out, r) * (int64_t)ra_dtype_size(problem->dtype),
                   problem->dtype, s->sum, REAL_TYPE, dim);
        if (step->lse.data)
            ((real *)step->lse.data)[ra_slab_at(slab, &step->lse, r)] =
                empty ? -(real)INFINITY : (real)(s->m[i] + log(s->l[i]));
    }
}

/* Scratch of a worker, backward. */
typedef struct NAME(backward_space) {
    real *key_columns, *value_columns, *keys, *dk, *dv; /* backward_arrays */
    real q[RA_MAX_DIM], dout[RA_MAX_DIM], dq[RA_MAX_DIM];
    real p[KEYS], ds[KEYS], factors[KEYS];
} NAME(backward_space);

static int64_t NAME(backward_arrays)(int64_t dim, char *base, NAME(backward_space) * s) {
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *s);
    real **arrays[] = {&s->key_columns, &s->value_columns, &s->keys, &s->dk, &s->dv};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) *arrays[i] = ra_carve(&at, dim * KEYS * (int64_t)sizeof(real));
    return at - base;
}

static void NAME(backward_row)(const ra_backward_step *step, NAME(backward_space) * s, const ra_slab *slab, int64_t r,
                               int64_t first, int64_t begin, int64_t end) {
    const ra_problem *problem = slab->problem;
    const int64_t dim = problem->head_dim;
    const real scale = (real)problem->scale;
    const real lse = ((const real *)step->lse.data)[ra_slab_at(slab, &step->lse, r)];
    const real delta = ((const real *)step->delta.data)[ra_slab_at(slab, &step->delta, r)];
    if (lse == -(real)INFINITY) return; /* no key, or none that counts */
    NAME(load)(s->q, step->q.data, problem->dtype, ra_slab_at(slab, &step->q, r), dim);
    NAME(load)(s->dout, step->dout.data, problem->dtype, ra_slab_at(slab, &step->dout, r), dim);
    NAME(dots)(s->p, s->q, s->key_columns, dim, begin, end);
    NAME(dots)(s->ds, s->dout, s->value_columns, dim, begin, end);
    for (int64_t j = begin; j < end; j++) s->p[j] *= scale; /* rounded, as in forward: ra_vast */
    for (int64_t j = begin; j < end; j++) s->p[j] = NAME(exp)(s->p[j] > lse ? 0 : s->p[j] - lse); /* no weight is above 1 */
    if (problem->dropout > 0) {
        NAME(dropout)(s->factors, slab, r, first, begin, end);
        for (int64_t j = begin; j < end; j++) {
            s->ds[j] = scale * (s->p[j] * (s->factors[j] * s->ds[j] - delta));
            s->p[j] *= s->factors[j];
        }
    } else {
        for (int64_t j = begin; j < end; j++) s->ds[j] = scale * (s->p[j] * (s->ds[j] - delta));
    }
    for (int64_t d = 0; d < dim; d++) s->dq[d] = 0;
    NAME(combine)(s->dq, s->ds, s->keys, dim, begin, end);
    NAME(spread)(s->dk, s->ds, s->q, dim, begin, end);
    NAME(spread)(s->dv, s->p, s->dout, dim, begin, end);
    NAME(add_sums)(ra_sums_of_query(step, slab, r), s->dq, dim);
}

static void NAME(backward_tile)(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end, int64_t first,
                                int64_t last, void *scratch) {
    NAME(backward_space) *s = scratch;
    NAME(backward_arrays)(slab->problem->head_dim, scratch, s);
    const int64_t dim = slab->problem->head_dim;
    NAME(gather_columns)(s->key_columns, slab, &slab->item->k_view, first, last);
    NAME(gather_columns)(s->value_columns, slab, &slab->item->v_view, first, last);
    NAME(gather)(s->keys, slab, &slab->item->k_view, first, last);
    memset(s->dk, 0, (size_t)((last - first) * dim) * sizeof(real));
    memset(s->dv, 0, (size_t)((last - first) * dim) * sizeof(real));
    for (int64_t r = begin; r < end; r++) {
        int64_t b, e;
        ra_slab_interval(slab, r, &b, &e);
        b = ra_max(b, first) - first;
        e = ra_min(e, last) - first;
        if (b >= e) continue;
        ra_turn_wait(slab->turn, r + 1);
        NAME(backward_row)(step, s, slab, r, first, b, e);
        ra_turn_pass(slab->turn, r + 1);
    }
    ra_keys_wait(slab);
    for (int64_t c = first; c < last; c++) {
        NAME(add_sums)(ra_sums_of_key(step, slab, false, c), s->dk + (c - first) * dim, dim);
        NAME(add_sums)(ra_sums_of_key(step, slab, true, c), s->dv + (c - first) * dim, dim);
    }
}
