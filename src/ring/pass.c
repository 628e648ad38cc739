/* What comes before the first step and after the last, whatever the schedule. */
#include "ring/pass.h"

#include "core/dtype.h"
#include "core/log.h"
#include "core/status.h"
#include "ring/pack.h"
#include "ring/ring.h"

/* ---------------------------------------------------------------------------------------------------------- steps */

/* Times a step and counts it. */
static void after_step(ra_call *call, double start) {
    call->plan->stats.compute_seconds += ra_seconds() - start;
    call->plan->stats.steps++;
    ra_call_trace(call, RA_COMPUTE, -1, call->item_count, start);
    ra_log(RA_LOG_TRACE, "rank %d, %s, step %lld: %lld items", call->plan->view.rank, call->phase, (long long)call->step,
           (long long)call->item_count);
    call->item_count = 0;
    call->step++;
}

/* Do the items at hand meet every used query (key)? In a single step no two of them meet the same. */
static bool meet_all(const ra_call *call, bool queries) {
    const ra_config *c = &call->plan->config;
    const ra_view *view = &call->plan->view;
    const ra_used_rows *used = queries ? &view->used_q : &view->used_k;
    const int64_t all = used->count > 0 ? ra_used_count(used->sets, used->count)
                        : queries       ? view->rows_q * c->heads
                                        : view->rows_k * c->kv_heads;
    int64_t met = 0;
    for (int64_t i = 0; i < call->item_count; i++) {
        const ra_item *item = &call->plan->items[i];
        met += (queries ? item->q.count * (c->heads / c->kv_heads) : item->k.count) * item->heads.count * item->loop[0].repeat *
               item->loop[1].repeat;
    }
    return met == all;
}

/* May the kernel write results in this step, with nothing left to finish? */
static bool may_close(const ra_forward_pass *pass) {
    const ra_plan *plan = pass->call.plan;
    return pass->last && plan->kernel->device == RA_DEVICE_CPU && plan->view.used_q.count == 0 && pass->call.item_count == 1 &&
           meet_all(&pass->call, true);
}

ra_status ra_forward_compute(ra_forward_pass *pass) {
    double start = ra_seconds();
    pass->step.items = pass->call.plan->items;
    pass->step.item_count = pass->call.item_count;
    pass->step.closes = pass->step.single || may_close(pass);
    const ra_kernel *kernel = pass->call.plan->kernel;
    bool fills = pass->step.single && kernel->device != RA_DEVICE_CPU; /* rows without items are its affair, too */
    ra_status status = pass->call.item_count || fills ? kernel->forward(&pass->step) : RA_OK;
    after_step(&pass->call, start);
    return status;
}

ra_status ra_backward_compute(ra_backward_pass *pass) {
    double start = ra_seconds();
    pass->step.items = pass->call.plan->items;
    pass->step.item_count = pass->call.item_count;
    ra_status status = pass->call.item_count ? pass->call.plan->kernel->backward(&pass->step) : RA_OK;
    after_step(&pass->call, start);
    return status;
}

void ra_add_packed(ra_call *call, const ra_piece *pieces, int64_t count, char *packed, char *sums) {
    const ra_route *route = &call->plan->route;
    int64_t size = (int64_t)ra_dtype_size(route->config->dtype), state = ra_state_size(route->config->dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t elements = ra_piece_elements(route, &pieces[i]);
        ra_item_views views = {.k = ra_packed_view(route, &pieces[i], packed),
                               .v = ra_packed_view(route, &pieces[i], packed + elements * size)};
        packed += 2 * elements * size;
        if (sums) {
            views.dk = ra_packed_view(route, &pieces[i], sums);
            views.dv = ra_packed_view(route, &pieces[i], sums + elements * state);
            sums += 2 * elements * state;
        }
        ra_call_items_packed(call, &pieces[i], &views);
    }
}

/* -------------------------------------------------------------------------------------------------------- forward */

/* (acc, m, l) one after the other behind the header of a message. */
static void state_in_message(const ra_config *c, int64_t rows, char *message, ra_forward_step *step) {
    char *at = message + RA_LINK_HEADER;
    int64_t numbers = c->batch * rows * c->heads * ra_state_size(c->dtype);
    step->acc = ra_tensor_bnhd(at, rows, c->heads, c->head_dim);
    step->m = ra_tensor_lse(at + numbers * c->head_dim, rows, c->heads);
    step->l = ra_tensor_lse(at + numbers * (c->head_dim + 1), rows, c->heads);
}

ra_status ra_ring_forward(ra_plan *plan, const ra_forward_args *args) {
    const ra_config *c = &plan->config;
    const ra_workspace *w = &plan->forward;
    const ra_view *view = &plan->view;
    ra_forward_pass pass = {.args = args, .home = {.k = args->k, .v = args->v}};
    RA_TRY(ra_call_begin(&pass.call, plan, "forward", w->total, args->stream));
    ra_workers *workers = plan->comm->workers;
    int64_t cursor = 0;
    char *acc = ra_call_carve(&pass.call, &cursor, w->acc), *m = ra_call_carve(&pass.call, &cursor, w->m);
    char *l = ra_call_carve(&pass.call, &cursor, w->l);
    for (int i = 0; i < 2; i++) pass.buffer[i] = ra_call_carve(&pass.call, &cursor, w->kv[i]);
    for (int i = 0; i < 2; i++) pass.state[i] = ra_call_carve(&pass.call, &cursor, w->state);
    pass.step = (ra_forward_step){.problem = &plan->problem,
                                  .single = view->single,
                                  .closes = view->single,
                                  .q = args->q,
                                  .out = args->out,
                                  .lse = args->lse,
                                  .acc = acc ? ra_sums_tensor(c, view, true, acc) : args->out,
                                  .m = ra_tensor_lse(m, view->rows_q, c->heads),
                                  .l = ra_tensor_lse(l, view->rows_q, c->heads),
                                  .used = view->used_q,
                                  .stream = args->stream,
                                  .workers = workers,
                                  .scratch = ra_call_carve(&pass.call, &cursor, w->scratch),
                                  .poll = plan->comm->ranks > 1 ? ra_call_poll : NULL, /* alone: larger tiles */
                                  .poll_arg = &pass.call};
    if (w->state) { /* of all rows: it travels whole */
        state_in_message(c, view->rows_q, pass.state[0], &pass.step);
        pass.step.used.count = 0;
    }
    ra_call_items_local(&pass.call, &pass.home);
    pass.step.covered = view->single && meet_all(&pass.call, true);
    ra_status status = plan->kernel->fill(&pass.step);
    if (status == RA_OK)
        status = w->state                               ? ra_merge_forward(&pass)
                 : plan->schedule == RA_SCHEDULE_GATHER ? ra_gather_forward(&pass)
                                                        : ra_ring_rounds_forward(&pass);
    if (status == RA_OK && !pass.step.closes) status = plan->kernel->finish(&pass.step);
    return ra_call_end(&pass.call, status);
}

