/* How the CPU computes a step: cut into tiles, which are handed to the workers.
 *
 * A slab is one iteration of an item's loops for one batch entry and KV head: a progression of query rows against one of keys.
 * The query heads of a group share their keys, so a slab counts query rows and heads together: row r of a slab is query a = r
 * / group of the item, head u = r % group. Tiles are intervals of such rows, and in backward intervals of keys as well. All of
 * it is arithmetic on a tile's number; nothing is listed.
 */
#ifndef RA_DEVICE_CPU_STEP_H
#define RA_DEVICE_CPU_STEP_H

#include <stdatomic.h>

#include "device/kernel.h"

typedef struct ra_slab {
    const ra_problem *problem;
    const ra_item *item;
    ra_item_rows q, k; /* the item's, with the loops applied */
    int64_t origin;    /* likewise */
    int64_t batch;     /* entry */
    int64_t kv_index;  /* head index of the item's views */
    int64_t head;      /* first query head of the group */
    int64_t group;     /* query heads of a KV head */
    int64_t number;    /* of a forward tile: among the slabs of the step */
    /* Of a backward tile. */
    struct ra_turn *turn;        /* NULL: nobody else adds to the same rows */
    const struct ra_turn *above; /* of the tile that adds to the same keys before this one; NULL: none does */
    bool opens, closes;          /* in a single step: no tile before this one adds to its keys; none after it does */
} ra_slab;

/* The order of the sums of dq. A tile goes through its rows in order: it waits before it adds to them, and passes them on. */
typedef struct ra_turn {
    _Atomic int64_t passed;       /* rows before this one have been added to; INT64_MAX: the tile is done */
    const struct ra_turn *before; /* of the tile whose turn comes first; NULL: there is none */
    bool kept;                    /* the tile has returned, and passes its last rows later (ra_backward_tiles) */
} ra_turn;

static inline bool ra_turn_has_come(const ra_turn *turn, int64_t rows) {
    return !turn || !turn->before || atomic_load_explicit(&turn->before->passed, memory_order_acquire) >= rows;
}

/* Has it come, or will it in some microseconds? */
bool ra_turn_comes_soon(const ra_turn *turn, int64_t rows);
void ra_turn_wait(const ra_turn *turn, int64_t rows);

/* May the tile add to dk and dv of its keys? */
static inline bool ra_keys_come(const ra_slab *slab) {
    return ra_turn_has_come(&(ra_turn){.before = slab->above}, INT64_MAX);
}
static inline void ra_keys_wait(const ra_slab *slab) { ra_turn_wait(&(ra_turn){.before = slab->above}, INT64_MAX); }

/* Never moves back, even where a tile goes through some rows again. */
static inline void ra_turn_pass(ra_turn *turn, int64_t rows) {
    if (turn && rows > atomic_load_explicit(&turn->passed, memory_order_relaxed))
        atomic_store_explicit(&turn->passed, rows, memory_order_release);
}

/* Arrays of a worker's scratch one after the other, each on a 64-byte boundary. With *at NULL only counts: *at ends at the
 * size. */
static inline void *ra_carve(char **at, int64_t bytes) {
    char *here = *at;
    *at = (char *)((uintptr_t)*at + (uintptr_t)ra_round_up(bytes, 64));
    return here;
}

/* Computes rows [begin, end) of a slab. scratch is the worker's own, 64-byte aligned. */
typedef void ra_forward_tile(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end, void *scratch);
/* Adds what rows [begin, end) and keys [key_begin, key_end) of a slab give each other to dq_acc in its turn, and to dk_view
 * and dv_view in the turn of the keys. */
typedef void ra_backward_tile(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end,
                              int64_t key_begin, int64_t key_end, void *scratch);

/* Tile functions, with the sizes of their tiles and the bytes of a worker. */
typedef struct ra_forward_tiles {
    ra_forward_tile *tile;
    int64_t rows, unit; /* a tile has a multiple of `unit`, at most `rows`; results must not depend on how many */
    int64_t scratch;
    bool light; /* a small tile costs no more per row than a large one */
} ra_forward_tiles;

typedef struct ra_backward_tiles {
    ra_backward_tile *tile;
    /* Adds the rows of dq that tiles kept in their worker's scratch because their turn had not come (ra_turn.kept). Called
     * before the worker waits for anything else, or leaves. NULL: tiles keep nothing. */
    void (*rest)(const ra_backward_step *step, void *scratch);
    int64_t rows, keys; /* of a tile, at most */
    int64_t scratch;
    bool writes; /* tiles write the results of a single step themselves; else they only ever add */
} ra_backward_tiles;

