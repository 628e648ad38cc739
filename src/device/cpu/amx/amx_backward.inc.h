/* Backward attention by AMX: rows x keys of a tile, in transposed form, in squares of 32 keys by 32 rows.
 *
 * Needs   LIMBS, element and FAMILY (amx.inc.h).
 * Gives   FAMILY(backward) and FAMILY(backward_scratch).
 *
 * The products are
 *
 *       S^T = K across(Q),  dP^T = V across(dO),  P^T = exp(S^T - lse),  dS^T = P^T (dP^T - delta)
 *       dV = P^T along(dO),  dK = dS^T along(Q)
 *
 * so that P^T and dS^T are A operands as they are; dS^T is also kept as along(dS^T), and when all squares of a block of rows
 * are done dQ^T = K^T along(dS^T). The scale of the scores is put on dK and dQ at the end.
 *
 * The rows of a tile come in blocks. A chunk is 32 keys against all rows of a block. In a step the vector unit differentiates
 * one square, while the tile unit computes S^T and dP^T of the next square and works on dV and dK of the chunk before: a
 * square's share of the products, wherever it begins in the list of pieces (32 columns of dV or dK). dQ^T no longer needs Q and
 * dO, so while it is computed the vector unit packs those of the next block in their place.
 */
#include "device/cpu/amx/amx_gradients.inc.h"
#include "device/cpu/amx/amx_products.inc.h"

#ifndef COLUMNS
enum { COLUMNS = LIMBS == 1 ? 1024 : 512 }; /* keys of a tile at most */
#endif
enum { KEPT = 65536 }; /* elements of keys of a tile at most: most of them stay in L2 */

/* Keys of a tile. */
INLINE int64_t most_keys(const ra_problem *problem) {
    return known_keys(problem, SQUARE, ra_min(COLUMNS, KEPT / padded(problem->head_dim) / SQUARE * SQUARE));
}

typedef struct backward_space {
    _Alignas(64) float s[2][4 * SUMS], dp[2][4 * SUMS];                              /* a square, transposed */
    _Alignas(64) float partial[4 * SUMS];                                               /* debt */
    _Alignas(64) uint16_t p[2][BLOCK / SQUARE * STEP], ds[2][BLOCK / SQUARE * STEP]; /* a chunk: [rows/32], tiles of A */
    _Alignas(64) uint16_t rows[LIMBS * SQUARE * MAX_DIM], along[LIMBS * SQUARE * MAX_DIM];
    /* Laid out by backward_arrays, all in the order in which they are read. */
    uint16_t *q_across, *dout_across; /* [rows/32][32 dimensions] */
    uint16_t *q_along, *dout_along;   /* [32 dimensions][rows/32] */
    uint16_t *k, *v;                  /* A's tiles: [keys/32][32 dimensions] */
    uint16_t *k_turned;               /* A's tiles of K^T: [32 dimensions][keys/32] */
    uint16_t *ds_along;               /* [rows/32][keys/32] */
    float *dk, *dv;                   /* C's tiles: [keys/32][32 dimensions] */
    float *dq;                        /* C's tiles of dQ^T: [rows/32][32 dimensions]; a room */
    _Alignas(64) float lse[BLOCK];    /* to base 2 */
    float delta[BLOCK];
    int32_t begin[BLOCK], end[BLOCK]; /* columns that a row meets */
    bool summed[COLUMNS / SQUARE];    /* dk and dv of a chunk hold something */
} backward_space;

static int64_t backward_arrays(const ra_problem *problem, char *base, backward_space *f) {
    const int64_t width = padded(problem->head_dim), keys = most_keys(problem), rows = ra_cpu_tile_rows(problem, SQUARE, BLOCK),
                  size = (int64_t)sizeof(float);
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->q_across = ra_carve(&at, rows * width * LIMBS * 2);
    f->q_along = ra_carve(&at, rows * width * LIMBS * 2);
    f->dout_across = ra_carve(&at, rows * width * LIMBS * 2);
    f->dout_along = ra_carve(&at, rows * width * LIMBS * 2);
    f->k = ra_carve(&at, keys * width * LIMBS * 2);
    f->v = ra_carve(&at, keys * width * LIMBS * 2);
    f->k_turned = ra_carve(&at, keys * width * LIMBS * 2);
    f->ds_along = ra_carve(&at, keys * rows * LIMBS * 2);
    f->dk = ra_carve(&at, keys * width * size);
    f->dv = ra_carve(&at, keys * width * size);
    return at - base;
}

