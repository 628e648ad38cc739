#include "geometry/route.h"

#include <stdlib.h>
#include <string.h>

#include "core/status.h"

/* --------------------------------------------------------------------------------------------------------- buckets */

static void cut_ring(ra_ring *ring, int64_t bucket, int64_t slots) {
    int64_t longest = 0;
    for (int64_t i = 0; i < ring->source_count; i++) longest = ra_max(longest, ring->sources[i].rows.count);
    ring->cap = bucket == 0 ? longest : ra_min(longest, ra_max(1, bucket / slots));
    ring->slices = ra_ceil_div(longest, ring->cap);
    ring->bundle = 1;
    if (ring->slices == 1)
        ring->bundle = bucket == 0 ? ring->repeat : ra_min(ring->repeat, ra_max(1, bucket / slots / longest));
    ring->buckets = ra_ceil_div(ring->repeat, ring->bundle) * ring->slices;
}

/* How many sources of the same class a rank has at most in each round: they share the bucket. */
static bool count_slots(ra_arena *arena, const ra_route *route, int64_t *slots) {
    const ra_rings *rings = &route->rings;
    int64_t rounds = rings->rounds, ranks = route->ranks;
    for (int64_t i = 0; i < rounds; i++) slots[i] = 1;
    if (route->config->layout == RA_LAYOUT_STRIPED) return true; /* one ring a round */
    int32_t *seen = ra_arena_take(arena, rounds * ranks, sizeof(int32_t));
    if (!seen) return false;
    for (int64_t i = 0; i < rings->count; i++) {
        const ra_ring *ring = &rings->rings[i];
        if (i == 0 || ring->class_index != rings->rings[i - 1].class_index)
            memset(seen, 0, (size_t)(rounds * ranks) * sizeof *seen);
        if (ring->member_count == 1) continue;
        for (int64_t s = 0; s < ring->source_count; s++) {
            int32_t *count = &seen[ring->round * ranks + ring->sources[s].rank];
            slots[ring->round] = ra_max(slots[ring->round], ++*count);
        }
    }
    return true;
}

/* ----------------------------------------------------------------------------------------------------------- reach */

/* The rows of a source that some query of a target may see: [*begin, *end). */
static void needed_rows(const ra_config *c, const ra_part *source, const ra_part *target, int64_t *begin, int64_t *end) {
    const ra_item_rows *k = &source->rows, *q = &target->rows;
    int64_t last = q->pos + (q->count - 1) * q->pos_step;
    ra_mask_keys(c->left, c->right, q->pos, last, k->pos, k->pos_step, k->count, begin, end);
    if (*begin >= *end) *begin = *end = 0;
}

/* The slices, of `slices`, that hold these rows. */
static void needed_slices(const ra_config *c, const ra_ring *ring, const ra_part *source, const ra_part *target, int64_t slices,
                          int64_t *begin, int64_t *end) {
    needed_rows(c, source, target, begin, end);
    if (*begin > 0) *begin /= ring->cap;
    *end = *end == source->rows.count ? slices : ra_ceil_div(*end, ring->cap);
}

