/* Blocks of dq on their way to the sums.
 *
 * Tiles add to dq in order (ra_turn). A worker whose turn has not come does not wait for a slower one: it keeps dq of the
 * block, goes on, into the next tiles too, and adds what it kept when its turn has come. Either way the sums are the same.
 *
 * Rooms for dq of a block lie in a circle. From `first` on come those of the queue, which wait for their turn, first come,
 * first served. The next block is computed in the room behind them.
 *
 * Before a worker waits for anything else it settles its queue, so that the first tile that is not done is always being
 * computed, or first in the queue of a worker that looks after it: nobody waits for ever.
 */
#ifndef RA_KERNELS_CPU_ROOMS_H
#define RA_KERNELS_CPU_ROOMS_H

#include "device/cpu/step.h"

/* A block of rows of a place: does this tile open their sums of dq, does it close them? */
typedef struct ra_block {
    int64_t begin, end;
    bool opens, closes;
} ra_block;

typedef struct ra_kept {
    ra_place place;
    ra_block block;
    bool last; /* of its tile, which is done otherwise */
} ra_kept;

typedef struct ra_rooms {
    void (*add)(const ra_backward_step *step, const ra_place *place, ra_block block, const float *dq);
    int64_t first, count; /* the queue */
    int64_t rooms;
    int64_t size;  /* of a room, in elements */
    ra_kept *kept; /* by room, like dq */
    float *dq;
    void *behind; /* the rest of a worker's scratch, which begins with its rooms */
} ra_rooms;

/* Lays the rooms out behind the first `head` bytes at base, which are for them and what else a family keeps there. Tells where
 * they end, counted from base; with base NULL that is all. */
static inline int64_t ra_rooms_carve(ra_rooms *r, char *base, int64_t head) {
    char *at = base;
    ra_carve(&at, head);
    r->kept = ra_carve(&at, r->rooms * (int64_t)sizeof *r->kept);
    r->dq = ra_carve(&at, r->rooms * r->size * (int64_t)sizeof *r->dq);
    r->behind = at;
    return at - base;
}

static inline float *ra_room_at(const ra_rooms *r, int64_t i) { return r->dq + (r->first + i) % r->rooms * r->size; }

/* Where dq of the next block is to be computed. */
static inline float *ra_next_room(const ra_rooms *r) { return ra_room_at(r, r->count); }

static inline ra_kept *ra_kept_at(const ra_rooms *r, int64_t i) { return &r->kept[(r->first + i) % r->rooms]; }

/* Adds the first of the queue, whose turn has come. */
static inline void ra_rooms_add_first(ra_rooms *r, const ra_backward_step *step) {
    const ra_kept *k = ra_kept_at(r, 0);
    r->add(step, &k->place, k->block, ra_room_at(r, 0));
    ra_turn_pass(k->place.turn, k->last ? INT64_MAX : k->block.end);
    r->first = (r->first + 1) % r->rooms;
    r->count--;
}

static inline void ra_rooms_wait_and_add_first(ra_rooms *r, const ra_backward_step *step) {
    ra_turn_wait(ra_kept_at(r, 0)->place.turn, ra_kept_at(r, 0)->block.end);
    ra_rooms_add_first(r, step);
}

/* Adds all that is kept. */
static inline void ra_rooms_settle(ra_rooms *r, const ra_backward_step *step) {
    while (r->count > 0) ra_rooms_wait_and_add_first(r, step);
}

/* The next block is computed: it is added, or kept. */
static inline void ra_rooms_add(ra_rooms *r, const ra_backward_step *step, const ra_place *place, ra_block block) {
    while (r->count > 0 && ra_turn_has_come(ra_kept_at(r, 0)->place.turn, ra_kept_at(r, 0)->block.end))
        ra_rooms_add_first(r, step);
    if (r->count == 0 && (!place->turn || ra_turn_comes_soon(place->turn, block.end))) {
        r->add(step, place, block, ra_next_room(r));
        ra_turn_pass(place->turn, block.end);
        return;
    }
    *ra_kept_at(r, r->count++) = (ra_kept){.place = *place, .block = block};
    if (r->count == r->rooms) ra_rooms_wait_and_add_first(r, step);
}

/* Waits until the tile may add to dk and dv. */
static inline void ra_rooms_wait_for_keys(ra_rooms *r, const ra_backward_step *step, const ra_place *place) {
    if (ra_keys_come(place)) return;
    ra_rooms_settle(r, step);
    ra_keys_wait(place);
}

/* The tile is done, but for what is left of it in the queue. */
static inline void ra_rooms_end_tile(ra_rooms *r, ra_turn *turn) {
    if (r->count > 0 && ra_kept_at(r, r->count - 1)->place.turn == turn) turn->kept = ra_kept_at(r, r->count - 1)->last = true;
}

#endif