/* --------------------------------------------------------------------------------------------------------- squares */

/* Rows of a tile that are packed. */
typedef struct row_block {
    int64_t begin, end;
    int64_t groups;                                    /* squares of rows */
    int64_t from, to;                                  /* chunks that some row meets; none: from >= to */
    int64_t low[BLOCK / SQUARE], high[BLOCK / SQUARE]; /* columns that every row of a group meets */
} row_block;

typedef struct tile_job {
    backward_space *f;
    const ra_backward_step *step;
    const ra_slab *slab;
    int64_t rows_end;    /* of the tile */
    int64_t first, last; /* its keys */
    int64_t depth;       /* of the head dimension, in squares */
    int64_t chunks;      /* squares of keys */
    float scale;         /* of scores, to base 2 */
    row_block block;
    debt owed;
} tile_job;

/* Differentiation of a square, in units of 16 elements of P^T or of dS^T. Keys k and k + 16 come together, a pair. */
enum { PAIR = 8, BACKWARD_UNITS = SQUARE / 2 * PAIR };

typedef struct backward_work {
    const float *s, *dp, *lse, *delta;
    const int32_t *begin, *end;
    uint16_t *p, *ds, *along;
    vec scale;
    int32_t column;               /* of the first key */
    vec weights;                  /* what has been computed of the key, and not yet stored */
    limbs p_left, ds_left;       /* of its first 16 rows */
    limbs near_left, near_right; /* dS of the first key of the pair */
} backward_work;

/* The first unit of an element computes its weight, the second its dS. */
INLINE void differentiate(backward_work *w, int64_t unit, const bool masked) {
    const int64_t pair = unit / PAIR, far = unit / 4 % 2, half = unit / 2 % 2;
    const int64_t key = pair + 16 * far, i = 16 * half, at = key * 16 + half * 2 * SUMS;
    if (unit % 2 == 0) {
        w->weights = power_of_two(load(w->s + at) * w->scale - load(w->lse + i));
        return;
    }
    vec p = w->weights, ds = p * (load(w->dp + at) - load(w->delta + i));
    if (masked) {
        const ivec column = (int32_t)(w->column + key) - (ivec){0};
        const ivec begin = (ivec)load((const float *)(const void *)(w->begin + i)),
                   end = (ivec)load((const float *)(const void *)(w->end + i));
        const ivec met = (column >= begin) & (column < end);
        p = (vec)((ivec)p & met);
        ds = (vec)((ivec)ds & met);
    }
    const limbs p_limbs = limbs_of(p), ds_limbs = limbs_of(ds);
    if (far) store_pairs(w->along + half * TILE + pair * 32, half ? w->near_right : w->near_left, ds_limbs);
    else if (half) w->near_right = ds_limbs;
    else w->near_left = ds_limbs;
    if (!half) {
        w->p_left = p_limbs;
        w->ds_left = ds_limbs;
        return;
    }
    store_pairs(w->p + key * 32, w->p_left, p_limbs);
    store_pairs(w->ds + key * 32, w->ds_left, ds_limbs);
}

/* A whole square at once. */
static __attribute__((noinline, cold)) void differentiate_masked(backward_work work) {
    for (int64_t unit = 0; unit < BACKWARD_UNITS; unit++) differentiate(&work, unit, true);
}

INLINE void differentiate_unit(backward_work *w, int64_t unit) { differentiate(w, unit, false); }
/* P and dS of a chunk are 64 KB and more: they stream past L1. */
DEFINE_PRODUCT_WITH_WORK(multiply_and_differentiate, TILE_STREAM, backward_work, differentiate_unit)
DEFINE_PRODUCT(multiply_alone, TILE_STREAM)

/* The operands of S^T and dP^T of a square. */
#define SQUARE_SCORES(t, chunk, group, depth)                                                                                  \
    (t)->f->s[((chunk) * (t)->block.groups + (group)) & 1], (t)->f->k + (chunk) * (depth)*STEP,                                \
        (t)->f->q_across + (group) * (depth)*STEP, STEP, depth
#define SQUARE_SLOPES(t, chunk, group, depth)                                                                                  \
    (t)->f->dp[((chunk) * (t)->block.groups + (group)) & 1], (t)->f->v + (chunk) * (depth)*STEP,                               \
        (t)->f->dout_across + (group) * (depth)*STEP, STEP, depth

