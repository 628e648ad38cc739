#include "plan/messages.h"

#include <string.h>

#include "core/dtype.h"
#include "core/frame.h"

bool ra_messages_create(ra_arena *arena, const ra_own_channel *own, int64_t own_count, ra_messages *messages) {
    *messages = (ra_messages){.list = ra_arena_take(arena, 2 * own_count, sizeof(ra_message))};
    if (!messages->list) return false;
    int64_t most = 0; /* pieces of a message, over all channels: lists are reused from round to round */
    for (int64_t i = 0; i < own_count; i++) {
        const ra_channel *channel = own[i].channel;
        for (int64_t m = 0; m < channel->member_count; m++)
            most = ra_max(most, channel->first_ref[m + 1] - channel->first_ref[m]);
    }
    for (int64_t i = 0; i < 2 * own_count; i++) {
        messages->list[i].pieces = ra_arena_take(arena, most, sizeof(ra_piece));
        if (!messages->list[i].pieces) return false;
    }
    return true;
}

int64_t ra_message_payload(const ra_route *route, const ra_message *message, int32_t min_hops, int64_t size) {
    int64_t elements = 0;
    for (int64_t i = 0; i < message->count && message->pieces[i].hops >= min_hops; i++)
        elements += 2 * ra_piece_elements(route, &message->pieces[i]);
    return elements * size;
}

int ra_message_rank(const ra_message *message, int64_t hops) {
    const ra_channel *channel = message->own->channel;
    return channel->members[ra_member_at(channel, message->own->member, hops, message->down)];
}

void ra_messages_list(const ra_route *route, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop,
                      bool all, ra_messages *messages) {
    messages->count = messages->bytes = 0;
    int64_t size = (int64_t)ra_dtype_size(route->config->dtype);
    int32_t min_hops = hop > 0 ? hop : (all ? 0 : 1);
    for (int64_t i = 0; i < own_count; i++)
        for (int down = 0; down < 2; down++) {
            if (hop >= own[i].channel->member_count) continue;
            ra_message *message = &messages->list[messages->count];
            int64_t source = ra_member_at(own[i].channel, own[i].member, -hop, down);
            int64_t count = ra_pieces(route, own[i].channel, source, down, bucket, min_hops, message->pieces);
            if (count == 0) continue;
            *message = (ra_message){&own[i], down, source, messages->bytes, message->pieces, count};
            int64_t payload = ra_message_payload(route, message, hop > 1 ? hop : 1, size);
            messages->bytes += ra_frame_bytes_if_any(payload);
            messages->count++;
        }
}

ra_box ra_piece_box(const ra_route *route, const ra_piece *piece) {
    const ra_ring *ring = &route->rings.rings[piece->ring];
    const ra_part *source = &ring->sources[piece->source];
    const ra_item_rows *rows = &source->rows;
    return (ra_box){.batch = route->config->batch,
                    .heads = route->rings.classes[ring->class_index].heads,
                    .first = rows->row + piece->first_repeat * source->row_shift + piece->first_row * rows->row_step,
                    .repeats = piece->repeats,
                    .repeat_step = source->row_shift,
                    .rows = piece->rows,
                    .row_step = rows->row_step,
                    .dim = route->config->head_dim};
}

ra_tensor ra_packed_view(const ra_route *route, const ra_piece *piece, char *packed) {
    const ra_box box = ra_piece_box(route, piece);
    int64_t rows = box.repeats * box.rows;
    return (ra_tensor){packed, box.heads.count * rows * box.dim, box.dim, rows * box.dim};
}

/* ---------------------------------------------------------------------------------------------------------- bounds */

/* Elements of K and V that messages of one channel can hold at most on this rank, by direction and hop. The distance of
 * each source tells at which hop its buckets pass here, so not every hop must be looked at. */
typedef struct channel_bound {
    int64_t kv[2];    /* held */
    int64_t chain[2]; /* gradients computed here that go on, */
    int64_t last[2];  /* or home */
    int64_t in[2];    /* gradients that arrive to be added to, */
    int64_t home[2];  /* or come home, having gone as many hops as the index says */
    int64_t items;
} channel_bound;

typedef struct bound_request {
    const ra_route *route;
    const ra_channel *channel;
    int64_t me; /* member */
    int rank;
} bound_request;

/* Raises `sums` by the elements of a source where it can pass this rank, for one direction. */
static void add_source(const ra_path *path, int64_t distance, bool down, int64_t elements, channel_bound *sums) {
    channel_bound *here = &sums[distance];
    bool kv = false, chain = false, last = false, in = false;
    for (int64_t r = 0; r < path->count; r++) {
        const ra_reach *reach = &path->reaches[r];
        if (reach->down != down || reach->hops < 1) continue;
        if (distance == 0) {
            bool seen = false; /* several slices may go equally far: one bucket holds only one of them */
            for (int64_t p = 0; p < r && !seen; p++)
                seen = path->reaches[p].down == down && path->reaches[p].hops == reach->hops;
            if (!seen) sums[reach->hops].home[down] += elements;
        }
        kv = kv || reach->hops >= distance;
        chain = chain || (distance >= 1 && reach->hops > distance && reach->first <= distance);
        last = last || (distance >= 1 && reach->hops == distance);
        in = in || (distance >= 2 && reach->hops >= distance && reach->first < distance);
    }
    here->kv[down] += kv ? elements : 0;
    here->chain[down] += chain ? elements : 0;
    here->last[down] += last ? elements : 0;
    here->in[down] += in ? elements : 0;
}