static int compare_slices(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* needs holds [begin, end) for each target; slice is inside one elementary interval. */
static ra_reach reach_at(const ra_ring *ring, int64_t source_member, const int64_t *needs, int64_t slice) {
    int64_t members = ring->member_count;
    int64_t up = 0, down = 0, first_up = members, first_down = members;
    for (int64_t t = 0; t < ring->target_count; t++) {
        int64_t distance = ring->targets[t].member - source_member;
        if (distance == 0 || slice < needs[2 * t] || slice >= needs[2 * t + 1]) continue;
        if (distance < 0) distance += members;
        up = ra_max(up, distance);
        first_up = ra_min(first_up, distance);
        down = ra_max(down, members - distance);
        first_down = ra_min(first_down, members - distance);
    }
    if (up == 0) return (ra_reach){0};
    bool goes_down = down < up;
    return (ra_reach){
        .hops = (int32_t)(goes_down ? down : up), .first = (int32_t)(goes_down ? first_down : first_up), .down = goes_down};
}

/* Without a mask, and with queries on every member, each bucket goes all the way round: nothing to find out. */
static bool all_round(const ra_config *c, const ra_ring *ring, int64_t *seen) {
    if (ra_mask_limits(c->left, c->right)) return false;
    if (ring->target_count < ring->member_count) return false;
    int64_t members = 0;
    memset(seen, 0, (size_t)ring->member_count * sizeof *seen);
    for (int64_t t = 0; t < ring->target_count; t++) members += seen[ring->targets[t].member]++ == 0;
    return members == ring->member_count;
}

static bool go_all_round(ra_arena *arena, ra_ring *ring) {
    ra_reach *reaches = ra_arena_take(arena, ring->source_count, sizeof(ra_reach));
    if (!reaches) return false;
    for (int64_t s = 0; s < ring->source_count; s++) {
        reaches[s] = (ra_reach){.slice_end = ra_ceil_div(ring->sources[s].rows.count, ring->cap),
                                .hops = (int32_t)ring->member_count - 1,
                                .first = 1};
        ring->paths[s] = (ra_path){&reaches[s], 1};
    }
    return true;
}

/* The reach is constant between the slices where some target's need begins or ends. */
static bool find_paths(ra_arena *arena, const ra_config *c, ra_ring *ring, int64_t *needs, int64_t *marks) {
    ring->paths = ra_arena_take(arena, ring->source_count, sizeof(ra_path));
    if (!ring->paths) return false;
    if (all_round(c, ring, needs)) return go_all_round(arena, ring);
    for (int64_t s = 0; s < ring->source_count; s++) {
        const ra_part *source = &ring->sources[s];
        int64_t slices = ra_ceil_div(source->rows.count, ring->cap), count = 0;
        for (int64_t t = 0; t < ring->target_count; t++) {
            needed_slices(c, ring, source, &ring->targets[t], slices, &needs[2 * t], &needs[2 * t + 1]);
            for (int side = 0; side < 2; side++)
                if (needs[2 * t + side] > 0 && needs[2 * t + side] < slices) marks[count++] = needs[2 * t + side];
        }
        marks[count++] = slices;
        if (count > 1) qsort(marks, (size_t)count, sizeof(int64_t), compare_slices);
        ra_path *path = &ring->paths[s];
        path->reaches = ra_arena_take(arena, count, sizeof(ra_reach));
        if (!path->reaches) return false;
        int64_t begin = 0;
        for (int64_t i = 0; i < count; i++) {
            if (marks[i] == begin) continue;
            ra_reach reach = reach_at(ring, source->member, needs, begin);
            ra_reach *last = path->count ? &path->reaches[path->count - 1] : NULL;
            bool same = last && last->hops == reach.hops && last->first == reach.first && last->down == reach.down;
            if (!same) path->reaches[path->count++] = reach;
            path->reaches[path->count - 1].slice_end = begin = marks[i];
        }
    }
    return true;
}

const ra_reach *ra_reach_of(const ra_ring *ring, int64_t source, int64_t slice) {
    const ra_path *path = &ring->paths[source];
    int64_t low = 0, high = path->count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (slice < path->reaches[middle].slice_end) high = middle;
        else low = middle + 1;
    }
    return &path->reaches[low];
}

/* -------------------------------------------------------------------------------------------------------- channels */

static bool same_members(const ra_channel *channel, const ra_ring *ring) {
    return channel->round == ring->round && channel->member_count == ring->member_count &&
           memcmp(channel->members, ring->members, (size_t)ring->member_count * sizeof(int32_t)) == 0;
}

static uint64_t hash_members(const ra_ring *ring) {
    uint64_t hash = (uint64_t)ring->round * 0x9E3779B97F4A7C15u + (uint64_t)ring->member_count;
    for (int64_t i = 0; i < ring->member_count; i++) hash = (hash ^ (uint64_t)ring->members[i]) * 0xD6E8FEB86659FD93u;
    return hash ^ (hash >> 32);
}