/* How far dV and dK of a chunk have come: `piece` counts 32 columns of dV, then of dK; `group` the rows that are in it. */
typedef struct progress {
    int64_t chunk, piece, group;
} progress;

/* The next `products` of them, all of one piece, and units [from, to) of work. */
INLINE void add_to_piece(tile_job *t, progress *g, const int64_t products, const int64_t depth, backward_work *work,
                         const int64_t from, const int64_t to) {
    backward_space *f = t->f;
    const bool values = g->piece < depth;
    const int64_t column = g->piece % depth;
    multiply_and_differentiate_adding(&t->owed, (values ? f->dv : f->dk) + (g->chunk * depth + column) * 4 * SUMS,
                               (values ? f->p : f->ds)[g->chunk & 1] + g->group * STEP,
                               (values ? f->dout_along : f->q_along) + (column * t->block.groups + g->group) * STEP, STEP,
                               products, g->group > 0 || f->summed[g->chunk], work, from, to);
    g->group += products;
    if (g->group < t->block.groups) return;
    g->group = 0;
    g->piece++;
    f->summed[g->chunk] |= g->piece == 2 * depth;
}

/* The next `products`, and units of work. Where the products are known to be part of a piece, or two whole ones, they are
 * inlined. */
INLINE void add_gradients(tile_job *t, progress *g, const int64_t products, const int64_t depth, backward_work *work,
                          const int64_t from, const int64_t to) {
    enum { GROUPS = BLOCK / SQUARE };
    if (g->piece == 2 * depth) return;
    if (products <= GROUPS && t->block.groups % products == 0) {
        add_to_piece(t, g, products, depth, work, from, to);
        return;
    }
    if (LIMBS == 3 && __builtin_constant_p(products) && products == 2 * GROUPS && t->block.groups == GROUPS) {
        const int64_t half = due_at(from, to, 1, 2);
        add_to_piece(t, g, GROUPS, depth, work, from, half);
        add_to_piece(t, g, GROUPS, depth, work, half, to);
        return;
    }
    backward_work other = *work; /* a copy whose address may be taken: `work` itself stays in registers */
    for (int64_t done = 0, count; done < products && g->piece < 2 * depth; done += count) {
        count = ra_min(products - done, t->block.groups - g->group);
        add_to_piece(t, g, count, depth, &other, due_at(from, to, done, products), due_at(from, to, done + count, products));
    }
    *work = other;
}

/* The next `products` alone. */
static __attribute__((noinline)) void add_gradients_alone(tile_job *t, progress *g, int64_t products) {
    for (int64_t done = 0, count; done < products && g->piece < 2 * t->depth; done += count) {
        count = ra_min(products - done, t->block.groups - g->group);
        add_to_piece(t, g, count, t->depth, NO_WORK);
    }
}

/* ------------------------------------------------------------------------------------------------------------ rows */

/* Does every row meet every key? (Intervals move up with the position.) */
static bool meet_all(const ra_slab *slab, int64_t begin, int64_t end, int64_t first, int64_t last) {
    int64_t low[2], high[2];
    ra_slab_interval(slab, begin, &low[0], &high[0]);
    ra_slab_interval(slab, end - 1, &low[1], &high[1]);
    return ra_max(low[0], low[1]) <= first && ra_min(high[0], high[1]) >= last;
}

