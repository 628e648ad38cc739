/* The backward ring. K and V travel as in forward; dK and dV follow one step behind their bucket:
 *
 *     step h      compute bucket -> local      dK/dV so far -> in        those of the step before: out -> next member
 *     then        local += in                  local becomes out
 *
 * and from the last consumer straight home, where they are added to what home computed itself. The order of all sums is that of
 * the plan, never that of arrival. */
#include <string.h>

#include "core/dtype.h"
#include "core/status.h"
#include "kernels/rows.h"
#include "ring/call.h"
#include "ring/pack.h"
#include "ring/ring.h"

typedef struct backward {
    ra_call call;
    const ra_backward_args *args;
    ra_backward_step step;
    ra_item_views home;
    char *buffer[2]; /* K and V */
    int turn;
    char *local, *out, *in;     /* dK and dV */
    int32_t out_hop;            /* at which hop `out` was computed; 0: it holds nothing */
    int64_t finished_bucket;    /* of which gradients come home in this step, */
    int32_t finished_hops;      /* those that went so far; 0: none */
    int64_t size, state;        /* bytes of an element of k, of dk */
} backward;

static int64_t framed(int64_t payload) { return payload ? ra_round_up(RA_LINK_HEADER + payload, 64) : 0; }

/* Which pieces of a message, here at some hop, have gradients that go on (chain) or home. */
static bool has_grads(const ra_piece *piece, int32_t hop, bool home) {
    return piece->first <= hop && (home ? piece->hops == hop : piece->hops > hop);
}

static int64_t piece_bytes(const backward *b, const ra_piece *piece, int64_t size) {
    return ra_piece_elements(&b->call.plan->route, piece) * size;
}

static int64_t grad_payload(const backward *b, const ra_message *message, int32_t hop, bool home) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < message->count; i++)
        if (has_grads(&message->pieces[i], hop, home)) bytes += 2 * piece_bytes(b, &message->pieces[i], b->state);
    return bytes;
}

static ra_status compute(backward *b) {
    ra_call *call = &b->call;
    b->step.items = call->plan->items;
    b->step.item_count = call->item_count;
    double start = ra_seconds();
    ra_status status = call->item_count ? call->plan->kernel->backward(&b->step) : RA_OK;
    call->plan->stats.compute_seconds += ra_seconds() - start;
    call->plan->stats.steps++;
    call->item_count = 0;
    call->step++;
    return status;
}

/* ------------------------------------------------------------------------------------------------------ K and V */

static ra_status receive_kv(backward *b, int32_t hop, char *there) {
    ra_plan *plan = b->call.plan;
    for (int64_t i = 0; i < plan->next_held.count; i++) {
        const ra_message *message = &plan->next_held.list[i];
        int64_t payload = ra_message_payload(&plan->route, message, hop + 1, b->size);
        RA_TRY(ra_call_recv(&b->call, ra_message_rank(message, -1), there + message->offset, payload));
    }
    return RA_OK;
}

static ra_status send_kv(backward *b, int32_t hop, char *here) {
    ra_plan *plan = b->call.plan;
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = ra_message_payload(&plan->route, message, hop + 1, b->size);
        if (payload == 0) continue;
        if (hop == 0) ra_pack_message(&plan->route, message, b->args->k, b->args->v, here + message->offset + RA_LINK_HEADER);
        RA_TRY(ra_call_send(&b->call, ra_message_rank(message, 1), here + message->offset, payload));
    }
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------- dK and dV */

/* Gradients of what is held now, as far as the members before computed them, then those of own buckets that come home. */
static ra_status receive_grads(backward *b, int32_t hop) {
    ra_plan *plan = b->call.plan;
    char *at = b->in;
    for (int64_t i = 0; hop >= 2 && i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = grad_payload(b, message, hop - 1, false);
        if (payload > 0) RA_TRY(ra_call_recv(&b->call, ra_message_rank(message, -1), at, payload));
        at += framed(payload);
    }
    for (int64_t i = 0; b->finished_hops > 0 && i < plan->mine.count; i++) {
        const ra_message *message = &plan->mine.list[i];
        int64_t payload = grad_payload(b, message, b->finished_hops, true);
        if (payload > 0) RA_TRY(ra_call_recv(&b->call, ra_message_rank(message, b->finished_hops), at, payload));
        at += framed(payload);
    }
    return RA_OK;
}