/* Finds or makes the channel of a ring. table: slots of channel index + 1, a power of two of them. */
static bool join_channel(ra_arena *arena, ra_route *route, int32_t index, int32_t *table, uint64_t mask) {
    ra_ring *ring = &route->rings.rings[index];
    uint64_t slot = hash_members(ring) & mask;
    while (table[slot] && !same_members(&route->channels[table[slot] - 1], ring)) slot = (slot + 1) & mask;
    if (!table[slot]) {
        void *vector = route->channels;
        if (!ra_arena_grow(arena, &vector, route->channel_count, &route->channel_capacity, sizeof(ra_channel))) return false;
        route->channels = vector;
        route->channels[route->channel_count++] =
            (ra_channel){.round = ring->round, .member_count = ring->member_count, .members = ring->members};
        table[slot] = (int32_t)route->channel_count;
    }
    ring->channel = table[slot] - 1;
    ra_channel *channel = &route->channels[ring->channel];
    void *vector = channel->rings;
    if (!ra_arena_grow(arena, &vector, channel->ring_count, &channel->ring_capacity, sizeof(int32_t))) return false;
    channel->rings = vector;
    channel->rings[channel->ring_count++] = index;
    return true;
}

/* Sources of a channel sorted by member, in the order of rings. */
static bool sort_sources(ra_arena *arena, const ra_route *route, ra_channel *channel) {
    channel->first_ref = ra_arena_take(arena, channel->member_count + 2, sizeof(int64_t));
    if (!channel->first_ref) return false;
    int64_t *start = channel->first_ref + 1, total = 0;
    for (int64_t r = 0; r < channel->ring_count; r++) {
        const ra_ring *ring = &route->rings.rings[channel->rings[r]];
        for (int64_t s = 0; s < ring->source_count; s++, total++) start[ring->sources[s].member + 1]++;
    }
    channel->refs = ra_arena_take(arena, total, sizeof(ra_source_ref));
    if (!channel->refs) return false;
    for (int64_t m = 0; m < channel->member_count; m++) start[m + 1] += start[m];
    for (int64_t r = 0; r < channel->ring_count; r++) {
        const ra_ring *ring = &route->rings.rings[channel->rings[r]];
        for (int64_t s = 0; s < ring->source_count; s++)
            channel->refs[start[ring->sources[s].member]++] = (ra_source_ref){channel->rings[r], (int32_t)s};
    }
    return true; /* filling moved every start to the next one, so first_ref[i] is where member i begins */
}

int64_t ra_channel_member(const ra_channel *channel, int rank) {
    int64_t low = 0, high = channel->member_count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (channel->members[middle] < rank) low = middle + 1;
        else high = middle;
    }
    return low < channel->member_count && channel->members[low] == rank ? low : -1;
}

static bool build(ra_arena *arena, ra_route *route) {
    const ra_config *c = route->config;
    ra_rings *rings = &route->rings;
    int64_t runs = ra_run_count(c->layout, route->ranks);
    route->rounds = ra_arena_take(arena, rings->rounds, sizeof(ra_round));
    int64_t *slots = ra_arena_take(arena, rings->rounds, sizeof(int64_t));
    int64_t *needs = ra_arena_take(arena, 2 * runs, sizeof(int64_t)),
            *marks = ra_arena_take(arena, 2 * runs + 1, sizeof(int64_t));
    uint64_t table_size = 16;
    while (table_size < 2 * (uint64_t)rings->count) table_size *= 2;
    int32_t *table = ra_arena_take(arena, (int64_t)table_size, sizeof(int32_t));
    if (arena->failed || !count_slots(arena, route, slots)) return false;
    for (int64_t i = 0; i < rings->count; i++) {
        ra_ring *ring = &rings->rings[i];
        bool alone = ring->member_count == 1;
        cut_ring(ring, alone ? 0 : route->bucket, slots[ring->round]);
        ring->channel = -1;
        if (alone) continue;
        if (!find_paths(arena, c, ring, needs, marks)) return false;
        if (!join_channel(arena, route, (int32_t)i, table, table_size - 1)) return false;
        ra_round *round = &route->rounds[ring->round];
        round->buckets = ra_max(round->buckets, ring->buckets);
        for (int64_t s = 0; s < ring->source_count; s++)
            for (int64_t r = 0; r < ring->paths[s].count; r++)
                if (ring->paths[s].reaches[r].hops > round->hops) round->hops = ring->paths[s].reaches[r].hops;
    }
    for (int64_t i = 0; i < route->channel_count; i++)
        if (!sort_sources(arena, route, &route->channels[i])) return false;
    return true;
}

