/* The forward ring: post the next exchange, compute, wait.
 *
 *     hop 0   pack own bucket -> A     A goes out, B comes in     compute own rows where they lie
 *     hop 1                            B goes out, A comes in     compute B
 *     hop 2                            A goes out, B comes in     compute A     ...
 */
#include "core/dtype.h"
#include "core/status.h"
#include "kernels/rows.h"
#include "ring/call.h"
#include "ring/pack.h"
#include "ring/ring.h"

typedef struct forward {
    ra_call call;
    const ra_forward_args *args;
    ra_forward_step step;
    ra_item_views home;
    char *buffer[2];
    int turn; /* which buffer holds the bucket that is computed now */
} forward;

static ra_status compute(forward *f) {
    ra_call *call = &f->call;
    f->step.items = call->plan->items;
    f->step.item_count = call->item_count;
    double start = ra_seconds();
    ra_status status = call->item_count ? call->plan->kernel->forward(&f->step) : RA_OK;
    call->plan->stats.compute_seconds += ra_seconds() - start;
    call->plan->stats.steps++;
    call->item_count = 0;
    call->step++;
    return status;
}

/* The packed pieces of a message lie behind its header, one after the other. */
static void add_message(forward *f, const ra_message *message, char *buffer) {
    ra_plan *plan = f->call.plan;
    char *packed = buffer + message->offset + RA_LINK_HEADER;
    for (int64_t i = 0; i < message->count; i++) {
        const ra_piece *piece = &message->pieces[i];
        int64_t bytes = ra_piece_elements(&plan->route, piece) * (int64_t)ra_dtype_size(plan->config.dtype);
        ra_item_views views = {.k = ra_packed_view(&plan->route, piece, packed),
                               .v = ra_packed_view(&plan->route, piece, packed + bytes)};
        ra_call_items_packed(&f->call, piece, &views);
        packed += 2 * bytes;
    }
}

/* One hop of one bucket: what is held is computed and passed on, what comes next is received. */
static ra_status take_hop(forward *f, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop_index, int32_t hops) {
    ra_plan *plan = f->call.plan;
    const ra_route *route = &plan->route;
    int64_t size = (int64_t)ra_dtype_size(plan->config.dtype);
    char *here = f->buffer[f->turn], *there = f->buffer[!f->turn];
    if (hop_index == 0) ra_messages_list(route, own, own_count, bucket, 0, true, &plan->held);
    if (hop_index < hops) {
        ra_messages_list(route, own, own_count, bucket, hop_index + 1, false, &plan->next_held);
        for (int64_t i = 0; i < plan->next_held.count; i++) {
            const ra_message *message = &plan->next_held.list[i];
            int64_t payload = ra_message_payload(route, message, hop_index + 1, size);
            RA_TRY(ra_call_recv(&f->call, ra_message_rank(message, -1), there + message->offset, payload));
        }
    }
    for (int64_t i = 0; i < plan->held.count; i++) {
        const ra_message *message = &plan->held.list[i];
        int64_t payload = ra_message_payload(route, message, hop_index + 1, size);
        if (payload > 0) {
            if (hop_index == 0) ra_pack_message(route, message, f->args->k, f->args->v, here + message->offset + RA_LINK_HEADER);
            RA_TRY(ra_call_send(&f->call, ra_message_rank(message, 1), here + message->offset, payload));
        }
        if (hop_index > 0) add_message(f, message, here);
        else
            for (int64_t j = 0; j < message->count; j++) ra_call_items_home(&f->call, &message->pieces[j], &f->home);
    }
    RA_TRY(compute(f));
    RA_TRY(ra_call_wait(&f->call));
    f->turn = !f->turn;
    ra_messages swap = plan->held;
    plan->held = plan->next_held;
    plan->next_held = swap;
    return RA_OK;
}

static ra_status go_round(forward *f) {
    const ra_plan *plan = f->call.plan;
    const ra_view *view = &plan->view;
    ra_call_items_local(&f->call, &f->home);
    for (int64_t begin = 0, end; begin < view->own_count; begin = end) {
        int32_t number = view->own[begin].channel->round;
        const ra_round *round = &plan->route.rounds[number];
        for (end = begin; end < view->own_count && view->own[end].channel->round == number;) end++;
        for (int64_t bucket = 0; bucket < round->buckets; bucket++)
            for (int32_t h = 0; h <= round->hops; h++)
                RA_TRY(take_hop(f, view->own + begin, end - begin, bucket, h, round->hops));
    }
    return f->call.item_count > 0 ? compute(f) : RA_OK;
}

ra_status ra_ring_forward(ra_plan *plan, const ra_forward_args *args) {
    const ra_config *c = &plan->config;
    const ra_workspace *w = &plan->forward;
    const ra_view *view = &plan->view;
    forward f = {.args = args, .home = {.k = args->k, .v = args->v}};
    RA_TRY(ra_call_begin(&f.call, plan, "forward", w->total));
    int64_t cursor = 0;
    char *acc = ra_call_carve(&f.call, &cursor, w->acc), *m = ra_call_carve(&f.call, &cursor, w->m);
    char *l = ra_call_carve(&f.call, &cursor, w->l);
    for (int i = 0; i < 2; i++) f.buffer[i] = ra_call_carve(&f.call, &cursor, w->kv);
    f.step = (ra_forward_step){.problem = &plan->problem,
                               .single = view->single,
                               .q = args->q,
                               .out = args->out,
                               .lse = args->lse,
                               .acc = acc ? ra_tensor_bnhd(acc, view->rows_q, c->heads, c->head_dim) : args->out,
                               .m = ra_tensor_lse(m, view->rows_q, c->heads),
                               .l = ra_tensor_lse(l, view->rows_q, c->heads),
                               .stream = args->stream,
                               .workers = plan->comm->workers,
                               .scratch = ra_call_carve(&f.call, &cursor, w->scratch),
                               .poll = ra_call_poll,
                               .poll_arg = &f.call};
    ra_workers *workers = plan->comm->workers;
    ra_rows_fill(&plan->problem, workers, view->single, args->out, args->lse, f.step.acc, f.step.m, f.step.l);
    ra_status status = go_round(&f);
    if (status == RA_OK && !view->single)
        ra_rows_finish(&plan->problem, workers, f.step.acc, f.step.m, f.step.l, args->out, args->lse);
    return ra_call_end(&f.call, status);
}
