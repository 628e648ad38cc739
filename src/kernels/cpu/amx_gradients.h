/* Gradients of a backward tile on their way to memory.
 *
 * Tiles add to dq in order (ra_turn). A worker whose turn has not come does not wait for a slower one: it keeps dq of the block,
 * goes on, into the next tiles too, and adds what it kept when its turn has come. The order of the sums stays.
 */
#include "kernels/cpu/amx.h"

enum {
    BLOCK = PIECES < 3 ? 256 : 128, /* rows at a time */
    ROWS = 4096, /* of a tile: one packing of its keys serves them all, and dK and dV of them are summed where they are */
};

/* ------------------------------------------------------------------------------------------------------------ rows */

/* Where a row of a gradient goes: to its sum, unless that opens here and holds nothing yet; or, if it closes, with its sum to
 * the result. */
typedef struct gradient_row {
    bool opens, closes, streamed;
    float *sum;
    element *result;
} gradient_row;

/* 16 columns of the row lie at `from`, the next 16 `step` further on. */
INLINE void put_row(gradient_row to, const float *from, int64_t step, float factor, int64_t dim) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32, from += 2 * step) {
        vec low = load(from) * splat(factor), high = load(from + step) * splat(factor);
        if (!to.opens) {
            low += load(to.sum + d);
            high += load(to.sum + d + 16);
        }
        if (to.closes) {
            put_result(to.result + d, low, high, to.streamed);
        } else {
            store(to.sum + d, low);
            store(to.sum + d + 16, high);
        }
    }
    for (int64_t i = 0; d < dim; i++, d++) {
        const float x = from[i / 16 * step + i % 16] * factor + (to.opens ? 0 : to.sum[d]);
        if (to.closes) to.result[d] = element_of(x);
        else to.sum[d] = x;
    }
}

/* dq of some rows of a place: does its tile open their sums, does it close them? */
typedef struct query_rows {
    int64_t begin, end;
    bool opens, closes;
} query_rows;

/* dq: C's tiles of dQ^T, [rows/32][32 dimensions]. */
static void store_queries(const float *dq, const ra_backward_step *step, const ra_place *place, query_rows r) {
    const int64_t dim = place->problem->head_dim, width = padded(dim), rows = r.end - r.begin;
    const bool streamed = results_streamed(place->problem, place->q.row_step * step->dq.row);
    for (int64_t i = 0; i < rows; i += SQUARE) {
        float turned[MAX_DIM / 16][2][SUMS]; /* [16 dimensions][half] of [column][dimension] */
        for (int64_t d = 0; d < width / 16; d++)
            for (int64_t half = 0; half < 2; half++)
                transpose(turned[d][half], 16, dq + i * width + d / 2 * 4 * SUMS + (half * 2 + d % 2) * SUMS, 16);
        for (int64_t c = 0; c < SQUARE; c++) {
            const int64_t row = r.begin + i + c;
            if (row < r.end)
                put_row((gradient_row){r.opens, r.closes, streamed,
                                       (float *)step->dq_acc.data + ra_place_at(place, &step->dq_acc, row),
                                       (element *)step->dq.data + ra_place_at(place, &step->dq, row)},
                        turned[0][c / 16] + c % 16 * 16, 2 * SUMS, (float)place->problem->scale, dim);
        }
    }
    RESULTS_END();
}

/* ----------------------------------------------------------------------------------------------------------- turns */

/* dq of blocks of rows, first come, first served. Those in the queue wait for their turn; the next one is computed in the room
 * behind them. Before a worker waits for anything else it settles its queue, so that the first tile that is not done is always
 * being computed, or first in its worker's queue and looked after: nobody waits for ever. */
typedef struct dq_queue {
    int64_t first, count;
    int64_t rooms; /* 1: nothing is kept for long */
    int64_t size;  /* of a room, in elements */
    struct kept {
        ra_place place;
        query_rows rows;
        bool last; /* of its tile, which is done otherwise */
    } kept[ROWS / BLOCK];
    _Alignas(64) float dq[]; /* rooms */
} dq_queue;

static int64_t queue_bytes(const dq_queue *q) {
    return (int64_t)sizeof *q + ra_round_up(q->rooms * q->size * (int64_t)sizeof(float), 64);
}

/* An empty queue, with room for all blocks of a tile if several workers take turns. */
static dq_queue queue_of(const ra_problem *problem, int workers) {
    return (dq_queue){.rooms = workers > 1 ? ra_cpu_tile_rows(problem, BLOCK, ROWS) / BLOCK : 1,
                      .size = ra_cpu_tile_rows(problem, SQUARE, BLOCK) * padded(problem->head_dim)};
}

/* Where dq of the next block is to be computed. */
INLINE float *queue_room(dq_queue *q) { return q->dq + (q->first + q->count) % q->rooms * q->size; }

/* Adds the first of the queue, whose turn has come. */
static void add_first(dq_queue *q, const ra_backward_step *step) {
    const struct kept *k = &q->kept[q->first];
    store_queries(q->dq + q->first * q->size, step, &k->place, k->rows);
    ra_turn_pass(k->place.turn, k->last ? INT64_MAX : k->rows.end);
    q->first = (q->first + 1) % q->rooms;
    q->count--;
}

/* Adds all that is kept. */
static void queue_settle(dq_queue *q, const ra_backward_step *step) {
    for (; q->count > 0; add_first(q, step)) ra_turn_wait(q->kept[q->first].place.turn, q->kept[q->first].rows.end);
}

/* The block in the room behind the queue is computed. */
static void queue_add(dq_queue *q, const ra_backward_step *step, const ra_place *place, query_rows rows) {
    while (q->count > 0 && ra_turn_has_come(q->kept[q->first].place.turn, q->kept[q->first].rows.end)) add_first(q, step);
    if (q->count == 0 && ra_turn_comes_soon(place->turn, rows.end)) {
        store_queries(queue_room(q), step, place, rows);
        ra_turn_pass(place->turn, rows.end);
        return;
    }
    q->kept[(q->first + q->count++) % q->rooms] = (struct kept){.place = *place, .rows = rows};
    if (q->count < q->rooms) return;
    ra_turn_wait(q->kept[q->first].place.turn, q->kept[q->first].rows.end);
    add_first(q, step);
}

/* The tile is done, but for what is left of it in the queue. */
static void queue_end_tile(dq_queue *q, ra_turn *turn) {
    if (q->count == 0) return;
    struct kept *newest = &q->kept[(q->first + q->count - 1) % q->rooms];
    if (newest->place.turn == turn) turn->kept = newest->last = true;
}
