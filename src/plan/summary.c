/* What a rank does and needs, in numbers, without doing it. */
#include <stddef.h>
#include <string.h>

#include "core/dtype.h"
#include "core/status.h"
#include "geometry/count.h"
#include "plan/summary.h"
#include "plan/tree.h"

/* ------------------------------------------------------------------------------------------------- pairs and holes */

typedef int64_t (*counter)(ra_span queries, ra_span keys, int64_t rate, const ra_config *config);

static int64_t pairs_lattice(ra_span q, ra_span k, int64_t rate, const ra_config *c) {
    (void)rate;
    return ra_count_pairs(q, k, c->left, c->right);
}
static int64_t pairs_residue(ra_span q, ra_span k, int64_t rate, const ra_config *c) {
    return ra_count_pairs_residue(q, k, rate, c->left, c->right);
}
static int64_t covered_lattice(ra_span q, ra_span k, int64_t rate, const ra_config *c) {
    (void)rate;
    return ra_count_covered(q, k, c->left, c->right);
}
static int64_t covered_residue(ra_span q, ra_span k, int64_t rate, const ra_config *c) {
    return ra_count_covered_residue(q, k, rate, c->left, c->right);
}

static ra_span span_of(const ra_item_rows *rows) { return (ra_span){rows->pos, rows->pos_step, rows->count}; }

static ra_span shifted(ra_span span, int64_t shift) {
    span.start += shift;
    return span;
}

/* Sums a count over the repeats of a ring, with keys limited to [begin, end). Repeats that lie inside are alike; the one that
 * each end goes through is counted by itself. */
static int64_t repeats_within(const ra_config *c, const ra_ring *ring, int64_t rate, ra_span q, ra_span k, counter count,
                              int64_t begin, int64_t end) {
    if (ring->repeat == 1) return count(q, ra_span_clip(k, begin, end), rate, c);
    int64_t low = ra_max(0, ra_ceil_div(begin - k.start, ring->shift)); /* repeats that lie inside: [low, high) */
    int64_t high = ra_min(ring->repeat, ra_floor_div(end - 1 - ra_span_last(k), ring->shift) + 1);
    int64_t sum = high > low ? ra_sat_mul(high - low, count(q, k, rate, c)) : 0;
    int64_t ends[2] = {ra_floor_div(begin - k.start, ring->shift), ra_floor_div(end - 1 - k.start, ring->shift)};
    for (int i = 0; i < 2; i++) {
        int64_t at = ends[i], shift = at * ring->shift;
        if (at < 0 || at >= ring->repeat || (at >= low && at < high) || (i == 1 && at == ends[0])) continue;
        sum = ra_sat_add(sum, count(shifted(q, shift), ra_span_clip(shifted(k, shift), begin, end), rate, c));
    }
    return sum;
}

static int64_t over_repeats(const ra_config *c, const ra_ring *ring, const ra_class *class, ra_span q, counter count,
                            int64_t begin, int64_t end) {
    return repeats_within(c, ring, class->rate, q, ra_lattice_keys(c, class, ring->origin), count, begin, end);
}

static int64_t over_batch(const ra_config *c, const ra_ring *ring, const ra_class *class, ra_span q, counter count) {
    if (!c->has_key_range) return ra_sat_mul(c->batch, over_repeats(c, ring, class, q, count, 0, c->seq_k));
    int64_t sum = 0;
    for (int64_t b = 0; b < c->batch; b++)
        sum = ra_sat_add(sum, over_repeats(c, ring, class, q, count, c->key_begin[b], c->key_end[b]));
    return sum;
}

/* (query row, query head) pairs over the batch with a key in this class, or pairs with the keys themselves. */
int64_t ra_count_over_rings(const ra_route *route, int rank, bool covered) {
    const ra_config *c = route->config;
    const ra_ring_list own = ra_rings_of(&route->rings, rank);
    int64_t sum = 0;
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        const ra_class *class = &route->rings.classes[ring->class_index];
        int64_t heads = class->heads.count * (c->heads / c->kv_heads);
        counter count =
            covered ? (class->residue ? covered_residue : covered_lattice) : (class->residue ? pairs_residue : pairs_lattice);
        for (int32_t t = ra_first_target(ring, rank); t >= 0; t = ring->next_target[t])
            sum = ra_sat_add(sum, ra_sat_mul(heads, over_batch(c, ring, class, span_of(&ring->targets[t].rows), count)));
    }
    return sum;
}

