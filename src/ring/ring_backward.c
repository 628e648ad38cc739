/* The backward ring. K and V travel as in forward; dK and dV follow one step behind their bucket:
 *
 *     step h      compute bucket -> local      dK/dV so far -> in        those of the step before: out -> next member
 *     then        local += in                  local becomes out
 *
 * and from the last consumer straight home, where they are added to what home computed itself. The order of all sums is that of
 * the plan, never that of arrival. */
#include <string.h>

#include "core/status.h"
#include "ring/pack.h"
#include "ring/pass.h"

typedef struct backward {
    ra_backward_pass *pass;
    ra_call *call;
    char *local, *out;       /* dK and dV: of this step, of the step before */
    int32_t out_hop;         /* at which hop `out` was computed; 0: it holds nothing */
    int64_t finished_bucket; /* of which gradients come home in this step, */
    int32_t finished_hops;   /* those that went so far; 0: none */
} backward;

/* Which pieces of a message, here at some hop, have gradients that go on (chain) or home. */
static bool has_grads(const ra_piece *piece, int32_t hop, bool home) {
    return piece->first <= hop && (home ? piece->hops == hop : piece->hops > hop);
}

static int64_t piece_bytes(const backward *b, const ra_piece *piece, int64_t size) {
    return ra_piece_elements(&b->call->plan->route, piece) * size;
}

static int64_t grad_payload(const backward *b, const ra_message *message, int32_t hop, bool home) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < message->count; i++)
        if (has_grads(&message->pieces[i], hop, home)) bytes += 2 * piece_bytes(b, &message->pieces[i], b->pass->state_size);
    return bytes;
}

/* ------------------------------------------------------------------------------------------------------ K and V */

static ra_status receive_kv(backward *b, int32_t hop, char *there) {
    ra_plan *plan = b->call->plan;
    for (int64_t i = 0; i < plan->next_held.count; i++) {
        const ra_message *message = &plan->next_held.list[i];
        int64_t payload = ra_message_payload(&plan->route, message, hop + 1, b->pass->size);
        RA_TRY(ra_call_recv_kv(b->call, ra_message_rank(message, -1), there + message->offset, payload, message->pieces,
                               message->count));
    }
    return RA_OK;
}

static ra_status send_kv(backward *b, int32_t hop, char *here) {
    ra_plan *plan = b->call->plan;
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = ra_message_payload(&plan->route, message, hop + 1, b->pass->size);
        if (payload == 0) continue;
        if (hop == 0)
            ra_pack_message(&plan->route, message, b->pass->args->k, b->pass->args->v, here + message->offset + RA_LINK_HEADER);
        RA_TRY(ra_call_send(b->call, ra_message_rank(message, 1), here + message->offset, payload));
    }
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------- dK and dV */

/* Gradients of what is held now, as far as the members before computed them, then those of own buckets that come home. */
static ra_status receive_grads(backward *b, int32_t hop) {
    ra_plan *plan = b->call->plan;
    char *at = b->pass->grads_in;
    for (int64_t i = 0; hop >= 2 && i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = grad_payload(b, message, hop - 1, false);
        if (payload > 0) RA_TRY(ra_call_recv(b->call, ra_message_rank(message, -1), at, payload));
        at += ra_framed(payload);
    }
    for (int64_t i = 0; b->finished_hops > 0 && i < plan->mine.count; i++) {
        const ra_message *message = &plan->mine.list[i];
        int64_t payload = grad_payload(b, message, b->finished_hops, true);
        if (payload > 0) RA_TRY(ra_call_recv(b->call, ra_message_rank(message, b->finished_hops), at, payload));
        at += ra_framed(payload);
    }
    return RA_OK;
}

/* What was computed in the step before: first everything that goes on, then everything that goes home, as receivers expect
 * it. */
static ra_status send_grads(backward *b) {
    ra_plan *plan = b->call->plan;
    for (int home = 0; b->out_hop > 0 && home < 2; home++) {
        char *at = b->out;
        for (int64_t i = 0; i < plan->previous.count; i++) {
            const ra_message *message = &plan->previous.list[i];
            int64_t chain = grad_payload(b, message, b->out_hop, false), last = grad_payload(b, message, b->out_hop, true);
            if (!home && chain > 0) RA_TRY(ra_call_send(b->call, ra_message_rank(message, 1), at, chain));
            at += ra_framed(chain);
            int source = message->own->channel->members[message->source];
            if (home && last > 0) RA_TRY(ra_call_send(b->call, source, at, last));
            at += ra_framed(last);
        }
    }
    return RA_OK;
}

/* Items of what is held, with their gradients in `local`, laid out as send_grads will find them. */
static void add_held(backward *b, int32_t hop, char *here) {
    ra_plan *plan = b->call->plan;
    char *at = b->local;
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        char *packed = here + message->offset + RA_LINK_HEADER;
        int64_t chain = ra_framed(grad_payload(b, message, hop, false)), last = ra_framed(grad_payload(b, message, hop, true));
        char *sums[2] = {at + RA_LINK_HEADER, at + chain + RA_LINK_HEADER}; /* on, home */
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            int64_t bytes = piece_bytes(b, piece, b->pass->size), sum_bytes = piece_bytes(b, piece, b->pass->state_size);
            bool home = piece->hops == hop;
            if (has_grads(piece, hop, home)) {
                memset(sums[home], 0, (size_t)(2 * sum_bytes));
                ra_item_views views = {.k = ra_packed_view(&plan->route, piece, packed),
                                       .v = ra_packed_view(&plan->route, piece, packed + bytes),
                                       .dk = ra_packed_view(&plan->route, piece, sums[home]),
                                       .dv = ra_packed_view(&plan->route, piece, sums[home] + sum_bytes)};
                ra_call_items_packed(b->call, piece, &views);
                sums[home] += 2 * sum_bytes;
            }
            packed += 2 * bytes;
        }
        at += chain + last;
    }
}