/* Takes on the block of rows that begins at `row`: what they meet, lse and delta. Their q and dout are then to be packed. */
static void open_block(tile_job *t, int64_t row) {
    backward_space *f = t->f;
    const ra_slab *slab = t->slab;
    const int64_t rows = ra_min(BLOCK, t->rows_end - row);
    int64_t lowest = t->last - t->first, highest = 0;
    row_block b = {.begin = row, .end = row + rows, .groups = padded(rows) / SQUARE};
    const bool whole = rows > 0 && meet_all(slab, row, row + rows, t->first, t->last);
    for (int64_t i = 0; i < b.groups * SQUARE; i++) {
        const int64_t r = row + i;
        int64_t low = 0, high = t->last;
        float lse = -INFINITY, delta = 0;
        if (i < rows) {
            if (!whole) ra_slab_interval(slab, r, &low, &high);
            lse = ((const float *)t->step->lse.data)[ra_slab_at(slab, &t->step->lse, r)];
            delta = ((const float *)t->step->delta.data)[ra_slab_at(slab, &t->step->delta, r)];
        }
        low = ra_max(low, t->first) - t->first;
        high = ra_min(high, t->last) - t->first;
        const bool meets = lse != -INFINITY && low < high; /* else its q and dout may be anything */
        lse = (float)((double)lse * LOG2_E);
        if (ra_vast(lse)) lse = NAN; /* so that the tile is given up */
        f->lse[i] = meets ? plain_nan(lse) : 0;
        f->delta[i] = meets ? plain_nan(delta) : 0;
        f->begin[i] = meets ? (int32_t)low : 0;
        f->end[i] = meets ? (int32_t)high : 0;
        const int64_t group = i / SQUARE;
        const bool first_row = i % SQUARE == 0;
        b.low[group] = first_row ? f->begin[i] : ra_max(b.low[group], f->begin[i]);
        b.high[group] = first_row ? f->end[i] : ra_min(b.high[group], f->end[i]);
        if (!meets) continue;
        lowest = ra_min(lowest, low);
        highest = ra_max(highest, high);
    }
    b.from = lowest / SQUARE;
    b.to = ra_ceil_div(highest, SQUARE);
    t->block = b;
}

/* The packing of a block's q and dout, in units: for every square of 32 rows those of a copy (or one, if they are packed from
 * where they lie), then tiles across, then tiles along. */
typedef struct loading {
    tile_job *t;
    bool dout;     /* else q */
    int64_t group; /* the square */
    int64_t unit;  /* the next of its units */
    int64_t units; /* of all squares */
    rows32 rows;
} loading;

enum { COPY_UNITS = LIMBS == 1 ? 1 : SQUARE };
INLINE int64_t across_units(const tile_job *t) { return 2 * t->depth * LIMBS; }
INLINE int64_t along_units(const tile_job *t) { return t->depth * LIMBS; }
INLINE int64_t square_units(const tile_job *t) { return COPY_UNITS + across_units(t) + along_units(t); }

static loading loading_of(tile_job *t) {
    const row_block *b = &t->block;
    return (loading){.t = t, .units = b->from < b->to ? 2 * b->groups * square_units(t) : 0};
}

/* Prefetches row i of the next square. */
INLINE void fetch_next(const loading *l, int64_t i) {
    const tile_job *t = l->t;
    const bool same = l->group + 1 < t->block.groups;
    const ra_tensor *tensor = l->dout || !same ? &t->step->dout : &t->step->q;
    const int64_t row = t->block.begin + (same ? (l->group + 1) * SQUARE : 0) + i;
    if (row < t->block.end) fetch_row(tensor, ra_slab_at(t->slab, tensor, row), t->slab->problem->head_dim);
}

/* A row of a copy, or all of a square. Rows that meet nothing become zeros. */
static void copy_unit(loading *l) {
    const tile_job *t = l->t;
    backward_space *f = t->f;
    const ra_tensor *tensor = l->dout ? &t->step->dout : &t->step->q;
    const int64_t row = l->group * SQUARE, dim = t->slab->problem->head_dim, width = padded(dim);
    const int32_t *begin = f->begin + row, *end = f->end + row;
    const int64_t i = l->unit, last = i + SQUARE / COPY_UNITS;
    for (int64_t j = i; j < last; j++) fetch_next(l, j);
#if LIMBS == 1
    bool meet = true;
    for (int64_t j = 0; j < SQUARE; j++) meet &= begin[j] < end[j];
    if (meet) {
        l->rows = take_queries(f->rows, t->slab, tensor, t->block.begin + row, t->block.end);
        return;
    }
#endif
    for (int64_t j = i; j < last; j++) {
        const element *from = (const element *)tensor->data + ra_slab_at(t->slab, tensor, t->block.begin + row + j);
        copy_row(f->rows, j, begin[j] < end[j] ? from : NULL, dim, width);
    }
    if (last == SQUARE) give_up_tiny(f->rows, width);
    l->rows = (rows32){f->rows, width};
}

/* The next unit. */
static __attribute__((noinline)) void load_unit(loading *l, int64_t unit) {
    const tile_job *t = l->t;
    backward_space *f = t->f;
    uint16_t *across = (l->dout ? f->dout_across : f->q_across) + l->group * t->depth * STEP,
             *along = (l->dout ? f->dout_along : f->q_along) + l->group * STEP;
    const int64_t i = l->unit - COPY_UNITS;
    (void)unit; /* they come one after the other */
    if (i < 0) copy_unit(l);
    else if (i < across_units(t)) pack_tile_across(across, l->rows, i);
    else pack_tiles_along(along, l->rows, t->block.groups * STEP, i - across_units(t));
    if (++l->unit < square_units(t)) return;
    l->unit = 0;
    if (++l->group < t->block.groups) return;
    l->group = 0;
    l->dout = true;
}