/* Over the repeats of the ring, the residues of the item's loop and the batch. */
static int64_t pairs_of_item(const ra_config *c, const ra_ring *ring, const ra_item *item) {
    ra_span q = span_of(&item->q), k = span_of(&item->k);
    int64_t residues = item->loop[1].repeat;
    if (!c->has_key_range) /* all alike */
        return ra_sat_mul(ra_sat_mul(c->batch, ra_sat_mul(ring->repeat, residues)), ra_count_pairs(q, k, c->left, c->right));
    int64_t sum = 0;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t i = 0; i < residues; i++)
            sum = ra_sat_add(sum, repeats_within(c, ring, 1, shifted(q, i * item->loop[1].q_pos),
                                                 shifted(k, i * item->loop[1].k_pos), pairs_lattice, c->key_begin[b],
                                                 c->key_end[b]));
    return sum;
}

/* ------------------------------------------------------------------------------------------------------------ bytes */

/* Rows of a source, over all repeats, whose slices are [begin, end). */
static int64_t slice_rows(const ra_ring *ring, const ra_part *source, int64_t begin, int64_t end) {
    return (ra_min(source->rows.count, end * ring->cap) - begin * ring->cap) * ring->repeat;
}

typedef struct traffic {
    int64_t kv, grads; /* elements */
    int64_t hops;
} traffic;

static traffic sent_by(const ra_route *route, const ra_view *view) {
    const ra_config *c = route->config;
    traffic sum = {0};
    int32_t round = -1;
    int64_t farthest = 0;
    for (int64_t o = 0; o < view->own_count; o++) {
        const ra_channel *channel = view->own[o].channel;
        if (channel->round != round) {
            sum.hops += round < 0 ? 0 : farthest * route->rounds[round].buckets;
            round = channel->round;
            farthest = 0;
        }
        for (int64_t r = 0; r < channel->ring_count; r++) {
            const ra_ring *ring = &route->rings.rings[channel->rings[r]];
            int64_t width = 2 * c->batch * route->rings.classes[ring->class_index].heads.count * c->head_dim;
            for (int64_t s = 0; s < ring->source_count; s++) {
                int64_t up = ra_mod(view->own[o].member - ring->sources[s].member, ring->member_count);
                int64_t down = ra_mod(-up, ring->member_count), begin = 0;
                for (int64_t i = 0; i < ring->paths[s].count; i++) {
                    const ra_reach *reach = &ring->paths[s].reaches[i];
                    int64_t distance = reach->down ? down : up;
                    int64_t elements = slice_rows(ring, &ring->sources[s], begin, reach->slice_end) * width;
                    if (distance < reach->hops) sum.kv += elements;
                    if (distance >= 1 && distance >= reach->first && distance <= reach->hops) sum.grads += elements;
                    if (distance <= reach->hops) farthest = ra_max(farthest, distance);
                    begin = reach->slice_end;
                }
            }
        }
    }
    sum.hops += round < 0 ? 0 : farthest * route->rounds[round].buckets;
    return sum;
}

/* Everything at once: what others need of this rank, and what it sends back as gradients. */
static ra_status sent_directly(const ra_route *route, const ra_view *view, traffic *sum) {
    *sum = (traffic){0};
    ra_arena arena = {0};
    ra_status status = RA_OK;
    for (int64_t o = 0; o < view->own_count && status == RA_OK; o++) {
        const ra_channel *channel = view->own[o].channel;
        int64_t me = view->own[o].member;
        ra_piece *pieces = ra_arena_take(&arena, channel->first_ref[channel->member_count], sizeof *pieces);
        if (!pieces) status = ra_fail(RA_NOMEM, "no memory for a summary");
        for (int64_t m = 0; m < channel->member_count && pieces; m++)
            for (int out = 0; out < 2 && m != me; out++) {
                int64_t count = ra_direct_pieces(route, channel, out ? me : m, out ? m : me, pieces);
                if (!out && count > 0) sum->hops = 1;
                for (int64_t i = 0; i < count; i++) *(out ? &sum->kv : &sum->grads) += 2 * ra_piece_elements(route, &pieces[i]);
            }
    }
    ra_arena_free(&arena);
    return status;
}

