#include "geometry/used.h"

/* Appends the sets of one part; returns the new count, or -1. Segments without gaps between them are one progression. So are
 * the query heads of neighbouring KV heads; those of other KV heads are one progression for each place in the group. */
static int64_t add_part(const ra_ring *ring, const ra_part *part, ra_span heads, int64_t group, ra_used *sets, int64_t count,
                        int64_t most) {
    const ra_item_rows *rows = &part->rows;
    bool follow_on = part->row_shift == rows->count * rows->row_step, neighbours = heads.step == 1;
    int64_t repeats = follow_on ? 1 : ring->repeat, places = neighbours ? 1 : group;
    if (repeats * places > most - count) return -1;
    for (int64_t repeat = 0; repeat < repeats; repeat++)
        for (int64_t place = 0; place < places; place++) {
            ra_used *set = &sets[count++];
            set->rows =
                (ra_span){rows->row + repeat * part->row_shift, rows->row_step, rows->count * (follow_on ? ring->repeat : 1)};
            set->heads = neighbours ? (ra_span){heads.start * group, 1, heads.count * group}
                                    : (ra_span){heads.start * group + place, heads.step * group, heads.count};
        }
    return count;
}

int64_t ra_used_sets(const ra_route *route, int rank, bool queries, bool shared, ra_used *sets, int64_t most) {
    int64_t group = queries ? route->config->heads / route->config->kv_heads : 1, count = 0;
    const ra_ring_list own = ra_rings_of(&route->rings, rank);
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        const ra_part *parts = queries ? ring->targets : ring->sources;
        if (shared && ring->channel < 0) continue;
        for (int64_t p = 0; p < (queries ? ring->target_count : ring->source_count); p++) {
            if (parts[p].rank != rank) continue;
            count = add_part(ring, &parts[p], route->rings.classes[ring->class_index].heads, group, sets, count, most);
            if (count < 0) return -1;
        }
    }
    return count;
}

int64_t ra_used_modulus(const ra_used *sets, int64_t count) {
    int64_t modulus = 0;
    for (int64_t i = 0; i < count; i++) {
        modulus = ra_gcd(modulus, sets[i].rows.step);
        for (int64_t j = 0; j < i; j++)
            if (ra_span_intersect(sets[i].heads, sets[j].heads).count > 0)
                modulus = ra_gcd(modulus, sets[i].rows.start - sets[j].rows.start);
    }
    return modulus;
}