/* What was computed in the step before: first everything that goes on, then everything that goes home, as receivers expect it. */
static ra_status send_grads(backward *b) {
    ra_plan *plan = b->call.plan;
    for (int home = 0; b->out_hop > 0 && home < 2; home++) {
        char *at = b->out;
        for (int64_t i = 0; i < plan->previous.count; i++) {
            const ra_message *message = &plan->previous.list[i];
            int64_t chain = grad_payload(b, message, b->out_hop, false), last = grad_payload(b, message, b->out_hop, true);
            if (!home && chain > 0) RA_TRY(ra_call_send(&b->call, ra_message_rank(message, 1), at, chain));
            at += framed(chain);
            int source = message->own->channel->members[message->source];
            if (home && last > 0) RA_TRY(ra_call_send(&b->call, source, at, last));
            at += framed(last);
        }
    }
    return RA_OK;
}

/* Items of what is held, with their gradients in `local`, laid out as send_grads will find them. */
static void add_held(backward *b, int32_t hop, char *here) {
    ra_plan *plan = b->call.plan;
    char *at = b->local;
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        char *packed = here + message->offset + RA_LINK_HEADER;
        int64_t chain = framed(grad_payload(b, message, hop, false)), last = framed(grad_payload(b, message, hop, true));
        char *sums[2] = {at + RA_LINK_HEADER, at + chain + RA_LINK_HEADER}; /* on, home */
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            int64_t bytes = piece_bytes(b, piece, b->size), sum_bytes = piece_bytes(b, piece, b->state);
            bool home = piece->hops == hop;
            if (has_grads(piece, hop, home)) {
                memset(sums[home], 0, (size_t)(2 * sum_bytes));
                ra_item_views views = {.k = ra_packed_view(&plan->route, piece, packed),
                                       .v = ra_packed_view(&plan->route, piece, packed + bytes),
                                       .dk = ra_packed_view(&plan->route, piece, sums[home]),
                                       .dv = ra_packed_view(&plan->route, piece, sums[home] + sum_bytes)};
                ra_call_items_packed(&b->call, piece, &views);
                sums[home] += 2 * sum_bytes;
            }
            packed += 2 * bytes;
        }
        at += chain + last;
    }
}

/* local += in, and what came home is added at home. */
static void add_grads(backward *b, int32_t hop) {
    ra_plan *plan = b->call.plan;
    char *in = b->in, *at = b->local;
    for (int64_t i = 0; hop >= 2 && i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = grad_payload(b, message, hop - 1, false);
        int64_t chain = framed(grad_payload(b, message, hop, false)), last = framed(grad_payload(b, message, hop, true));
        char *sums[2] = {at + RA_LINK_HEADER, at + chain + RA_LINK_HEADER};
        char *came = in + RA_LINK_HEADER;
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            bool home = piece->hops == hop;
            int64_t bytes = 2 * piece_bytes(b, piece, b->state);
            if (!has_grads(piece, hop, home)) continue;
            if (has_grads(piece, hop - 1, false)) {
                ra_add_sums(plan->config.dtype, sums[home], came, bytes / b->state);
                came += bytes;
            }
            sums[home] += bytes;
        }
        in += framed(payload);
        at += chain + last;
    }
    for (int64_t i = 0; b->finished_hops > 0 && i < plan->mine.count; i++) {
        const ra_message *message = &plan->mine.list[i];
        char *came = in + RA_LINK_HEADER;
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            if (!has_grads(piece, b->finished_hops, true)) continue;
            int64_t bytes = piece_bytes(b, piece, b->state);
            ra_unpack_add(&plan->route, piece, came, b->home.dk);
            ra_unpack_add(&plan->route, piece, came + bytes, b->home.dv);
            came += 2 * bytes;
        }
        in += framed(grad_payload(b, message, b->finished_hops, true));
    }
}

/* ---------------------------------------------------------------------------------------------------------- steps */

static void rotate(backward *b, int32_t hop) {
    ra_plan *plan = b->call.plan;
    char *swap = b->local;
    b->local = b->out;
    b->out = swap;
    b->out_hop = hop;
    b->turn = !b->turn;
    ra_messages old = plan->previous;
    plan->previous = plan->held;
    plan->held = plan->next_held;
    plan->next_held = old;
}

/* Hop `hop` of bucket `bucket`; with bucket == buckets, the step after the last, in which gradients still come home. */
static ra_status take_hop(backward *b, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop, const ra_round *round) {
    ra_plan *plan = b->call.plan;
    const ra_route *route = &plan->route;
    char *here = b->buffer[b->turn], *there = b->buffer[!b->turn];
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
                ra_call_items_home(&b->call, &plan->held.list[i].pieces[j], &b->home);
    RA_TRY(compute(b));
    RA_TRY(ra_call_wait(&b->call));
    add_grads(b, hop);
    rotate(b, hop);
    return RA_OK;
}

