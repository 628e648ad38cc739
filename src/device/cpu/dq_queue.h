/* Blocks of dq on their way to the sums.
 *
 * Tiles add to dq in order (ra_turn). A worker whose turn has not come does not wait for a slower one: it keeps dq of the
 * block, goes on, into the next tiles too, and adds what it kept when its turn has come. Either way the sums are the same.
 *
 * Rooms for dq of a block lie in a circle. From `first` on come those of the queue, which wait for their turn, first come,
 * first served. The next block is computed in the room behind them.
 *
 * Before a worker waits for anything else it empties its queue. So the first tile that is not done is always being computed, or
 * at the head of the queue of a worker that will add it: nobody waits for ever.
 */
#ifndef RA_DEVICE_CPU_DQ_QUEUE_H
#define RA_DEVICE_CPU_DQ_QUEUE_H

#include "device/cpu/step.h"

/* A block of rows of a slab; is this tile the first that adds to their dq (opens), the last (closes)? */
typedef struct ra_block {
    int64_t begin, end;
    bool opens, closes;
} ra_block;

typedef struct ra_kept {
    ra_slab slab;
    ra_block block;
    bool last; /* of its tile, which is done when this is added */
} ra_kept;

typedef struct ra_dq_queue {
    void (*add)(const ra_backward_step *step, const ra_slab *slab, ra_block block, const float *dq);
    int64_t first, count; /* the queue */
    int64_t rooms;
    int64_t size;  /* of a room, in elements */
    ra_kept *kept; /* by room, like dq */
    float *dq;
    void *behind; /* the rest of a worker's scratch, which begins with its rooms */
} ra_dq_queue;

/* Lays the rooms out behind the first `head` bytes at base, in which a family keeps the queue and more. Returns the offset of
 * their end; with base NULL it does nothing else. */
static inline int64_t ra_dq_queue_carve(ra_dq_queue *r, char *base, int64_t head) {
    char *at = base;
    ra_carve(&at, head);
    r->kept = ra_carve(&at, r->rooms * (int64_t)sizeof *r->kept);
    r->dq = ra_carve(&at, r->rooms * r->size * (int64_t)sizeof *r->dq);
    r->behind = at;
    return at - base;
}

static inline float *ra_dq_queue_at(const ra_dq_queue *r, int64_t i) { return r->dq + (r->first + i) % r->rooms * r->size; }

/* Where dq of the next block is to be computed. */
static inline float *ra_dq_queue_next(const ra_dq_queue *r) { return ra_dq_queue_at(r, r->count); }

static inline ra_kept *ra_kept_at(const ra_dq_queue *r, int64_t i) { return &r->kept[(r->first + i) % r->rooms]; }

/* Adds the first of the queue, whose turn has come. */
static inline void ra_dq_queue_add_first(ra_dq_queue *r, const ra_backward_step *step) {
    const ra_kept *k = ra_kept_at(r, 0);
    r->add(step, &k->slab, k->block, ra_dq_queue_at(r, 0));
    ra_turn_pass(k->slab.turn, k->last ? INT64_MAX : k->block.end);
    r->first = (r->first + 1) % r->rooms;
    r->count--;
}

static inline void ra_dq_queue_wait_and_add_first(ra_dq_queue *r, const ra_backward_step *step) {
    ra_turn_wait(ra_kept_at(r, 0)->slab.turn, ra_kept_at(r, 0)->block.end);
    ra_dq_queue_add_first(r, step);
}

/* Adds all that is kept. */
static inline void ra_dq_queue_settle(ra_dq_queue *r, const ra_backward_step *step) {
    while (r->count > 0) ra_dq_queue_wait_and_add_first(r, step);
}

/* The next block is computed: it is added, or kept. */
static inline void ra_dq_queue_add(ra_dq_queue *r, const ra_backward_step *step, const ra_slab *slab, ra_block block) {
    while (r->count > 0 && ra_turn_has_come(ra_kept_at(r, 0)->slab.turn, ra_kept_at(r, 0)->block.end))
        ra_dq_queue_add_first(r, step);
    if (r->count == 0 && (!slab->turn || ra_turn_comes_soon(slab->turn, block.end))) {
        r->add(step, slab, block, ra_dq_queue_next(r));
        ra_turn_pass(slab->turn, block.end);
        return;
    }
    *ra_kept_at(r, r->count++) = (ra_kept){.slab = *slab, .block = block};
    if (r->count == r->rooms) ra_dq_queue_wait_and_add_first(r, step);
}

/* Waits until the tile may add to dk and dv. */
static inline void ra_dq_queue_wait_for_keys(ra_dq_queue *r, const ra_backward_step *step, const ra_slab *slab) {
    if (ra_keys_come(slab)) return;
    ra_dq_queue_settle(r, step);
    ra_keys_wait(slab);
}

/* The tile is done, but for what is left of it in the queue. */
static inline void ra_dq_queue_end_tile(ra_dq_queue *r, ra_turn *turn) {
    if (r->count > 0 && ra_kept_at(r, r->count - 1)->slab.turn == turn) turn->kept = ra_kept_at(r, r->count - 1)->last = true;
}

#endif
