/* How the gradients of a backward tile get to memory.
 *
 * Needs   what amx.inc.h needs.
 * Gives   BLOCK and tile_rows(), the sizes of a backward tile; put_row() for rows of dK and dV; and for dQ dq_kept, which
 *         dq_arrays() lays out, with add_queries() for each block of rows and give_sums() when a tile is given up.
 *
 * A worker that has all tiles of some rows to itself keeps the sums of dQ as AMX tiles: it begins with none, in a ring with
 * those of earlier steps, and turns them into rows once, with the last of the item's keys. Where several workers add to the
 * same rows they take turns (dq_queue.h). The sums are the same bits either way.
 */
#include "device/cpu/amx/amx.inc.h"
#include "device/cpu/dq_queue.h"

#ifndef BLOCK /* a test sets smaller ones, and COLUMNS */
enum {
    BLOCK = LIMBS < 3 ? 256 : 128, /* rows at a time */
    ROWS = 4096, /* of a tile at most: one packing of its keys serves them all, and their dK and dV are summed where they are */
};
#endif

/* Rows of a tile. Tiles that take longer have half of them, so that workers of unequal cores come to an end together. */
INLINE int64_t tile_rows(const ra_problem *problem) { return LIMBS == 1 && padded(problem->head_dim) > 64 ? ROWS : ROWS / 2; }

/* ------------------------------------------------------------------------------------------------------------ rows */

/* Where a row of a gradient goes: it is added to its sum, or begins it (opens); with the last (closes), the sum goes to the
 * result. */
typedef struct gradient_row {
    bool opens, closes, streamed;
    ra_sums sum;
    element *result;
} gradient_row;

/* A step that closes no rows may have no results. */
INLINE element *result_at(const ra_tensor *result, int64_t at) { return result->data ? (element *)result->data + at : NULL; }

/* sum + x * factor, rounded once whatever the compiler prefers: rows and tiles must give the same bits. */
INLINE vec plus_sum(vec x, float factor, bool opens, const float *sum) {
    return opens ? x * splat(factor) : VEC_FMA(x, splat(factor), load(sum));
}

/* 16 columns of the row lie at `from`, the next 16 `step` further on. */
INLINE void put_row(gradient_row to, const float *from, int64_t step, float factor, int64_t dim) {
    float joined[MAX_DIM], *sum = to.sum.whole ? to.sum.whole : joined;
    const bool streamed = to.streamed && (to.opens || to.sum.whole); /* lines that held halves are in the caches */
    if (!to.sum.whole && !to.opens) ra_sums_load(joined, to.sum, dim);
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32, from += 2 * step) {
        const vec low = plus_sum(load(from), factor, to.opens, sum + d),
                  high = plus_sum(load(from + step), factor, to.opens, sum + d + 16);
        if (to.closes) {
            put_result(to.result + d, low, high, streamed);
        } else {
            store(sum + d, low);
            store(sum + d + 16, high);
        }
    }
    for (int64_t i = 0; d < dim; i++, d++) {
        const float x = from[i / 16 * step + i % 16], y = to.opens ? x * factor : fmaf(x, factor, sum[d]);
        if (to.closes) to.result[d] = element_of(y);
        else sum[d] = y;
    }
    if (!to.sum.whole && !to.closes) ra_sums_store(to.sum, joined, dim);
}

/* dq: C's tiles of dQ^T, [rows/32][32 dimensions]. */
static void store_queries(const float *dq, float factor, const ra_backward_step *step, const ra_slab *slab, ra_block r) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim), rows = r.end - r.begin;
    const bool streamed = results_streamed(slab->problem, slab->q.row_step * step->dq.row);
    for (int64_t i = 0; i < rows; i += SQUARE) {
        float turned[MAX_DIM / 16][2][SUMS]; /* [16 dimensions][half] of [column][dimension] */
        for (int64_t d = 0; d < width / 16; d++)
            for (int64_t half = 0; half < 2; half++)
                transpose(turned[d][half], 16, dq + i * width + d / 2 * 4 * SUMS + (half * 2 + d % 2) * SUMS, 16);
        for (int64_t c = 0; c < SQUARE; c++) {
            const int64_t row = r.begin + i + c;
            if (row < r.end)
                put_row((gradient_row){r.opens, r.closes, streamed, ra_sums_of_query(step, slab, row),
                                       result_at(&step->dq, ra_slab_at(slab, &step->dq, row))},
                        turned[0][c / 16] + c % 16 * 16, 2 * SUMS, factor, dim);
        }
    }
    RESULTS_END();
}