/* local += in, and what came home is added at home. */
static void add_grads(backward *b, int32_t hop) {
    ra_plan *plan = b->call->plan;
    char *in = b->pass->grads_in, *at = b->local;
    for (int64_t i = 0; hop >= 2 && i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = grad_payload(b, message, hop - 1, false);
        int64_t chain = ra_framed(grad_payload(b, message, hop, false)), last = ra_framed(grad_payload(b, message, hop, true));
        char *sums[2] = {at + RA_LINK_HEADER, at + chain + RA_LINK_HEADER};
        char *came = in + RA_LINK_HEADER;
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            bool home = piece->hops == hop;
            int64_t bytes = 2 * piece_bytes(b, piece, b->pass->state_size);
            if (!has_grads(piece, hop, home)) continue;
            if (has_grads(piece, hop - 1, false)) {
                ra_add_sums(plan->config.dtype, sums[home], came, bytes / b->pass->state_size);
                came += bytes;
            }
            sums[home] += bytes;
        }
        in += ra_framed(payload);
        at += chain + last;
    }
    for (int64_t i = 0; b->finished_hops > 0 && i < plan->mine.count; i++) {
        const ra_message *message = &plan->mine.list[i];
        char *came = in + RA_LINK_HEADER;
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            if (!has_grads(piece, b->finished_hops, true)) continue;
            int64_t bytes = piece_bytes(b, piece, b->pass->state_size);
            ra_unpack_add(&plan->route, piece, came, b->pass->home.dk);
            ra_unpack_add(&plan->route, piece, came + bytes, b->pass->home.dv);
            came += 2 * bytes;
        }
        in += ra_framed(grad_payload(b, message, b->finished_hops, true));
    }
}

/* ---------------------------------------------------------------------------------------------------------- steps */

static void rotate(backward *b, int32_t hop) {
    ra_plan *plan = b->call->plan;
    char *swap = b->local;
    b->local = b->out;
    b->out = swap;
    b->out_hop = hop;
    char *held = b->pass->buffer[0];
    b->pass->buffer[0] = b->pass->buffer[1];
    b->pass->buffer[1] = held;
    ra_messages old = plan->previous;
    plan->previous = plan->held;
    plan->held = plan->next_held;
    plan->next_held = old;
}

/* Hop `hop` of bucket `bucket`; with bucket == buckets, the step after the last, in which gradients still come home. */
static ra_status take_hop(backward *b, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop,
                          const ra_round *round) {
    ra_plan *plan = b->call->plan;
    const ra_route *route = &plan->route;
    char *here = b->pass->buffer[0], *there = b->pass->buffer[1];
    bool draining = bucket == round->buckets;
    b->finished_hops = hop >= 2 ? hop - 1 : (hop == 0 && bucket > 0 ? round->hops : 0);
    b->finished_bucket = hop >= 2 ? bucket : bucket - 1;
    plan->next_held.count = 0;
    if (hop == 0) plan->held.count = 0;
    if (hop == 0 && !draining) ra_messages_list(route, own, own_count, bucket, 0, true, &plan->held);
    if (hop < round->hops && !draining) ra_messages_list(route, own, own_count, bucket, hop + 1, false, &plan->next_held);
    if (b->finished_hops > 0) ra_messages_list(route, own, own_count, b->finished_bucket, 0, false, &plan->mine);
    RA_TRY(receive_kv(b, hop, there));
    RA_TRY(receive_grads(b, hop));
    RA_TRY(send_kv(b, hop, here));
    RA_TRY(send_grads(b));
    if (hop > 0) add_held(b, hop, here);
    else
        for (int64_t i = 0; i < plan->held.count; i++)
            for (int64_t j = 0; j < plan->held.list[i].count; j++)
                ra_call_items_home(b->call, &plan->held.list[i].pieces[j], &b->pass->home);
    RA_TRY(ra_backward_compute(b->pass));
    RA_TRY(ra_call_wait(b->call));
    add_grads(b, hop);
    rotate(b, hop);
    return RA_OK;
}

ra_status ra_ring_rounds_backward(ra_backward_pass *pass) {
    /* Where gradients would lie on a rank that only passes rows on: nothing is read or written there. */
    static char none[RA_LINK_HEADER];
    for (int i = 0; i < 2; i++)
        if (!pass->grads[i]) pass->grads[i] = none;
    if (!pass->grads_in) pass->grads_in = none;
    backward ring = {.pass = pass, .call = &pass->call, .local = pass->grads[0], .out = pass->grads[1]}, *b = &ring;
    const ra_plan *plan = b->call->plan;
    const ra_view *view = &plan->view;
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        const ra_round *round = &plan->route.rounds[number];
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        for (int64_t bucket = 0; bucket < round->buckets; bucket++)
            for (int32_t h = 0; h <= round->hops; h++) RA_TRY(take_hop(b, view->own + begin, end - begin, bucket, h, round));
        RA_TRY(take_hop(b, view->own + begin, end - begin, round->buckets, 0, round));
        b->out_hop = 0;
    }
    return b->call->item_count > 0 ? ra_backward_compute(b->pass) : RA_OK;
}
