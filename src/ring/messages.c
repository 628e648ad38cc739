#include "ring/messages.h"

#include "core/dtype.h"
#include "transport/link.h"

static int64_t framed(int64_t payload) { return ra_round_up(RA_LINK_HEADER + payload, 64); }

bool ra_messages_create(ra_arena *arena, const ra_own_channel *own, int64_t own_count, ra_messages *messages) {
    *messages = (ra_messages){.list = ra_arena_take(arena, 2 * own_count, sizeof(ra_message))};
    if (!messages->list) return false;
    int64_t most = 0; /* pieces of a message, over all channels: lists are reused from round to round */
    for (int64_t i = 0; i < own_count; i++) {
        const ra_channel *channel = own[i].channel;
        for (int64_t m = 0; m < channel->member_count; m++) most = ra_max(most, channel->first_ref[m + 1] - channel->first_ref[m]);
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

void ra_messages_list(const ra_route *route, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop, bool all,
                      ra_messages *messages) {
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
            messages->bytes += payload ? framed(payload) : 0;
            messages->count++;
        }
}

/* ---------------------------------------------------------------------------------------------------------- bounds */

/* Elements of K and V that the sources of a member can send at most in one direction, with hops in [low, high] and, where asked for,
 * the first consumer at most first_most away. */
static int64_t bound_elements(const ra_route *route, const ra_channel *channel, int64_t member, bool down, int32_t low, int32_t high,
                              int32_t first_most) {
    int64_t elements = 0;
    for (int64_t i = channel->first_ref[member]; i < channel->first_ref[member + 1]; i++) {
        ra_source_ref ref = channel->refs[i];
        const ra_ring *ring = &route->rings.rings[ref.ring];
        const ra_path *path = &ring->paths[ref.source];
        bool some = false;
        for (int64_t r = 0; r < path->count && !some; r++) {
            const ra_reach *reach = &path->reaches[r];
            some = reach->down == down && reach->hops >= low && reach->hops <= high && reach->first <= first_most;
        }
        if (!some) continue;
        ra_piece largest = {.ring = ref.ring,
                            .source = ref.source,
                            .repeats = ring->bundle,
                            .rows = ra_min(ring->cap, ring->sources[ref.source].rows.count)};
        elements += 2 * ra_piece_elements(route, &largest);
    }
    return elements;
}

static int64_t bound_items(const ra_route *route, const ra_channel *channel, int64_t member, int rank) {
    int64_t items = 0;
    for (int64_t i = channel->first_ref[member]; i < channel->first_ref[member + 1]; i++) {
        const ra_ring *ring = &route->rings.rings[channel->refs[i].ring];
        for (int64_t t = 0; t < ring->target_count; t++)
            if (ring->targets[t].rank == rank) items += RA_ITEMS_MAX;
    }
    return items;
}

static int64_t framed_if(int64_t elements, int64_t size) { return elements ? framed(elements * size) : 0; }

ra_message_bounds ra_message_bound(const ra_route *route, const ra_own_channel *own, int64_t own_count, int rank) {
    ra_message_bounds most = {0};
    int64_t size = (int64_t)ra_dtype_size(route->config->dtype), grad = ra_state_size(route->config->dtype);
    for (int64_t begin = 0, end; begin < own_count; begin = end) { /* the channels of one round */
        const ra_round *round = &route->rounds[own[begin].channel->round];
        for (end = begin; end < own_count && own[end].channel->round == own[begin].channel->round;) end++;
        for (int32_t hop = 0; hop <= round->hops; hop++) {
            ra_message_bounds here = {0};
            for (int64_t i = begin; i < end; i++) {
                const ra_channel *channel = own[i].channel;
                int64_t me = own[i].member;
                if (hop < channel->member_count) {
                    for (int down = 0; down < 2; down++) {
                        int64_t source = ra_member_at(channel, me, -hop, down);
                        here.kv_bytes += framed_if(bound_elements(route, channel, source, down, hop > 1 ? hop : 1, INT32_MAX, INT32_MAX), size);
                        if (hop >= 1) {
                            here.grad_bytes += framed_if(bound_elements(route, channel, source, down, hop + 1, INT32_MAX, hop), grad);
                            here.grad_bytes += framed_if(bound_elements(route, channel, source, down, hop, hop, hop), grad);
                        }
                        if (hop >= 2)
                            here.grad_in_bytes += framed_if(bound_elements(route, channel, source, down, hop, INT32_MAX, hop - 1), grad);
                    }
                    here.step_items += bound_items(route, channel, ra_member_at(channel, me, hop, true), rank);
                    if (hop > 0) here.step_items += bound_items(route, channel, ra_member_at(channel, me, hop, false), rank);
                }
                int32_t finished = hop >= 2 ? hop - 1 : (hop == 0 ? round->hops : 0); /* whose gradients come home now */
                for (int down = 0; down < 2 && finished > 0; down++)
                    here.grad_in_bytes += framed_if(bound_elements(route, channel, me, down, finished, finished, INT32_MAX), grad);
            }
            most.kv_bytes = ra_max(most.kv_bytes, here.kv_bytes);
            most.grad_bytes = ra_max(most.grad_bytes, here.grad_bytes);
            most.grad_in_bytes = ra_max(most.grad_in_bytes, here.grad_in_bytes);
            most.step_items = ra_max(most.step_items, here.step_items);
        }
        most.transfers = ra_max(most.transfers, 16 * (end - begin));
    }
    return most;
}