/* The other way: C's tiles from the sums of rows. Rows beyond the end are zeros. */
static void load_sums(float *dq, const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    for (int64_t i = 0; i < end - begin; i += SQUARE) {
        float turned[MAX_DIM / 16][2][SUMS]; /* as in store_queries */
        const int64_t rows = ra_min(SQUARE, end - begin - i);
        if (rows < SQUARE) memset(turned, 0, sizeof turned);
        for (int64_t c = 0; c < rows; c++) {
            float row[MAX_DIM] = {0};
            ra_sums_load(row, ra_sums_of_query(step, slab, begin + i + c), dim);
            for (int64_t d = 0; d < width / 16; d++) store(turned[d][c / 16] + c % 16 * 16, load(row + d * 16));
        }
        for (int64_t d = 0; d < width / 16; d++)
            for (int64_t half = 0; half < 2; half++)
                transpose(dq + i * width + d / 2 * 4 * SUMS + (half * 2 + d % 2) * SUMS, 16, turned[d][half], 16);
    }
}

/* ----------------------------------------------------------------------------------------------------------- rooms */

static void add_scaled(const ra_backward_step *step, const ra_slab *slab, ra_block block, const float *dq) {
    store_queries(dq, (float)step->problem->scale, step, slab, block);
}

/* One room for each block of a tile, and one more. A worker alone has no queue, and keeps its rows' sums in the others. */
typedef struct dq_kept {
    ra_dq_queue queue;
    bool alone;    /* there is one worker */
    uint32_t sums; /* a bit for each block of the rows that are worked on: its sum is in a room */
} dq_kept;

/* Sets the queue up at `base`, with its rooms behind it; with base NULL only returns the size of all. */
static int64_t dq_arrays(const ra_problem *problem, int workers, char *base, dq_kept *kept) {
    *kept = (dq_kept){.queue = {.add = add_scaled,
                                  .rooms = ra_cpu_tile_rows(problem, BLOCK, tile_rows(problem)) / BLOCK + 1,
                                  .size = ra_cpu_tile_rows(problem, SQUARE, BLOCK) * padded(problem->head_dim)},
                        .alone = workers == 1};
    return ra_dq_queue_carve(&kept->queue, base, sizeof *kept);
}

/* ----------------------------------------------------------------------------------------------------------- alone */

/* The sum of a block of a worker alone. */
INLINE float *sum_at(const dq_kept *q, int64_t block) { return ra_dq_queue_at(&q->queue, 1 + block); }

/* Does a worker have all tiles of the slab's rows? */
INLINE bool has_all_tiles(const dq_kept *q, const ra_slab *slab) { return q->alone || !slab->turn; }

static void add_alone(dq_kept *q, const ra_backward_step *step, const ra_slab *slab, ra_block rows, int64_t block) {
    const int64_t elements = padded(rows.end - rows.begin) * padded(slab->problem->head_dim);
    const uint32_t bit = UINT32_C(1) << block;
    const float scale = (float)slab->problem->scale, *dq = ra_dq_queue_next(&q->queue);
    const bool begins = rows.opens && !rows.closes;
    float *sum = sum_at(q, block);
    if (begins) q->sums |= bit;
    if (!(q->sums & bit)) {
        rows.opens = rows.opens && step->single;
        rows.closes = rows.closes && step->single;
        store_queries(dq, scale, step, slab, rows);
        return;
    }
    if (begins && !step->single) load_sums(sum, step, slab, rows.begin, rows.end);
    for (int64_t i = 0; i < elements; i += 16)
        store(sum + i, plus_sum(load(dq + i), scale, rows.opens && step->single, sum + i));
    if (!rows.closes) return;
    store_queries(sum, 1, step, slab, (ra_block){rows.begin, rows.end, .opens = true, .closes = step->single});
    q->sums &= ~bit;
}

/* Writes the sums to memory, where others can add to them. `begin`: the first row. */
static void give_sums(dq_kept *q, const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end) {
    for (int64_t block = 0; begin < end; begin += BLOCK, block++)
        if (q->sums >> block & 1)
            store_queries(sum_at(q, block), 1, step, slab,
                          (ra_block){begin, ra_min(begin + BLOCK, end), .opens = true, .closes = false});
    q->sums = 0;
}

/* Block `block` of a tile is computed. */
static void add_queries(dq_kept *q, const ra_backward_step *step, const ra_slab *slab, ra_block rows, int64_t block) {
    if (has_all_tiles(q, slab)) add_alone(q, step, slab, rows, block);
    else ra_dq_queue_add(&q->queue, step, slab, rows);
}
