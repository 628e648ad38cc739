#include "ring/used.h"

#define SETS_MOST 32 /* each is a run of all workers */

/* The sets of one part: `repeats` of them, one for each segment, or a single one where segments follow on each other; and in
 * each `places`, one for each query head of a group, or a single one where all heads are neighbours. */
typedef struct sets {
    const ra_part *part;
    ra_span heads;
    int64_t repeats, joined, group, places;
} sets;

static sets sets_of(const ra_route *route, const ra_ring *ring, const ra_part *part, bool queries) {
    const ra_config *c = route->config;
    sets s = {
        .part = part, .heads = route->rings.classes[ring->class_index].heads, .group = queries ? c->heads / c->kv_heads : 1};
    bool follow_on = part->row_shift == part->rows.count * part->rows.row_step;
    s.repeats = follow_on ? 1 : ring->repeat;
    s.joined = follow_on ? ring->repeat : 1;
    s.places = s.heads.step == 1 ? 1 : s.group;
    return s;
}

static ra_used used_of(const sets *s, int64_t repeat, int64_t place) {
    const ra_item_rows *rows = &s->part->rows;
    return (ra_used){.rows = {rows->row + repeat * s->part->row_shift, rows->row_step, rows->count * s->joined},
                     .heads = s->heads.step == 1
                                  ? (ra_span){s->heads.start * s->group, 1, s->heads.count * s->group}
                                  : (ra_span){s->heads.start * s->group + place, s->heads.step * s->group, s->heads.count}};
}

/* The rank's parts of a ring, one by one: the next from *index on, or NULL. */
static const ra_part *next_part(const ra_ring *ring, int rank, bool queries, int64_t *index) {
    const ra_part *parts = queries ? ring->targets : ring->sources;
    for (int64_t count = queries ? ring->target_count : ring->source_count; *index < count;)
        if (parts[(*index)++].rank == rank) return &parts[*index - 1];
    return NULL;
}

void ra_each_used(const ra_route *route, int rank, bool queries, void (*visit)(void *arg, const ra_used *used), void *arg) {
    for (int64_t i = 0; i < route->rings.count; i++) {
        int64_t index = 0;
        for (const ra_part *part; (part = next_part(&route->rings.rings[i], rank, queries, &index));) {
            sets s = sets_of(route, &route->rings.rings[i], part, queries);
            for (int64_t n = 0; n < s.repeats * s.places; n++) {
                ra_used used = used_of(&s, n / s.places, n % s.places);
                visit(arg, &used);
            }
        }
    }
}

/* The rows left out still get their zeros, for about a fifth of what the others cost. */
bool ra_used_sparsely(const ra_route *route, int rank, bool queries, int64_t rows) {
    int64_t all = rows * (queries ? route->config->heads : route->config->kv_heads), count = 0, used = 0;
    for (int64_t i = 0; i < route->rings.count; i++) {
        int64_t index = 0;
        for (const ra_part *part; (part = next_part(&route->rings.rings[i], rank, queries, &index));) {
            sets s = sets_of(route, &route->rings.rings[i], part, queries);
            count += s.repeats * s.places;
            used += part->rows.count * s.joined * s.repeats * s.heads.count * s.group;
            if (count > SETS_MOST || used > all / 4 * 3) return false;
        }
    }
    return true;
}

ra_tensor ra_used_view(const ra_used *used, ra_tensor tensor, int64_t size) {
    int64_t first = used->rows.start * tensor.row + used->heads.start * tensor.head;
    return (ra_tensor){.data = tensor.data ? (char *)tensor.data + first * size : NULL,
                       .batch = tensor.batch,
                       .row = tensor.row * used->rows.step,
                       .head = tensor.head * used->heads.step};
}
