/* Where and when a query meets a key, read off the route. */
#include "core/status.h"
#include "plan/plan.h"

/* The index of position x among the rows of a part in repeat `repeat` of its ring, or -1. */
static int64_t index_in(const ra_ring *ring, const ra_part *part, int64_t repeat, int64_t x) {
    int64_t distance = x - part->rows.pos - repeat * ring->shift;
    if (distance < 0 || distance % part->rows.pos_step != 0) return -1;
    int64_t index = distance / part->rows.pos_step;
    return index < part->rows.count ? index : -1;
}

static const ra_part *part_of(const ra_ring *ring, const ra_part *parts, int64_t count, int64_t repeat, int64_t x,
                              int64_t *index) {
    for (int64_t i = 0; i < count; i++)
        if ((*index = index_in(ring, &parts[i], repeat, x)) >= 0) return &parts[i];
    return NULL;
}

/* Steps of the rank in the rounds before: those in which it is a member of a channel. */
static int64_t steps_before(const ra_route *route, int rank, int64_t round) {
    int64_t steps = 0;
    for (int64_t r = 0; r < round; r++) {
        bool member = false;
        for (int64_t i = 0; i < route->channel_count && !member; i++)
            member = route->channels[i].round == r && ra_channel_member(&route->channels[i], rank) >= 0;
        if (member) steps += route->rounds[r].buckets * (route->rounds[r].hops + 1);
    }
    return steps;
}

/* False: this ring does not bring them together. */
static bool meet_in(const ra_route *route, const ra_ring *ring, int64_t x, int64_t y, ra_meeting *m) {
    int64_t repeat = ring->repeat > 1 ? ra_floor_div(y - ring->origin, ring->shift) : 0, q, k;
    if (repeat < 0 || repeat >= ring->repeat) return false;
    const ra_part *target = part_of(ring, ring->targets, ring->target_count, repeat, x, &q);
    const ra_part *source = part_of(ring, ring->sources, ring->source_count, repeat, y, &k);
    if (!target || !source) return false;
    m->query_rank = target->rank;
    m->key_rank = source->rank;
    m->round = m->bucket = m->hop = m->step = 0;
    if (ring->channel < 0) return true;
    if (route->bucket == 0) { /* gather: what is not at home comes in one exchange, for the second step */
        m->hop = m->step = source->member != target->member;
        return true;
    }
    int64_t slice = k / ring->cap;
    const ra_reach *reach = ra_reach_of(ring, source - ring->sources, slice);
    int64_t up = ra_mod(target->member - source->member, ring->member_count);
    m->hop = reach->down ? ra_mod(-up, ring->member_count) : up;
    m->round = ring->round;
    m->bucket = repeat / ring->bundle * ring->slices + slice;
    m->step = steps_before(route, m->query_rank, m->round) + m->bucket * (route->rounds[m->round].hops + 1) + m->hop;
    return true;
}

static bool holds(ra_shard shard, int64_t row) {
    for (int i = 0; i < 2; i++) {
        int64_t distance = row - shard.rows[i].start;
        if (distance >= 0 && distance % shard.rows[i].step == 0 && distance / shard.rows[i].step < shard.rows[i].count)
            return true;
    }
    return false;
}

static bool has_head(const ra_class *class, int64_t kv_head) {
    int64_t distance = kv_head - class->heads.start;
    return distance >= 0 && distance % class->heads.step == 0 && distance / class->heads.step < class->heads.count;
}

static ra_status meet(const ra_route *route, int64_t query, int64_t key, int64_t head, int64_t branch, ra_meeting *m) {
    const ra_config *c = route->config;
    int64_t x = query + ra_query_shift(c), kv_head = head / (c->heads / c->kv_heads);
    for (int64_t i = 0; i < route->rings.count; i++) {
        const ra_ring *ring = &route->rings.rings[i];
        const ra_class *class = &route->rings.classes[ring->class_index];
        if (class->branch != branch || !has_head(class, kv_head)) continue;
        if (class->residue && ra_mod(x - key, class->rate) != 0) continue;
        if (meet_in(route, ring, x, key, m)) return RA_OK;
    }
    return ra_fail(RA_INVALID, "query %lld does not meet key %lld in branch %lld", (long long)query, (long long)key,
                   (long long)branch);
}

ra_status ra_plan_meeting(const ra_attention_desc *desc, int ranks, int64_t query, int64_t key, int64_t head, int64_t branch,
                          ra_meeting *meeting) {
    if (!meeting) return ra_fail(RA_INVALID, "meeting is NULL");
    if (meeting->struct_size < sizeof *meeting)
        return ra_fail(RA_INVALID, "meeting.struct_size is %u; set it to sizeof(ra_meeting), which is %zu",
                       meeting->struct_size, sizeof *meeting);
    if (ranks < 1 || ranks > RA_MAX_RANKS)
        return ra_fail(RA_INVALID, "ranks is %d, which is not in 1..%d", ranks, RA_MAX_RANKS);
    ra_arena arena = {0};
    ra_config config;
    ra_choice choice;
    ra_route route;
    ra_status status = ra_config_create(&arena, desc, &config);
    if (status == RA_OK &&
        (query < 0 || query >= config.seq_q || key < 0 || key >= config.seq_k || head < 0 || head >= config.heads))
        status = ra_fail(RA_INVALID, "query %lld, key %lld or head %lld is out of range", (long long)query, (long long)key,
                         (long long)head);
    if (status == RA_OK) status = ra_choose(&config, ranks, &choice);
    /* With replicated queries every rank has the query, and it meets the key where the key is. */
    int rank = 0;
    if (status == RA_OK && config.placement == RA_REPLICATED)
        while (rank + 1 < ranks && !holds(ra_shard_of(config.layout, rank, ranks, config.seq_k), key)) rank++;
    if (status == RA_OK) status = ra_route_create(&arena, &config, rank, ranks, choice.bucket, &route);
    if (status == RA_OK) status = meet(&route, query, key, head, branch, meeting);
    ra_arena_free(&arena);
    return status;
}
