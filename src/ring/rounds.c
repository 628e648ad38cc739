/* The ring: post the next exchange, compute, wait.
 *
 *     hop 0   pack own bucket -> A     A goes out, B comes in     compute own rows where they lie
 *     hop 1                            B goes out, A comes in     compute B
 *     hop 2                            A goes out, B comes in     compute A     ...
 *
 * Forward and backward walk it alike; in backward gradients follow one hop behind (gradients.c). */
#include "ring/rounds.h"

#include "core/dtype.h"
#include "core/status.h"

/* Bytes of a message that go on after this hop. */
static int64_t onward(const ra_pass *pass, const ra_message *message, int32_t hop) {
    const ra_plan *plan = pass->call.plan;
    return ra_message_payload(&plan->route, message, hop + 1, (int64_t)ra_dtype_size(plan->config.dtype));
}

static ra_status receive_kv(ra_pass *pass, int32_t hop) {
    const ra_messages *coming = &pass->call.entry->coming;
    for (int64_t i = 0; i < coming->count; i++) {
        const ra_message *message = &coming->list[i];
        RA_TRY(ra_call_recv_kv(&pass->call, ra_message_rank(message, -1), pass->kv[1] + message->offset,
                               onward(pass, message, hop), message->pieces, message->count));
    }
    return RA_OK;
}

/* Before anything of the step is posted: a lane follows the call once, then. */
static ra_status pack_own(ra_pass *pass) {
    const ra_messages *held = &pass->call.entry->held;
    for (int64_t i = 0; i < held->count; i++) {
        const ra_message *message = &held->list[i];
        char *packed = ra_frame_payload(pass->kv[0] + message->offset);
        for (int64_t j = 0; j < message->count && message->pieces[j].hops > 0; j++) {
            RA_TRY(ra_pack_piece(pass, &message->pieces[j], packed));
            packed += ra_rows_bytes(&pass->call, &message->pieces[j]);
        }
    }
    return RA_OK;
}

static ra_status send_kv(ra_pass *pass, int32_t hop) {
    const ra_messages *held = &pass->call.entry->held;
    for (int64_t i = 0; i < held->count; i++) {
        const ra_message *message = &held->list[i];
        char *frame = pass->kv[0] + message->offset;
        int64_t payload = onward(pass, message, hop);
        if (payload == 0) continue;
        const int next = ra_message_rank(message, 1);
        RA_TRY((hop > 0 ? ra_call_pass_on : ra_call_send)(&pass->call, next, frame, payload));
    }
    return RA_OK;
}

static void add_items(ra_pass *pass, int32_t hop) {
    const ra_messages *held = &pass->call.entry->held;
    for (int64_t i = 0; i < held->count; i++) {
        const ra_message *message = &held->list[i];
        char *packed = hop > 0 ? ra_frame_payload(pass->kv[0] + message->offset) : NULL;
        for (int64_t j = 0; j < message->count; j++) {
            if (hop == 0) {
                ra_items_home(pass, &message->pieces[j]);
            } else {
                ra_items_packed(pass, &message->pieces[j], packed, NULL);
                packed += ra_rows_bytes(&pass->call, &message->pieces[j]);
            }
        }
    }
}

/* What came is held next. */
static void rotate(ra_pass *pass) {
    ra_entry *entry = pass->call.entry;
    char *here = pass->kv[0];
    pass->kv[0] = pass->kv[1];
    pass->kv[1] = here;
    ra_messages old = entry->previous;
    entry->previous = entry->held;
    entry->held = entry->coming;
    entry->coming = old;
}

/* Hop `hop` of bucket `bucket`; with bucket == buckets, the step after the last, in which gradients still come home. */
static ra_status take_hop(ra_pass *pass, ra_gradients *gradients, const ra_round_of *round, int64_t bucket, int32_t hop,
                          bool last) {
    ra_entry *entry = pass->call.entry;
    const ra_route *route = &pass->call.plan->route;
    bool drains = bucket == round->round->buckets;
    entry->coming.count = 0;
    if (hop == 0) entry->held.count = 0;
    if (hop == 0 && !drains) ra_messages_list(route, round->own, round->own_count, bucket, 0, true, &entry->held);
    if (hop < round->round->hops && !drains)
        ra_messages_list(route, round->own, round->own_count, bucket, hop + 1, false, &entry->coming);
    if (hop == 0) RA_TRY(pack_own(pass));
    RA_TRY(receive_kv(pass, hop));
    if (gradients) RA_TRY(ra_gradients_receive(pass, gradients, round, bucket, hop));
    RA_TRY(send_kv(pass, hop));
    if (gradients) RA_TRY(ra_gradients_send(pass, gradients));
    if (gradients && hop > 0) RA_TRY(ra_gradients_items(pass, gradients, hop));
    else add_items(pass, hop);
    RA_TRY(ra_pass_compute(pass, last));
    RA_TRY(ra_call_wait(&pass->call));
    if (gradients) RA_TRY(ra_gradients_add(pass, gradients, hop));
    rotate(pass);
    return RA_OK;
}

ra_status ra_walk_rounds(ra_pass *pass) {
    const ra_plan *plan = pass->call.plan;
    const ra_view *view = &plan->view;
    ra_gradients along, *gradients = pass->backward ? ra_gradients_open(pass, &along) : NULL;
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        const ra_round_of round = {&plan->route.rounds[number], view->own + begin, end - begin};
        for (int64_t bucket = 0; bucket < round.round->buckets; bucket++)
            for (int32_t hop = 0; hop <= round.round->hops; hop++) {
                bool last = end == view->own_count && bucket == round.round->buckets - 1 && hop == round.round->hops;
                RA_TRY(take_hop(pass, gradients, &round, bucket, hop, last));
            }
        if (gradients) {
            RA_TRY(take_hop(pass, gradients, &round, round.round->buckets, 0, false));
            gradients->out_hop = 0;
        }
    }
    bool computed = pass->call.step > 0; /* if not, an empty step: the device also fills rows that no item meets */
    return pass->call.item_count > 0 || !computed ? ra_pass_compute(pass, false) : RA_OK;
}
