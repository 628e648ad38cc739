/* The products of fma.inc.h: one micro kernel, TILE_ROWS x COLUMNS vectors of sums in registers.
 *
 * Needs   vec.h, COLUMNS, UNROLL, TILE_ROWS, PANEL and padded() of fma.inc.h.
 * Gives   scores() (Q K^T), combine() (weights times rows) and spread() (transposed weights times rows).
 */

/* The sums of a register tile, with one more column of A and row of B. */
INLINE void micro_step(vec sum[TILE_ROWS][COLUMNS], const float *a, int64_t a_row, const float *b, const int nv) {
    vec column[COLUMNS];
    for (int j = 0; j < nv; j++) column[j] = load(b + j * LANES);
    for (int i = 0; i < TILE_ROWS; i++) {
        const vec x = splat(a[i * a_row]);
        for (int j = 0; j < nv; j++) sum[i][j] += x * column[j];
    }
}

/* C (TILE_ROWS x nv vectors) = or += A B over `depth`: A(i, k) = a[i*a_row + k*a_step], B's row k at b + k*b_step. */
INLINE void micro(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, int64_t depth, float *c,
                  int64_t c_row, const int nv, const bool add) {
    vec sum[TILE_ROWS][COLUMNS];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < nv; j++) sum[i][j] = splat(0);
    int64_t k = 0;
    for (; k + UNROLL <= depth; k += UNROLL)
        for (int u = 0; u < UNROLL; u++, a += a_step, b += b_step) micro_step(sum, a, a_row, b, nv);
    for (; k < depth; k++, a += a_step, b += b_step) micro_step(sum, a, a_row, b, nv);
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < nv; j++) {
            float *to = c + i * c_row + j * LANES;
            store(to, add ? load(to) + sum[i][j] : sum[i][j]);
        }
}

#define MICRO(nv)                                                                                                              \
    case nv:                                                                                                                   \
        for (int64_t i = 0; i < rows; i += TILE_ROWS)                                                                          \
            micro(a + i * a_row, a_row, a_step, panel, step, depth, c + i * c_row + j, c_row, nv, add);                        \
        break;

/* The same for `rows` rows (rounded up to TILE_ROWS; A and C have them) and `columns`, a multiple of LANES. B's columns lie in
 * panels: panel j/PANEL at b + j*b_panel; b_step 0: its rows are as long as the panel is wide. Of B's rows, b_first is the
 * first. */
INLINE void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b,
                    int64_t b_first, int64_t b_step, int64_t b_panel, float *c, int64_t c_row, const bool add) {
    for (int64_t j = 0; j < columns; j += PANEL) {
        const int64_t width = ra_min(PANEL, columns - j), step = b_step ? b_step : width;
        const float *panel = b + j * b_panel + b_first * step;
        switch (width / LANES) {
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

/* S = X Y^T: rows of X against key panels of Y. Sums of more than 128 are formed in parts: an error of a score is one of its
 * exponential. */
static void scores(int64_t rows, int64_t columns, int64_t dim, const float *x, const float *panels, float *s, int64_t s_row) {
    const int64_t part = dim > 128 ? 64 : dim;
    product(rows, columns, part, x, padded(dim), 1, panels, 0, PANEL, dim, s, s_row, false);
    for (int64_t d = part; d < dim; d += part)
        product(rows, columns, ra_min(dim - d, part), x + d, padded(dim), 1, panels + d * PANEL, 0, PANEL, dim, s, s_row, true);
}
/* Y += W X (forward), or = (backward): rows of weights against rows [first, first + keys) of X, which has `all` rows, in panels
 * of dimensions. */
INLINE void combine(int64_t rows, int64_t dim, int64_t keys, const float *w, int64_t w_row, const float *x, int64_t first,
                    int64_t all, float *y, const bool add) {
    product(rows, padded(dim), keys, w, w_row, 1, x, first, 0, all, y, padded(dim), add);
}
/* Y = or += W^T X, X by rows. */
INLINE void spread(int64_t keys, int64_t dim, int64_t rows, const float *w, int64_t w_row, const float *x, float *y,
                   const bool add) {
    product(keys, padded(dim), rows, w, 1, w_row, x, 0, padded(dim), 1, y, padded(dim), add);
}