static ra_status go_round(backward *b) {
    const ra_plan *plan = b->call.plan;
    const ra_view *view = &plan->view;
    ra_call_items_local(&b->call, &b->home);
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        const ra_round *round = &plan->route.rounds[number];
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        for (int64_t bucket = 0; bucket < round->buckets; bucket++)
            for (int32_t h = 0; h <= round->hops; h++) RA_TRY(take_hop(b, view->own + begin, end - begin, bucket, h, round));
        RA_TRY(take_hop(b, view->own + begin, end - begin, round->buckets, 0, round));
        b->out_hop = 0;
    }
    return b->call.item_count > 0 ? compute(b) : RA_OK;
}

/* --------------------------------------------------------------------------------------------------------- the call */

/* Sums of 16-bit gradients live in the workspace, the others in the gradients themselves. */
static ra_tensor sums_of(ra_tensor gradient, char *workspace, int64_t rows, int64_t heads, int64_t dim) {
    return workspace ? ra_tensor_bnhd(workspace, rows, heads, dim) : gradient;
}

static void zero(const ra_plan *plan, ra_tensor sums, int64_t rows, int64_t heads) {
    ra_problem shape = plan->problem;
    shape.rows_q = rows;
    shape.heads = heads;
    shape.dtype = plan->config.dtype == RA_F64 ? RA_F64 : RA_F32;
    ra_tensor none = {0};
    ra_rows_fill(&shape, plan->comm->workers, true, sums, none, none, none, none);
}

ra_status ra_ring_backward(ra_plan *plan, const ra_backward_args *args) {
    const ra_config *c = &plan->config;
    const ra_workspace *w = &plan->backward;
    int64_t rows_q = plan->view.rows_q, rows_k = plan->view.rows_k, dim = c->head_dim;
    backward b = {.args = args, .size = (int64_t)ra_dtype_size(c->dtype), .state = ra_state_size(c->dtype)};
    RA_TRY(ra_call_begin(&b.call, plan, "backward", w->total));
    int64_t cursor = 0;
    ra_tensor delta = ra_tensor_lse(ra_call_carve(&b.call, &cursor, w->delta), rows_q, c->heads);
    ra_tensor dq = sums_of(args->dq, ra_call_carve(&b.call, &cursor, w->dq), rows_q, c->heads, dim);
    ra_tensor dk = sums_of(args->dk, ra_call_carve(&b.call, &cursor, w->dk), rows_k, c->kv_heads, dim);
    ra_tensor dv = sums_of(args->dv, ra_call_carve(&b.call, &cursor, w->dv), rows_k, c->kv_heads, dim);
    for (int i = 0; i < 2; i++) b.buffer[i] = ra_call_carve(&b.call, &cursor, w->kv);
    b.local = ra_call_carve(&b.call, &cursor, w->grad);
    b.out = ra_call_carve(&b.call, &cursor, w->grad);
    b.in = ra_call_carve(&b.call, &cursor, w->grad_in);
    b.home = (ra_item_views){args->k, args->v, dk, dv};
    ra_workers *workers = plan->comm->workers;
    b.step = (ra_backward_step){.problem = &plan->problem,
                                .q = args->q,
                                .dout = args->dout,
                                .lse = args->lse,
                                .delta = delta,
                                .dq_acc = dq,
                                .stream = args->stream,
                                .workers = workers,
                                .scratch = ra_call_carve(&b.call, &cursor, w->scratch),
                                .poll = ra_call_poll,
                                .poll_arg = &b.call};
    zero(plan, dq, rows_q, c->heads);
    zero(plan, dk, rows_k, c->kv_heads);
    zero(plan, dv, rows_k, c->kv_heads);
    ra_rows_delta(&plan->problem, workers, args->dout, args->out, args->dlse, delta);
    ra_status status = go_round(&b);
    if (status == RA_OK && w->dq) ra_rows_convert(&plan->problem, workers, args->dq, dq, rows_q, c->heads);
    if (status == RA_OK && w->dk) ra_rows_convert(&plan->problem, workers, args->dk, dk, rows_k, c->kv_heads);
    if (status == RA_OK && w->dv) ra_rows_convert(&plan->problem, workers, args->dv, dv, rows_k, c->kv_heads);
    return ra_call_end(&b.call, status);
}
