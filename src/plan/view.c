#include <stdlib.h>

#include "core/dtype.h"
#include "core/frame.h"
#include "core/status.h"
#include "plan/plan.h"

static int by_round(const void *a, const void *b) {
    const ra_own_channel *x = a, *y = b;
    if (x->channel->round != y->channel->round) return x->channel->round < y->channel->round ? -1 : 1;
    return x->channel < y->channel ? -1 : x->channel > y->channel; /* the same order on every rank */
}

/* Items that the ring's sources can make on this rank when they all are at home. */
static int64_t ring_items(const ra_ring *ring, int rank) {
    return ra_targets_of(ring, rank) * ring->source_count * RA_ITEMS_MAX;
}

static bool meets_once(const ra_route *route, int rank) {
    if (route->config->combine == RA_COMBINE_MIX && route->config->branches > 1) return false;
    const ra_ring_list own = ra_rings_of(&route->rings, rank);
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        if (ra_first_target(ring, rank) >= 0 && (ring->source_count > 1 || ring->buckets > 1)) return false;
    }
    return true;
}

/* Does every key of this rank meet one target, its own? */
static bool met_once(const ra_route *route, const ra_view *view) {
    for (int64_t i = 0; i < view->local_count; i++) {
        const ra_ring *ring = &route->rings.rings[view->local[i]];
        if (ring->source_count > 1 || ring->target_count > 1) return false;
    }
    return view->own_count == 0;
}

/* Is every local ring one item, whose rows no other ring has? */
static bool home_alone(const ra_route *route, const ra_view *view) {
    const ra_config *c = route->config;
    if (c->placement != RA_SHARDED || (c->combine == RA_COMBINE_MIX && c->branches > 1)) return false;
    for (int64_t i = 0; i < view->local_count; i++) {
        const ra_ring *ring = &route->rings.rings[view->local[i]];
        if (ring->source_count > 1 || ring->target_count > 1) return false;
    }
    return view->local_count > 0 && view->own_count > 0;
}

/* Every block of rows looks through all sets: not worth it where they are many, or leave few rows out. */
static bool find_used(ra_arena *arena, const ra_route *route, int rank, bool queries, int64_t all, ra_used_rows *used) {
    enum { MOST = 32 };
    *used = (ra_used_rows){.sets = ra_arena_take(arena, MOST, sizeof(ra_used)), .modulus = 1};
    if (!used->sets) return false;
    int64_t count = ra_used_sets(route, rank, queries, false, used->sets, MOST);
    if (count <= 0 || ra_used_count(used->sets, count) > all / 4 * 3) return true;
    used->count = count;
    used->modulus = ra_used_modulus(used->sets, count);
    return true;
}

static bool find_shared(ra_arena *arena, const ra_route *route, int rank, bool queries, ra_used_rows *used) {
    enum { MOST = 32 };
    *used = (ra_used_rows){.sets = ra_arena_take(arena, MOST, sizeof(ra_used)), .modulus = 1, .keeps = true};
    const int64_t count = used->sets ? ra_used_sets(route, rank, queries, true, used->sets, MOST) : -1;
    if (count <= 0) return false;
    used->count = count;
    used->modulus = ra_used_modulus(used->sets, count);
    return true;
}

/* The rank's channels, and its rings that exchange nothing. */
static bool find_rings(ra_arena *arena, const ra_route *route, ra_view *view) {
    const ra_ring_list own = ra_rings_of(&route->rings, view->rank);
    view->own = ra_arena_take(arena, own.count, sizeof(ra_own_channel));
    view->local = ra_arena_take(arena, own.count, sizeof(int32_t));
    if (arena->failed) return false;
    int64_t shared = 0;
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &route->rings.rings[own.list[i]];
        if (ring->channel >= 0) {
            const ra_channel *channel = &route->channels[ring->channel];
            view->own[shared++] = (ra_own_channel){channel, ra_channel_member(channel, view->rank)};
        } else {
            view->local[view->local_count++] = own.list[i];
            view->local_items += ring_items(ring, view->rank);
        }
    }
    qsort(view->own, (size_t)shared, sizeof *view->own, by_round);
    for (int64_t i = 0; i < shared; i++) /* several rings may share a channel */
        if (i == 0 || view->own[i].channel != view->own[i - 1].channel) view->own[view->own_count++] = view->own[i];
    return true;
}