/* A block whose rows are packed at once. */
static void load_block(tile_job *t, int64_t row) {
    open_block(t, row);
    loading l = loading_of(t);
    for (int64_t unit = 0; unit < l.units; unit++) load_unit(&l, unit);
}

DEFINE_PRODUCT_WITH_WORK(multiply_and_load, TILE_STREAM, loading, load_unit)

/* dQ^T of the block, and the next one takes its place. */
static void multiply_queries(tile_job *t) {
    const backward_space *f = t->f;
    const row_block b = t->block;
    const int64_t products = t->depth * b.groups;
    open_block(t, b.end);
    loading l = loading_of(t);
    for (int64_t i = 0; i < products; i++) {
        const int64_t d = i / b.groups, g = i % b.groups;
        multiply_and_load(&t->owed, f->dq + (g * t->depth + d) * 4 * SUMS, f->k_turned + (d * t->chunks + b.from) * STEP,
                          f->ds_along + (g * t->chunks + b.from) * STEP, STEP, b.to - b.from, false, &l,
                          due_at(0, l.units, i, products), due_at(0, l.units, i + 1, products));
    }
    settle(&t->owed);
}

/* -------------------------------------------------------------------------------------------------------- blocks */

INLINE void walk_block(tile_job *t, const int64_t depth) {
    backward_space *f = t->f;
    const row_block *b = &t->block;
    multiply_alone(&t->owed, SQUARE_SCORES(t, b->from, 0, depth), false, NO_WORK);
    multiply_alone(&t->owed, SQUARE_SLOPES(t, b->from, 0, depth), false, NO_WORK);
    settle(&t->owed);
    for (int64_t chunk = b->from; chunk < b->to; chunk++) {
        const bool gradients = chunk > b->from;
        progress done = {.chunk = chunk - 1};
        for (int64_t group = 0; group < b->groups; group++) {
            const bool last = group + 1 == b->groups, scores = !last || chunk + 1 < b->to;
            const bool masked = b->low[group] > chunk * SQUARE || b->high[group] < (chunk + 1) * SQUARE;
            const int64_t square = chunk * b->groups + group, next = last ? 0 : group + 1;
            backward_work work = {.s = f->s[square & 1],
                                  .dp = f->dp[square & 1],
                                  .lse = f->lse + group * SQUARE,
                                  .delta = f->delta + group * SQUARE,
                                  .begin = f->begin + group * SQUARE,
                                  .end = f->end + group * SQUARE,
                                  .p = f->p[chunk & 1] + group * STEP,
                                  .ds = f->ds[chunk & 1] + group * STEP,
                                  .along = f->ds_along + (group * t->chunks + chunk) * STEP,
                                  .scale = splat(t->scale),
                                  .column = (int32_t)(chunk * SQUARE)};
            if (!masked && scores && gradients) {
                multiply_and_differentiate(&t->owed, SQUARE_SCORES(t, chunk + last, next, depth), false, &work, 0,
                                           BACKWARD_UNITS / 4);
                multiply_and_differentiate(&t->owed, SQUARE_SLOPES(t, chunk + last, next, depth), false, &work,
                                           BACKWARD_UNITS / 4, BACKWARD_UNITS / 2);
                add_gradients(t, &done, 2 * depth, depth, &work, BACKWARD_UNITS / 2, BACKWARD_UNITS);
                continue;
            }
            if (!masked && scores) {
                multiply_and_differentiate(&t->owed, SQUARE_SCORES(t, chunk + last, next, depth), false, &work, 0,
                                           BACKWARD_UNITS / 2);
                multiply_and_differentiate(&t->owed, SQUARE_SLOPES(t, chunk + last, next, depth), false, &work,
                                           BACKWARD_UNITS / 2, BACKWARD_UNITS);
                settle(&t->owed);
                continue;
            }
            if (scores) {
                multiply_alone(&t->owed, SQUARE_SCORES(t, chunk + last, next, depth), false, NO_WORK);
                multiply_alone(&t->owed, SQUARE_SLOPES(t, chunk + last, next, depth), false, NO_WORK);
            }
            if (gradients) add_gradients_alone(t, &done, 2 * depth);
            else settle(&t->owed);
            differentiate_masked(work); /* the very last square may have no mask: it comes once in a block */
        }
    }
    progress done = {.chunk = b->to - 1};
    add_gradients_alone(t, &done, INT64_MAX);
    multiply_queries(t);
}