/* Replicated queries: this rank's keys alone, item by item (their number does not depend on the sequence length). */
static int64_t pairs_of_own_keys(const ra_route *route, int rank) {
    const ra_config *c = route->config;
    int64_t sum = 0;
    for (int64_t r = 0; r < route->rings.count; r++) {
        const ra_ring *ring = &route->rings.rings[r];
        int64_t heads = route->rings.classes[ring->class_index].heads.count * (c->heads / c->kv_heads);
        for (int64_t s = 0; s < ring->source_count; s++)
            for (int32_t t = ra_first_target(ring, rank); t >= 0; t = ring->next_target[t]) {
                ra_piece whole = {.ring = (int32_t)r, .source = (int32_t)s, .repeats = 1, .rows = ring->sources[s].rows.count};
                ra_item items[RA_ITEMS_MAX];
                int64_t count = ra_items(route, &whole, &ring->targets[t], false, items);
                for (int64_t i = 0; i < count; i++) sum = ra_sat_add(sum, ra_sat_mul(heads, pairs_of_item(c, ring, &items[i])));
            }
    }
    return sum;
}

/* ----------------------------------------------------------------------------------------------------------- public */

static int64_t count_items(const ra_route *route, const ra_view *view) {
    const ra_ring_list own = ra_rings_of(&route->rings, view->rank);
    int64_t items = 0;
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        items += ra_targets_of(ring, view->rank) * ring->source_count;
    }
    return items;
}

/* Rows with a key, for which replicated queries have to look at all keys, not only this rank's. */
static ra_status covered_rows(const ra_route *route, const ra_view *view, int64_t *covered) {
    if (route->config->placement == RA_SHARDED) {
        *covered = ra_covered_rows(route, view);
        return RA_OK;
    }
    ra_arena arena = {0};
    ra_config alone = *route->config;
    alone.placement = RA_SHARDED;
    ra_route whole;
    ra_view all;
    ra_status status = ra_route_create(&arena, &alone, 0, 1, 0, &whole);
    if (status == RA_OK) status = ra_view_create(&arena, &whole, 0, &all);
    if (status == RA_OK) *covered = ra_covered_rows(&whole, &all);
    ra_arena_free(&arena);
    return status;
}

/* Rows that carry a state from step to step, where those at home need none (ra_pass_shape.parted). */
static int64_t state_rows(const ra_config *c, const ra_view *view) {
    const ra_used_rows *used = view->parted && !c->offload ? &view->shared_q : &view->used_q;
    if (view->single && !c->offload) return 0;
    return c->batch * (used->count > 0 ? ra_used_count(used->sets, used->count) : view->rows_q * c->heads);
}

