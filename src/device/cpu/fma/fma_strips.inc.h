/* What forward and backward of fma.inc.h share.
 *
 * Needs   vec.h, VEC_LOAD_F16, PANEL and padded() of fma.inc.h.
 * Gives   rows in f32 (load_row, load_query), the scale that is left to apply (positive_scale), packed keys (pack_rows,
 *         pack_panels) with their sizes, and which keys a strip of rows meets (keys_of).
 */

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

/* What queries are multiplied with, so that the scale that remains is positive. */
static float sign_of(const ra_problem *problem) {
    const float scale = (float)problem->scale;
    return scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f;
}
static float positive_scale(const ra_problem *problem) {
    const float scale = (float)problem->scale;
    return scale == 0 ? 1.0f : fabsf(scale);
}

INLINE void load_query(float *restrict dst, const ra_tensor *q, const ra_slab *slab, int64_t r) {
    const int64_t dim = slab->problem->head_dim;
    load_row(dst, q->data, slab->problem->dtype, ra_slab_at(slab, q, r), dim);
    const float sign = sign_of(slab->problem);
    for (int64_t d = 0; sign < 1 && d < dim; d++) dst[d] *= sign;
}

/* Keys [low, last) of a view as rows, of which the first belongs to key `first` <= low, in panels of PANEL dimensions that have
 * `all` rows each; rows of zeros before low. */
static void pack_rows(float *rows, const ra_slab *slab, const ra_tensor *view, int64_t first, int64_t low, int64_t last,
                      int64_t all) {
    const int64_t dim = slab->problem->head_dim;
    for (int64_t d = 0; d < dim; d += PANEL) {
        const int64_t count = ra_min(PANEL, dim - d), width = padded(count);
        float *panel = rows + d * all;
        memset(panel, 0, (size_t)((low - first) * width) * sizeof(float));
        for (int64_t c = low; c < last; c++)
            load_row(panel + (c - first) * width, view->data, slab->problem->dtype, ra_slab_key_at(slab, view, c) + d,
                     count);
    }
}

/* Bytes that pack_panels needs for LANES rows. */
static int64_t staged_bytes(int64_t dim) { return LANES * padded(dim) * (int64_t)sizeof(float); }
/* Bytes of key panels for `keys` keys. The panels have `dim` rows, rounded up to LANES rows in the last panel only: what sticks
 * out of a panel is overwritten by the next. */
static int64_t panel_bytes(int64_t keys, int64_t dim) {
    return (ra_round_up(keys, PANEL) * dim + PANEL * LANES) * (int64_t)sizeof(float);
}

/* The same keys as key panels: zeros before low, and after last up to whole vectors of keys. */
static void pack_panels(float *panels, float *staged, const ra_slab *slab, const ra_tensor *view, int64_t first, int64_t low,
                        int64_t last) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    const bool in_place = slab->problem->dtype == RA_F32 && dim == width; /* else rows are converted or lengthened first */
    for (int64_t c = first; c < last; c += LANES) {
        const float *rows = staged;
        int64_t row = width;
        if (in_place && c >= low && c + LANES <= last) {
            rows = (const float *)view->data + ra_slab_key_at(slab, view, c);
            row = slab->k.row_step * view->row;
        } else {
            for (int64_t i = 0; i < LANES; i++) {
                if (c + i < low || c + i >= last) memset(staged + i * width, 0, (size_t)width * sizeof(float));
                else load_row(staged + i * width, view->data, slab->problem->dtype, ra_slab_key_at(slab, view, c + i), dim);
            }
        }
        float *to = panels + (c - first) / PANEL * PANEL * dim + (c - first) % PANEL;
        for (int64_t d = 0; d < dim; d += LANES) transpose(to + d * PANEL, PANEL, rows + d, row);
    }
}

/* The keys of a block that a strip of rows meets: columns [begin, end), and [from, to) rounded out to panels and vectors.
 * `whole`: every row meets all of [from, to). */
typedef struct span_of_keys {
    int64_t begin, end, from, to;
    bool whole;
} span_of_keys;

/* begins and ends: the rows' intervals, which move up from row to row, except those of rows that were made empty. */
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