/* The common head dimensions have code of their own, in functions of their own: compilers take long over large ones. */
static __attribute__((noinline)) void walk_block_2(tile_job *t) { walk_block(t, 2); }
static __attribute__((noinline)) void walk_block_4(tile_job *t) { walk_block(t, 4); }
static __attribute__((noinline)) void walk_block_any(tile_job *t) { walk_block(t, t->depth); }

/* ----------------------------------------------------------------------------------------------------------- tiles */

static void pack_keys_backward(backward_space *f, const ra_slab *slab, int64_t first, int64_t last) {
    const int64_t width = padded(slab->problem->head_dim), chunks = ra_ceil_div(last - first, SQUARE);
    for (int64_t c = 0; c < chunks; c++) {
        fetch_keys(slab, first + (c + 1) * SQUARE, ra_min(first + (c + 2) * SQUARE, last));
        pack_rows(f->v + c * SQUARE * width * LIMBS,
                  take_keys(f->rows, slab, &slab->item->v_view, first + c * SQUARE, first, last), width);
        const rows32 keys = take_keys(f->rows, slab, &slab->item->k_view, first + c * SQUARE, first, last);
        pack_rows(f->k + c * SQUARE * width * LIMBS, keys, width);
        pack_along(f->along, keys, width, STEP); /* its transpose, word by word, has the dimensions for rows */
        for (int64_t d = 0; d < width / SQUARE; d++)
            for (int64_t tile = 0; tile < STEP; tile += TILE)
                transpose((float *)(void *)(f->k_turned + (d * chunks + c) * STEP + tile), 16,
                          (const float *)(const void *)(f->along + d * STEP + tile), 16);
    }
}

INLINE gradient_row key_row(const ra_backward_step *step, const ra_slab *slab, bool values, int64_t c) {
    const ra_tensor *result = values ? &slab->item->dv_result : &slab->item->dk_result;
    return (gradient_row){slab->opens, slab->closes, results_streamed(slab->problem, slab->k.row_step * result->row),
                          ra_sums_of_key(step, slab, values, c), result_at(result, ra_slab_key_at(slab, result, c))};
}

static void store_keys(backward_space *f, const ra_backward_step *step, const ra_slab *slab, int64_t first, int64_t last) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    for (int64_t c = 0; c < last - first; c++) {
        const int64_t square = c / SQUARE * SQUARE * width, at = square + c % SQUARE * 16;
        if (!f->summed[c / SQUARE]) {
            if (!slab->opens && !slab->closes) continue;
            memset(f->dk + square, 0, (size_t)(SQUARE * width) * sizeof(float));
            memset(f->dv + square, 0, (size_t)(SQUARE * width) * sizeof(float));
            f->summed[c / SQUARE] = true;
        }
        put_row(key_row(step, slab, false, first + c), f->dk + at, 2 * SUMS, (float)slab->problem->scale, dim);
        put_row(key_row(step, slab, true, first + c), f->dv + at, 2 * SUMS, 1, dim);
    }
    RESULTS_END();
}

static bool keys_finite(const backward_space *f, int64_t chunks, int64_t width) {
    for (int64_t c = 0; c < chunks; c++)
        if (f->summed[c] &&
            !(all_finite(f->dk + c * SQUARE * width, SQUARE * width) && all_finite(f->dv + c * SQUARE * width, SQUARE * width)))
            return false;
    return true;
}