ra_status ra_summarise(const ra_plan *plan, const ra_view *view, ra_rank_summary *summary) {
    const ra_route *route = &plan->route;
    const ra_config *c = route->config;
    int64_t size = (int64_t)ra_dtype_size(c->dtype), state = ra_state_size(c->dtype);
    bool replicated = c->placement == RA_REPLICATED;
    int64_t q = c->batch * view->rows_q * c->heads, k = c->batch * view->rows_k * c->kv_heads, covered;
    RA_TRY(covered_rows(route, view, &covered));
    traffic sent = {0};
    if (route->bucket == 0) RA_TRY(sent_directly(route, view, &sent));
    else sent = sent_by(route, view);
    int64_t merged[2] = {0}; /* bytes, forward and backward */
    for (int backward = 0; backward < 2 && ra_merges(c, view->ranks); backward++)
        merged[backward] = ra_tree_bytes(&(ra_tree){plan->schedule, view->rank, view->ranks},
                                         plan->kernel->device->travelling_bytes(&plan->problem, backward));
    ra_rank_summary found = {
        .struct_size = summary->struct_size,
        .rank = view->rank,
        .rows_q = view->rows_q,
        .rows_k = view->rows_k,
        .pairs = replicated ? pairs_of_own_keys(route, view->rank) : ra_count_over_rings(route, view->rank, false),
        .holes = covered < 0 ? -1 : q - covered,
        .bytes_sent = sent.kv * size + merged[0],
        .bytes_sent_backward = sent.kv * size + sent.grads * state + merged[1],
        .hops = sent.hops,
        .items = count_items(route, view),
        .shard_bytes = (2 * q + 2 * k) * c->head_dim * size + q * state,
        .shard_bytes_backward = (2 * q + 2 * k) * c->head_dim * size,
        .workspace_bytes = ra_workspace_of(c, view, plan->kernel, plan->threads, false).total,
        .workspace_bytes_backward = ra_workspace_of(c, view, plan->kernel, plan->threads, true).total,
        .schedule = plan->schedule,
        .bucket = ra_plan_bucket(plan),
        .state_rows = state_rows(c, view),
    };
    if (c->offload) {
        found.shard_bytes = found.shard_bytes_backward = 0;
        found.workspace_bytes = plan->forward.total;
        found.workspace_bytes_backward = plan->backward.total;
        for (int i = 0; i < plan->blocks[0].count; i++) found.hops += plan->blocks[0].visits[i];
    }
    memcpy(found.reason, plan->reason, sizeof found.reason);
    memcpy(summary, &found, (size_t)ra_min(summary->struct_size, sizeof found)); /* an earlier header's is shorter */
    return RA_OK;
}

static ra_status check_group(int rank, int ranks) {
    if (ranks < 1 || ranks > RA_MAX_RANKS)
        return ra_fail(RA_INVALID, "ranks is %d, which is not in 1..%d", ranks, RA_MAX_RANKS);
    if (rank < 0 || rank >= ranks) return ra_fail(RA_INVALID, "rank is %d, which is not in 0..%d", rank, ranks - 1);
    return RA_OK;
}

static ra_status check_summary(const ra_rank_summary *summary) {
    if (!summary) return ra_fail(RA_INVALID, "summary is NULL");
    /* As version 0.1 had it, at least. A later header's is larger, and its known part is filled. */
    if (summary->struct_size < offsetof(ra_rank_summary, state_rows))
        return ra_fail(RA_INVALID, "summary.struct_size is %u; set it to sizeof(ra_rank_summary), which is %zu",
                       summary->struct_size, sizeof *summary);
    return RA_OK;
}

ra_status ra_plan_summary(const ra_attention_desc *desc, int rank, int ranks, ra_rank_summary *summary) {
    RA_TRY(check_summary(summary));
    RA_TRY(check_group(rank, ranks));
    ra_plan plan = {0};
    ra_status status = ra_plan_fill(&plan, desc, rank, ranks);
    if (status == RA_OK) status = ra_summarise(&plan, &plan.view, summary);
    ra_plan_clear(&plan);
    return status;
}

ra_status ra_plan_summaries(const ra_attention_desc *desc, int ranks, ra_rank_summary *summaries) {
    RA_TRY(check_summary(summaries));
    RA_TRY(check_group(0, ranks));
    ra_plan plan = {0};
    ra_status status = ra_plan_fill(&plan, desc, 0, ranks);
    size_t stride = summaries[0].struct_size;
    for (int rank = 0; rank < ranks && status == RA_OK; rank++) {
        ra_rank_summary *summary = (ra_rank_summary *)(void *)((char *)summaries + (size_t)rank * stride);
        ra_arena arena = {0};
        ra_view view;
        status = check_summary(summary);
        if (plan.config.placement == RA_REPLICATED) { /* the one case in which ranks have routes of their own */
            if (status == RA_OK) status = ra_plan_summary(desc, rank, ranks, summary);
            continue;
        }
        if (status == RA_OK) status = ra_view_create(&arena, &plan.route, rank, &view);
        if (status == RA_OK) status = ra_summarise(&plan, &view, summary);
        ra_arena_free(&arena);
    }
    ra_plan_clear(&plan);
    return status;
}