ra_status ra_view_create(ra_arena *arena, const ra_route *route, int rank, ra_view *view) {
    const ra_config *c = route->config;
    *view = (ra_view){.rank = rank, .ranks = route->ranks};
    if (!find_rings(arena, route, view)) return ra_fail(RA_NOMEM, "no memory for the plan of rank %d", rank);
    view->rows_q = c->placement == RA_REPLICATED ? c->seq_q : ra_shard_of(c->layout, rank, route->ranks, c->seq_q).count;
    view->rows_k = ra_shard_of(c->layout, rank, route->ranks, c->seq_k).count;
    view->keys = ra_most_keys(route, rank);
    view->single = meets_once(route, rank) && (c->placement == RA_SHARDED || route->ranks == 1);
    view->single_backward = view->single && met_once(route, view);
    if (!find_used(arena, route, rank, true, view->rows_q * c->heads, &view->used_q) ||
        !find_used(arena, route, rank, false, view->rows_k * c->kv_heads, &view->used_k) ||
        !ra_message_bound(arena, route, view->own, view->own_count, rank, &view->bounds))
        return ra_fail(RA_NOMEM, "no memory for the plan of rank %d", rank);
    view->parted = !view->single && home_alone(route, view) && find_shared(arena, route, rank, true, &view->shared_q) &&
                   find_shared(arena, route, rank, false, &view->shared_k);
    return arena->failed ? ra_fail(RA_NOMEM, "no memory for the plan of rank %d", rank) : RA_OK;
}

ra_problem ra_problem_of(const ra_config *c, const ra_view *view) {
    return (ra_problem){.dtype = c->dtype,
                        .batch = c->batch,
                        .heads = c->heads,
                        .kv_heads = c->kv_heads,
                        .head_dim = c->head_dim,
                        .rows_q = view->rows_q,
                        .keys = view->keys,
                        .scale = c->scale,
                        .left = c->left,
                        .right = c->right,
                        .key_begin = c->key_begin,
                        .key_end = c->key_end,
                        .dropout = c->dropout,
                        .seed = c->seed};
}

int ra_default_threads(const ra_config *c, int ranks) {
    if (c->threads > 0) return c->threads;
    return (int)ra_max(1, ra_usable_cores() / ranks);
}

ra_pass_shape ra_shape_of(const ra_config *c, const ra_view *view, const ra_problem *problem, const ra_kernel *kernel,
                          bool backward) {
    const bool single = backward ? view->single_backward : view->single;
    const bool travels = ra_merges(c, view->ranks), parted = view->parted && kernel->device->forward_home && !single;
    return (ra_pass_shape){.problem = problem,
                           .rows_k = view->rows_k,
                           .used_q = parted ? &view->shared_q : &view->used_q,
                           .used_k = parted ? &view->shared_k : &view->used_k,
                           .all_q = &view->used_q,
                           .all_k = &view->used_k,
                           .parted = parted,
                           .single = single && (!kernel->device->fills || view->own_count == 0),
                           .direct = kernel->direct,
                           .travels = travels,
                           .halves = kernel->device->halves && !travels && ra_dtype_size(c->dtype) == 2};
}

ra_workspace ra_workspace_of(const ra_config *c, const ra_view *view, const ra_kernel *kernel, int threads, bool backward) {
    const ra_problem problem = ra_problem_of(c, view);
    const ra_pass_shape shape = ra_shape_of(c, view, &problem, kernel, backward);
    const ra_device_ops *device = kernel->device;
    ra_workspace w = {.kv = {view->bounds.kv_bytes[0], view->bounds.kv_bytes[1]}};
    w.state = (backward ? device->backward_bytes : device->forward_bytes)(&shape);
    w.scratch = (backward ? kernel->backward_scratch : kernel->forward_scratch)(&problem, threads);
    if (shape.travels) w.travelling = ra_frame_bytes(device->travelling_bytes(&problem, backward));
    if (backward) {
        w.grad[0] = view->bounds.grad_bytes[0];
        w.grad[1] = view->bounds.grad_bytes[1];
        w.grad_in = view->bounds.grad_in_bytes;
        if (device->copies && w.grad[1] > 0) { /* the ring lets messages be late (ring/gradients.c) */
            const int64_t *home = view->bounds.home_bytes;
            for (int i = 0; i < 3; i++) w.grad[i] = ra_max(view->bounds.grad_bytes[1], home[0]);
            w.grad_in = view->bounds.added_bytes;
            for (int i = 0; i < 2; i++) w.grad_home[i] = home[1 + i];
        }
    }
    int64_t parts[] = {w.state,   w.scratch, w.kv[0],        w.kv[1],        w.grad[0],    w.grad[1],
                       w.grad[2], w.grad_in, w.grad_home[0], w.grad_home[1], w.travelling, w.travelling};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) w.total += ra_round_up(parts[i], 64);
    return w;
}
