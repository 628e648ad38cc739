/* Work items of one target against one piece. Without residues there is one; with residues, the query at place a of its rows
 * meets the keys at places c = a + delta (mod period), and the residues for which both sides have the same number of rows, and
 * do not wrap, are the repeats of one loop. */
#include <stdlib.h>

#include "geometry/route.h"

/* Leaves out the queries that the mask keeps from every key. Both sides move together in every loop, so one look is enough. */
static bool clip_queries(const ra_config *c, ra_item *item) {
    const ra_item_rows *k = &item->k;
    ra_item_rows *q = &item->q;
    int64_t low, high, last = k->pos + (k->count - 1) * k->pos_step;
    ra_mask_queries(c->left, c->right, k->pos, last, q->pos, q->pos_step, q->count, &low, &high);
    if (low >= high) return false;
    q->row += low * q->row_step;
    q->pos += low * q->pos_step;
    q->count = high - low;
    return true;
}

/* Every period-th row from the first-th on. */
static ra_item_rows every(ra_item_rows rows, int64_t first, int64_t period) {
    rows.row += first * rows.row_step;
    rows.pos += first * rows.pos_step;
    rows.row_step *= period;
    rows.pos_step *= period;
    rows.count = rows.count > first ? (rows.count - 1 - first) / period + 1 : 0;
    return rows;
}

static int compare_places(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t split_residues(const ra_config *c, int64_t rate, const ra_item *whole, ra_item *items) {
    int64_t step = whole->q.pos_step; /* that of the keys too: both are rows of the same layout */
    int64_t shared = ra_gcd(step, rate), period = rate / shared;
    int64_t gap = whole->q.pos - whole->k.pos;
    if (ra_mod(gap, shared) != 0) return 0;
    /* x + step*a = y + step*c (mod rate), so c = a + delta (mod period) */
    int64_t delta = 0;
    if (period > 1) {
        __extension__ typedef __int128 int128;
        int64_t inverse = ra_inverse(ra_mod(step / shared, period), period);
        delta = (int64_t)((int128)ra_mod(gap / shared, period) * inverse % period);
    }
    int64_t end = ra_min(period, whole->q.count);
    int64_t marks[] = {0, end, period - delta, whole->q.count % period, ra_mod(whole->k.count % period - delta, period)};
    int64_t mark_count = (int64_t)(sizeof marks / sizeof *marks), count = 0;
    qsort(marks, (size_t)mark_count, sizeof *marks, compare_places);
    for (int64_t i = 0; i + 1 < mark_count; i++) {
        int64_t begin = marks[i], next = ra_min(marks[i + 1], end);
        if (begin >= next) continue;
        ra_item item = *whole;
        item.q = every(whole->q, begin, period);
        item.k = every(whole->k, (begin + delta) % period, period);
        item.loop[1] = (ra_item_loop){.repeat = next - begin,
                                      .q_row = whole->q.row_step,
                                      .q_pos = whole->q.pos_step,
                                      .k_row = whole->k.row_step,
                                      .k_pos = whole->k.pos_step};
        if (item.k.count > 0 && clip_queries(c, &item)) items[count++] = item;
    }
    return count;
}

int64_t ra_items(const ra_route *route, const ra_piece *piece, const ra_part *target, bool packed, ra_item *items) {
    const ra_config *c = route->config;
    const ra_ring *ring = &route->rings.rings[piece->ring];
    const ra_part *source = &ring->sources[piece->source];
    const ra_class *class = &route->rings.classes[ring->class_index];
    int64_t moved = piece->first_repeat * ring->shift;
    ra_item item = {.branch = class->branch, .heads = class->heads, .origin = ring->origin + moved, .rate = class->rate};
    item.q = target->rows;
    item.q.row += piece->first_repeat * target->row_shift;
    item.q.pos += moved;
    item.k = source->rows;
    item.k.pos += moved + piece->first_row * item.k.pos_step;
    item.k.row += piece->first_repeat * source->row_shift + piece->first_row * item.k.row_step;
    item.k.count = piece->rows;
    if (packed) item.k.row = 0, item.k.row_step = 1;
    item.loop[0] = (ra_item_loop){.repeat = piece->repeats,
                                  .q_row = target->row_shift,
                                  .q_pos = ring->shift,
                                  .k_row = packed ? piece->rows : source->row_shift,
                                  .k_pos = ring->shift,
                                  .origin = ring->shift};
    item.loop[1].repeat = 1;
    if (class->residue) return split_residues(c, class->rate, &item, items);
    items[0] = item;
    return clip_queries(c, &items[0]) ? 1 : 0;
}

int64_t ra_most_keys(const ra_route *route, int rank) {
    int64_t most = 0;
    const ra_ring_list own = ra_rings_of(&route->rings, rank);
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        const ra_class *class = &route->rings.classes[ring->class_index];
        if (ra_first_target(ring, rank) < 0) continue;
        for (int64_t s = 0; s < ring->source_count; s++) {
            const ra_item_rows *rows = &ring->sources[s].rows;
            int64_t period = class->residue ? class->rate / ra_gcd(rows->pos_step, class->rate) : 1;
            const int64_t count = ring->channel < 0 ? rows->count : ra_min(rows->count, ring->cap); /* of a piece */
            most = ra_max(most, ra_ceil_div(count, period));
        }
    }
    return most;
}
