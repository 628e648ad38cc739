/* The forward ring: post the next exchange, compute, wait.
 *
 *     hop 0   pack own bucket -> A     A goes out, B comes in     compute own rows where they lie
 *     hop 1                            B goes out, A comes in     compute B
 *     hop 2                            A goes out, B comes in     compute A     ...
 */
#include "core/dtype.h"
#include "core/status.h"
#include "ring/pack.h"
#include "ring/pass.h"

/* One hop of one bucket: what is held is computed and passed on, what comes next is received. */
static ra_status take_hop(ra_forward_pass *f, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop_index,
                          int32_t hops) {
    ra_plan *plan = f->call.plan;
    const ra_route *route = &plan->route;
    int64_t size = (int64_t)ra_dtype_size(plan->config.dtype);
    char *here = f->buffer[0], *there = f->buffer[1];
    if (hop_index == 0) ra_messages_list(route, own, own_count, bucket, 0, true, &plan->held);
    if (hop_index < hops) {
        ra_messages_list(route, own, own_count, bucket, hop_index + 1, false, &plan->next_held);
        for (int64_t i = 0; i < plan->next_held.count; i++) {
            const ra_message *message = &plan->next_held.list[i];
            int64_t payload = ra_message_payload(route, message, hop_index + 1, size);
            RA_TRY(ra_call_recv_kv(&f->call, ra_message_rank(message, -1), there + message->offset, payload, message->pieces,
                                   message->count));
        }
    }
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = ra_message_payload(route, message, hop_index + 1, size);
        if (payload > 0) {
            if (hop_index == 0)
                ra_pack_message(route, message, f->args->k, f->args->v, here + message->offset + RA_LINK_HEADER);
            RA_TRY(ra_call_send(&f->call, ra_message_rank(message, 1), here + message->offset, payload));
        }
        if (hop_index > 0)
            ra_add_packed(&f->call, message->pieces, message->count, here + message->offset + RA_LINK_HEADER, NULL);
        else
            for (int64_t j = 0; j < message->count; j++) ra_call_items_home(&f->call, &message->pieces[j], &f->home);
    }
    RA_TRY(ra_forward_compute(f));
    RA_TRY(ra_call_wait(&f->call));
    f->buffer[0] = there; /* what came is held next */
    f->buffer[1] = here;
    ra_messages swap = plan->held;
    plan->held = plan->next_held;
    plan->next_held = swap;
    return RA_OK;
}

ra_status ra_ring_rounds_forward(ra_forward_pass *f) {
    const ra_plan *plan = f->call.plan;
    const ra_view *view = &plan->view;
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        const ra_round *round = &plan->route.rounds[number];
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        for (int64_t bucket = 0; bucket < round->buckets; bucket++)
            for (int32_t h = 0; h <= round->hops; h++) {
                f->last = end == view->own_count && bucket == round->buckets - 1 && h == round->hops;
                RA_TRY(take_hop(f, view->own + begin, end - begin, bucket, h, round->hops));
            }
    }
    bool computed = f->call.step > 0; /* a device kernel fills rows without items in its first step */
    return f->call.item_count > 0 || !computed ? ra_forward_compute(f) : RA_OK;
}