ra_status ra_route_create(ra_arena *arena, const ra_config *config, int rank, int ranks, int64_t bucket, ra_route *route) {
    *route = (ra_route){.config = config, .ranks = ranks, .bucket = bucket};
    RA_TRY(ra_rings_create(arena, config, rank, ranks, &route->rings));
    return build(arena, route) ? RA_OK : ra_fail(RA_NOMEM, "no memory for the plan's routes");
}

/* ---------------------------------------------------------------------------------------------------------- pieces */

int64_t ra_pieces(const ra_route *route, const ra_channel *channel, int64_t member, bool down, int64_t bucket, int32_t min_hops,
                  ra_piece *pieces) {
    int64_t count = 0;
    for (int64_t i = channel->first_ref[member]; i < channel->first_ref[member + 1]; i++) {
        ra_source_ref ref = channel->refs[i];
        const ra_ring *ring = &route->rings.rings[ref.ring];
        if (bucket >= ring->buckets) continue;
        int64_t slice = bucket % ring->slices, first_repeat = bucket / ring->slices * ring->bundle;
        int64_t first_row = slice * ring->cap, rows = ra_min(ring->cap, ring->sources[ref.source].rows.count - first_row);
        if (rows <= 0) continue;
        const ra_reach *reach = ra_reach_of(ring, ref.source, slice);
        if (reach->down != down || reach->hops < min_hops) continue;
        ra_piece piece = {.ring = ref.ring,
                          .source = ref.source,
                          .first_repeat = first_repeat,
                          .repeats = ra_min(ring->bundle, ring->repeat - first_repeat),
                          .first_row = first_row,
                          .rows = rows,
                          .hops = reach->hops,
                          .first = reach->first};
        int64_t place = count++; /* insertion keeps the order among equals */
        for (; place > 0 && pieces[place - 1].hops < piece.hops; place--) pieces[place] = pieces[place - 1];
        pieces[place] = piece;
    }
    return count;
}

int64_t ra_direct_pieces(const ra_route *route, const ra_channel *channel, int64_t from, int64_t to, ra_piece *pieces) {
    int64_t count = 0;
    for (int64_t i = channel->first_ref[from]; i < channel->first_ref[from + 1]; i++) {
        ra_source_ref ref = channel->refs[i];
        const ra_ring *ring = &route->rings.rings[ref.ring];
        int64_t low = INT64_MAX, high = 0;
        for (int32_t t = ring->first_target[to]; t >= 0; t = ring->next_target[t]) {
            int64_t begin, end;
            needed_rows(route->config, &ring->sources[ref.source], &ring->targets[t], &begin, &end);
            if (begin == end) continue;
            low = ra_min(low, begin);
            high = ra_max(high, end);
        }
        if (low < high)
            pieces[count++] = (ra_piece){.ring = ref.ring,
                                         .source = ref.source,
                                         .repeats = ring->repeat,
                                         .first_row = low,
                                         .rows = high - low,
                                         .hops = 1,
                                         .first = 1};
    }
    return count;
}

int64_t ra_piece_elements(const ra_route *route, const ra_piece *piece) {
    const ra_config *c = route->config;
    const ra_class *class = &route->rings.classes[route->rings.rings[piece->ring].class_index];
    return c->batch * class->heads.count * piece->repeats * piece->rows * c->head_dim;
}