static void backward_tile(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end, int64_t first,
                          int64_t last, void *scratch) {
    dq_kept *kept = scratch;
    const ra_problem *problem = slab->problem;
    backward_space *f = kept->queue.behind;
    const int64_t width = padded(problem->head_dim), keys = most_keys(problem);
    tile_job t = {.f = f,
                  .step = step,
                  .slab = slab,
                  .rows_end = end,
                  .first = first,
                  .last = last,
                  .depth = width / SQUARE,
                  .chunks = ra_ceil_div(last - first, SQUARE),
                  .scale = (float)(problem->scale * LOG2_E),
                  .owed = {.partial = f->partial}};
    uint32_t stored = 0;                               /* blocks whose dQ is in its place */
    bool finite = true, opens = false, closes = false; /* the rows of a block */
    backward_arrays(problem, (char *)f, f);
    memset(f->summed, 0, sizeof f->summed);
    pack_keys_backward(f, slab, first, last);
    load_block(&t, begin);
    TILES_ON();
    for (int64_t row = begin; row < end; row += BLOCK) {
        const int64_t block_end = t.block.end, elements = t.block.groups * SQUARE * width;
        const bool meets = t.block.from < t.block.to;
        f->dq = ra_dq_queue_next(&kept->queue);
        if (step->single || has_all_tiles(kept, slab))
            ra_slab_ends(slab, row, block_end, keys, first / keys, &opens, &closes);
        switch (!meets ? -1 : UNROLL_STEPS ? t.depth : 0) {
        case -1: load_block(&t, block_end); break;
        case 2: walk_block_2(&t); break;
        case 4: walk_block_4(&t); break;
        default: walk_block_any(&t);
        }
        if (!meets && !opens && !closes) continue;
        for (int64_t i = 0; !meets && i < elements; i++) f->dq[i] = step->single ? 0 : -0.0f; /* added, it changes no bit */
        finite &= all_finite(f->dq, elements);
        if (!finite) continue; /* and these rows are not passed before the end */
        add_queries(kept, step, slab, (ra_block){row, block_end, opens, closes}, (row - begin) / BLOCK);
        stored |= 1u << (row - begin) / BLOCK;
    }
    TILES_OFF();
    ra_dq_queue_wait_for_keys(&kept->queue, step, slab);
    if (finite && keys_finite(f, t.chunks, width)) {
        store_keys(f, step, slab, first, last);
        ra_dq_queue_end_tile(&kept->queue, slab->turn);
        return;
    }
    ra_dq_queue_settle(&kept->queue, step);
    give_sums(kept, step, slab, begin, end);
    if (slab->opens) ra_open_keys(step, slab, first, last);
    for (int64_t row = begin; row < end; row += BLOCK) {
        const int64_t block_end = ra_min(row + BLOCK, end);
        const bool done = stored >> (row - begin) / BLOCK & 1;
        float nowhere[2 * MAX_DIM] = {0}; /* sums, or halves of them */
        ra_backward_step other = *step;
        if (done) other.dq_acc = (ra_tensor){.data = nowhere}, other.dq = (ra_tensor){.data = nowhere + MAX_DIM};
        opens = closes = false;
        if (step->single) ra_slab_ends(slab, row, block_end, keys, first / keys, &opens, &closes);
        if (opens && !done) ra_open_rows(step, slab, row, block_end);
        ra_scalar_backward_tile(&other, slab, row, block_end, first, last, f);
        if (!closes || done) continue;
        ra_turn_wait(slab->turn, block_end);
        ra_close_rows(step, slab, row, block_end);
    }
    if (slab->closes) ra_close_keys(step, slab, first, last);
}

int64_t FAMILY(backward_scratch)(const ra_problem *problem, int workers) {
    if (left_to_avx512(problem)) return ra_avx512_backward_scratch(problem, workers);
    backward_space space;
    dq_kept kept;
    const int64_t arrays = ra_max(backward_arrays(problem, NULL, &space), ra_scalar_backward_scratch(problem, 1));
    return workers * (dq_arrays(problem, workers, NULL, &kept) + ra_round_up(arrays, 64));
}

static void backward_rest(const ra_backward_step *step, void *scratch) {
    ra_dq_queue_settle(&((dq_kept *)scratch)->queue, step);
}

ra_status FAMILY(backward)(const ra_backward_step *step) {
    if (left_to_avx512(step->problem)) return ra_avx512_backward(step);
    const int workers = ra_workers_count(step->workers);
    const int64_t scratch = FAMILY(backward_scratch)(step->problem, workers) / workers;
    for (int w = 0; w < workers; w++) {
        char *at = (char *)step->scratch + w * scratch;
        dq_arrays(step->problem, workers, at, (void *)at);
    }
    return ra_cpu_backward(step, &(ra_backward_tiles){.tile = backward_tile,
                                                      .rest = backward_rest,
                                                      .rows = tile_rows(step->problem),
                                                      .keys = most_keys(step->problem),
                                                      .writes = true,
                                                      .scratch = scratch});
}