static void add_ring_bound(const bound_request *request, int32_t ring_index, channel_bound *sums) {
    const ra_ring *ring = &request->route->rings.rings[ring_index];
    const int64_t targets = ra_targets_of(ring, request->rank);
    for (int64_t s = 0; s < ring->source_count; s++) {
        ra_piece largest = {
            .ring = ring_index, .repeats = ring->bundle, .rows = ra_min(ring->cap, ring->sources[s].rows.count)};
        int64_t elements = 2 * ra_piece_elements(request->route, &largest);
        for (int down = 0; down < 2; down++) {
            int64_t gap = request->me - ring->sources[s].member, distance = ra_mod(down ? -gap : gap, ring->member_count);
            add_source(&ring->paths[s], distance, down, elements, sums);
            sums[distance].items += targets * RA_ITEMS_MAX;
        }
    }
}

static int64_t framed(int64_t elements, int64_t size) { return ra_frame_bytes_if_any(elements * size); }

/* Adds a channel's bounds to those of its round, hop by hop. */
static void add_channel_bound(const ra_route *route, int32_t hops, const channel_bound *sums, int64_t members,
                              ra_message_bounds *by_hop) {
    int64_t size = (int64_t)ra_dtype_size(route->config->dtype), grad = ra_state_size(route->config->dtype);
    for (int64_t h = 0; h < members && h <= hops; h++) {
        for (int down = 0; down < 2; down++) {
            by_hop[h].kv_bytes[0] += framed(sums[h].kv[down], size);
            by_hop[h].grad_bytes[0] += framed(sums[h].chain[down], grad) + framed(sums[h].last[down], grad);
            by_hop[h].added_bytes += framed(sums[h].in[down], grad);
            int64_t arrives = h < hops ? h + 1 : 0; /* the step after the last is the first of the next bucket */
            by_hop[arrives].home_bytes[0] += framed(sums[h].home[down], grad);
        }
        by_hop[h].step_items += sums[h].items;
    }
}

/* Everything at once: what comes from and goes to each member of each channel. */
static bool direct_bound(ra_arena *arena, const ra_route *route, const ra_own_channel *own, int64_t own_count, int rank,
                         ra_message_bounds *most) {
    int64_t size = (int64_t)ra_dtype_size(route->config->dtype), grad = ra_state_size(route->config->dtype);
    for (int64_t i = 0; i < own_count; i++) {
        const ra_channel *channel = own[i].channel;
        int64_t sources = 0;
        for (int64_t r = 0; r < channel->ring_count; r++) {
            const ra_ring *ring = &route->rings.rings[channel->rings[r]];
            sources += ring->source_count;
            most->step_items += ra_targets_of(ring, rank) * ring->source_count * RA_ITEMS_MAX;
        }
        ra_piece *pieces = ra_arena_take(arena, sources, sizeof *pieces);
        if (!pieces) return false;
        for (int64_t m = 0; m < channel->member_count; m++) {
            if (m == own[i].member) continue;
            for (int out = 0; out < 2; out++) {
                int64_t count = ra_direct_pieces(route, channel, out ? own[i].member : m, out ? m : own[i].member, pieces),
                        elements = 0;
                for (int64_t j = 0; j < count; j++) elements += 2 * ra_piece_elements(route, &pieces[j]);
                most->kv_bytes[out] += framed(elements, size);
                *(out ? &most->grad_in_bytes : &most->grad_bytes[0]) += framed(elements, grad);
            }
        }
        most->transfers += 2 * channel->member_count;
    }
    return true;
}

bool ra_message_bound(ra_arena *arena, const ra_route *route, const ra_own_channel *own, int64_t own_count, int rank,
                      ra_message_bounds *most) {
    *most = (ra_message_bounds){0};
    if (route->bucket == 0) return direct_bound(arena, route, own, own_count, rank, most);
    int64_t longest = 0;
    for (int64_t i = 0; i < own_count; i++) longest = ra_max(longest, own[i].channel->member_count);
    channel_bound *sums = ra_arena_take(arena, longest, sizeof *sums);
    ra_message_bounds *by_hop = ra_arena_take(arena, longest + 1, sizeof *by_hop);
    if (arena->failed) return false;
    for (int64_t begin = 0, end; begin < own_count; begin = end) { /* the channels of one round */
        int32_t round = own[begin].channel->round, hops = route->rounds[round].hops;
        if (hops > longest) hops = (int32_t)longest; /* no channel of this rank goes further; then its gradients come home */
        memset(by_hop, 0, (size_t)(longest + 1) * sizeof *by_hop);
        for (end = begin; end < own_count && own[end].channel->round == round; end++) {
            const ra_channel *channel = own[end].channel;
            memset(sums, 0, (size_t)channel->member_count * sizeof *sums);
            bound_request request = {route, channel, own[end].member, rank};
            for (int64_t r = 0; r < channel->ring_count; r++) add_ring_bound(&request, channel->rings[r], sums);
            add_channel_bound(route, hops, sums, channel->member_count, by_hop);
        }
        for (int32_t h = 0; h <= hops; h++) {
            most->kv_bytes[0] = most->kv_bytes[1] = ra_max(most->kv_bytes[0], by_hop[h].kv_bytes[0]);
            most->grad_bytes[0] = most->grad_bytes[1] = ra_max(most->grad_bytes[0], by_hop[h].grad_bytes[0]);
            const int64_t home = by_hop[h].home_bytes[0];
            int64_t *homes = &most->home_bytes[h == 0 ? 0 : 1 + h % 2];
            most->grad_in_bytes = ra_max(most->grad_in_bytes, by_hop[h].added_bytes + home);
            most->added_bytes = ra_max(most->added_bytes, by_hop[h].added_bytes);
            *homes = ra_max(*homes, home);
            most->step_items = ra_max(most->step_items, by_hop[h].step_items);
        }
        most->transfers = ra_max(most->transfers, 16 * (end - begin));
    }
    return true;
}