/* -------------------------------------------------------------------------------------------------------- backward */

static ra_gradient gradient_of(const ra_plan *plan, ra_tensor result, char *workspace, bool queries) {
    const ra_config *c = &plan->config;
    const ra_view *view = &plan->view;
    ra_gradient g = {.result = result,
                     .sums = result,
                     .rows = queries ? view->rows_q : view->rows_k,
                     .heads = queries ? c->heads : c->kv_heads,
                     .used = queries ? view->used_q : view->used_k};
    if (workspace) g.sums = ra_sums_tensor(c, view, queries, workspace);
    return g;
}

/* Will the kernel write every used row of all gradients? */
static bool writes_all(const ra_backward_pass *pass) {
    const ra_call *call = &pass->call;
    bool whole = pass->step.single;
    for (int64_t i = 0; i < call->item_count && whole; i++) whole = ra_item_whole(&call->plan->problem, &call->plan->items[i]);
    return whole && meet_all(call, true) && meet_all(call, false);
}

ra_status ra_ring_backward(ra_plan *plan, const ra_backward_args *args) {
    const ra_config *c = &plan->config;
    const ra_workspace *w = &plan->backward;
    ra_backward_pass pass = {.args = args, .size = (int64_t)ra_dtype_size(c->dtype), .state_size = ra_state_size(c->dtype)};
    RA_TRY(ra_plan_check_backward(plan));
    RA_TRY(ra_call_begin(&pass.call, plan, "backward", w->total, args->stream));
    ra_workers *workers = plan->comm->workers;
    int64_t cursor = 0;
    ra_tensor delta = ra_tensor_lse(ra_call_carve(&pass.call, &cursor, w->delta), plan->view.rows_q, c->heads);
    ra_gradient dq = gradient_of(plan, args->dq, ra_call_carve(&pass.call, &cursor, w->dq), true);
    ra_gradient dk = gradient_of(plan, args->dk, ra_call_carve(&pass.call, &cursor, w->dk), false);
    ra_gradient dv = gradient_of(plan, args->dv, ra_call_carve(&pass.call, &cursor, w->dv), false);
    for (int i = 0; i < 2; i++) pass.buffer[i] = ra_call_carve(&pass.call, &cursor, w->kv[i]);
    for (int i = 0; i < 2; i++) pass.grads[i] = ra_call_carve(&pass.call, &cursor, w->grad[i]);
    pass.grads_in = ra_call_carve(&pass.call, &cursor, w->grad_in);
    for (int i = 0; i < 2; i++) pass.state[i] = ra_call_carve(&pass.call, &cursor, w->state);
    if (w->state) { /* of all rows: it travels whole */
        dq.sums = ra_tensor_bnhd(pass.state[0] + RA_LINK_HEADER, dq.rows, dq.heads, c->head_dim);
        dq.used.count = 0;
    }
    pass.home = (ra_item_views){args->k, args->v, dk.sums, dv.sums, args->dk, args->dv};
    pass.step = (ra_backward_step){.problem = &plan->problem,
                                   .single = plan->view.single_backward,
                                   .q = args->q,
                                   .dout = args->dout,
                                   .lse = args->lse,
                                   .delta = delta,
                                   .dq = args->dq,
                                   .dq_acc = dq.sums,
                                   .stream = args->stream,
                                   .workers = workers,
                                   .scratch = ra_call_carve(&pass.call, &cursor, w->scratch),
                                   .poll = plan->comm->ranks > 1 ? ra_call_poll : NULL, /* alone: nobody to look after */
                                   .poll_arg = &pass.call};
    ra_call_items_local(&pass.call, &pass.home);
    pass.step.zeroed = !writes_all(&pass);
    const ra_backward_rows rows = {.problem = &plan->problem,
                                   .single = pass.step.single,
                                   .zeroed = pass.step.zeroed,
                                   .gradients = {dq, dk, dv},
                                   .dout = args->dout,
                                   .out = args->out,
                                   .dlse = args->dlse,
                                   .delta = delta,
                                   .used = plan->view.used_q,
                                   .stream = args->stream,
                                   .workers = workers};
    ra_status status = plan->kernel->backward_begin(&rows);
    if (status == RA_OK)
        status = w->state                               ? ra_merge_backward(&pass)
                 : plan->schedule == RA_SCHEDULE_GATHER ? ra_gather_backward(&pass)
                                                        : ra_ring_rounds_backward(&pass);
    if (status == RA_OK) status = plan->kernel->backward_end(&rows);
    return ra_call_end(&pass.call, status);
}