ra_status ra_cpu_forward(const ra_forward_step *step, const ra_forward_tiles *tiles);
ra_status ra_cpu_backward(const ra_backward_step *step, const ra_backward_tiles *tiles);

/* For tiles that only add, in a single step: called before the first tile that adds to these rows (or keys), and after the
 * last. */
void ra_open_rows(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end);
void ra_close_rows(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end);
void ra_open_keys(const ra_backward_step *step, const ra_slab *slab, int64_t first, int64_t last);
void ra_close_keys(const ra_backward_step *step, const ra_slab *slab, int64_t first, int64_t last);

/* Rows of the largest forward tile that a problem can have. */
static inline int64_t ra_cpu_tile_rows(const ra_problem *problem, int64_t unit, int64_t most) {
    const int64_t rows = ra_sat_mul(problem->rows_q, problem->heads / problem->kv_heads);
    return rows < most ? ra_max(1, ra_ceil_div(rows, unit)) * unit : most;
}

/* The query of row r of the slab. (Divisions are slow, and most groups have one head.) */
static inline int64_t ra_slab_query(const ra_slab *p, int64_t r) { return p->group == 1 ? r : r / p->group; }
/* The head of row r, its query's row in q and its position. */
static inline int64_t ra_slab_head(const ra_slab *p, int64_t r) { return p->head + (p->group == 1 ? 0 : r % p->group); }
static inline int64_t ra_slab_row(const ra_slab *p, int64_t r) { return p->q.row + ra_slab_query(p, r) * p->q.row_step; }
static inline int64_t ra_slab_pos(const ra_slab *p, int64_t r) { return p->q.pos + ra_slab_query(p, r) * p->q.pos_step; }
static inline int64_t ra_slab_rows(const ra_slab *p) { return p->q.count * p->group; }
/* The offset of row r in a tensor of q's shape (or lse's). */
static inline int64_t ra_slab_at(const ra_slab *p, const ra_tensor *t, int64_t r) {
    return p->batch * t->batch + ra_slab_row(p, r) * t->row + ra_slab_head(p, r) * t->head;
}
/* The offset of key c in one of the item's views. */
static inline int64_t ra_slab_key_at(const ra_slab *p, const ra_tensor *t, int64_t c) {
    return p->batch * t->batch + (p->k.row + c * p->k.row_step) * t->row + p->kv_index * t->head;
}
/* The keys [*begin, *end) of row r. */
static inline void ra_slab_interval(const ra_slab *p, int64_t r, int64_t *begin, int64_t *end) {
    ra_key_interval(p->problem, p->batch, ra_slab_pos(p, r), p->k.pos, p->k.pos_step, p->k.count, begin, end);
}
/* Keys outside [*begin, *end) are met by none of the rows [first, last): intervals move up with the position. */
static inline void ra_slab_hull(const ra_slab *p, int64_t first, int64_t last, int64_t *begin, int64_t *end) {
    int64_t unused;
    ra_slab_interval(p, first, begin, &unused);
    ra_slab_interval(p, last - 1, &unused, end);
    *end = ra_max(*begin, ra_min(*end, p->k.count)); /* an empty interval may lie beyond the keys */
}

/* Of the tiles of `keys` keys that rows [first, last) meet: is tile `j` the first, is it the last? */
static inline void ra_slab_ends(const ra_slab *p, int64_t first, int64_t last, int64_t keys, int64_t j, bool *opens,
                                 bool *closes) {
    int64_t begin, end;
    ra_slab_hull(p, first, last, &begin, &end);
    *opens = begin < end && begin / keys == j;
    *closes = begin < end && (end - 1) / keys == j;
}

/* Do rows [first, last) all meet the same keys, [*begin, *end)? If not, those are met by the first. */
static inline bool ra_slab_alike(const ra_slab *p, int64_t first, int64_t last, int64_t *begin, int64_t *end) {
    int64_t last_begin, last_end;
    ra_slab_interval(p, first, begin, end);
    ra_slab_interval(p, last - 1, &last_begin, &last_end);
    return *begin == last_begin && *end == last_end;
}

#endif
