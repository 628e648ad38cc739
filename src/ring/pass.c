/* The two passes: what comes before the first step and after the last, whatever the schedule. */
#include "ring/pass.h"

#include "core/alloc.h"
#include "core/status.h"
#include "geometry/join.h"
#include "ring/lane.h"
#include "ring/offload.h"

/* What a parted pass has at home, before its first step: the step's messages leave first, and travel meanwhile. */
static ra_status compute_home(ra_pass *pass) {
    const ra_call *call = &pass->call;
    const int64_t count = pass->home_items;
    if (!pass->home_waits) return RA_OK;
    pass->home_waits = false;
    pass->home_items = 0;
    return pass->forward ? call->device->forward_home(pass->forward, call->entry->items, count)
                         : call->device->backward_home(pass->backward, call->entry->items, count);
}

ra_status ra_pass_compute(ra_pass *pass, bool last) {
    ra_call *call = &pass->call;
    const int64_t home = pass->home_items;
    ra_item *items = call->entry->items + home;
    int64_t count = call->item_count - home;
    if (call->device->joins) count = ra_join_items(&call->plan->problem, items, count);
    call->item_count = home + count;
    RA_TRY(ra_lane_depart(call));
    double start = ra_seconds();
    ra_status status = compute_home(pass);
    if (status == RA_OK)
        status = pass->forward ? call->device->forward_step(pass->forward, items, count, last)
                               : call->device->backward_step(pass->backward, items, count);
    ra_call_computed(call, start);
    return status;
}

/* The next room for frames. A rank that exchanges nothing gets an empty one, in which nothing is read or written. */
static char *carve_frames(char **frames, int64_t bytes) {
    static char none[RA_FRAME_BYTES(0)];
    char *at = *frames;
    *frames += ra_round_up(bytes, RA_ALIGN);
    return bytes > 0 ? at : none;
}

/* Parts the workspace; what the device has of it comes first. */
static ra_status begin(ra_pass *pass, ra_plan *plan, const char *phase, const ra_workspace *w, void *stream, char **state,
                       char **scratch) {
    ra_call *call = &pass->call;
    RA_TRY(ra_call_prepare(ra_entry_of(plan), pass->backward != NULL));
    RA_TRY(ra_call_begin(call, ra_entry_of(plan), phase, w, stream));
    *state = ra_call_carve(call, w->state);
    *scratch = ra_call_carve(call, w->scratch);
    call->frames = call->workspace + call->carved;
    const ra_status status = ra_lane_begin(call, ra_frames_bytes(w));
    if (status != RA_OK) return ra_call_end(call, status);
    char *frames = call->frames;
    for (int i = 0; i < 2; i++) pass->kv[i] = carve_frames(&frames, w->kv[i]);
    for (int i = 0; i < 3; i++) pass->grads[i] = carve_frames(&frames, w->grad[i]);
    pass->grads_in = carve_frames(&frames, w->grad_in);
    for (int i = 0; i < 2; i++) pass->grads_home[i] = w->grad[2] > 0 ? carve_frames(&frames, w->grad_home[i]) : NULL;
    for (int i = 0; i < 2; i++) pass->travelling[i] = w->travelling > 0 ? carve_frames(&frames, w->travelling) : NULL;
    return RA_OK;
}

static ra_status walk(ra_pass *pass) {
    const ra_plan *plan = pass->call.plan;
    if (ra_merges(&plan->config, plan->view.ranks)) return ra_merge(pass);
    return plan->schedule == RA_SCHEDULE_GATHER ? ra_gather(pass) : ra_walk_rounds(pass);
}

/* Items whose keys are at home, and that meet no others: where the pass is parted, they are computed once its first messages
 * have left. */
static void take_home(ra_pass *pass, bool parted) {
    ra_items_local(pass);
    pass->home_waits = parted;
    pass->home_items = parted ? pass->call.item_count : 0;
}

/* Enqueued work goes on after a failure, and what it writes must not be taken for a result. */
static void spoil(const ra_pass *pass) {
    const ra_device_ops *device = pass->call.device;
    if (pass->call.comm->ranks == 1 || !device->forward_spoil) return;
    const ra_sentence kept = ra_sentence_keep();
    if (pass->forward) device->forward_spoil(pass->forward);
    else device->backward_spoil(pass->backward);
    ra_sentence_restore(&kept);
}

static ra_status finish(ra_pass *pass, ra_status status) {
    if (status == RA_OK) status = ra_lane_settle(&pass->call);
    if (status != RA_OK) spoil(pass);
    return ra_call_end(&pass->call, status);
}

ra_status ra_ring_forward(ra_plan *plan, const ra_forward_args *args) {
    if (plan->config.offload) return ra_offload_forward(plan, args);
    const ra_device_ops *device = plan->kernel->device;
    ra_forward_pass forward = {.kernel = plan->kernel,
                               .shape = ra_shape_of(&plan->config, &plan->view, &plan->problem, plan->kernel, false),
                               .q = args->q,
                               .out = args->out,
                               .lse = args->lse};
    ra_pass pass = {.forward = &forward, .home = {.k = args->k, .v = args->v}};
    RA_TRY(begin(&pass, plan, "forward", &plan->forward, args->stream, &forward.state, &forward.scratch));
    ra_call *call = &pass.call;
    forward.queue = call->queue;
    if (pass.travelling[0]) forward.travelling = ra_frame_payload(pass.travelling[0]);
    device->forward_lay(&forward);
    take_home(&pass, forward.shape.parted);
    ra_status status = device->forward_begin(&forward, call->entry->items, call->item_count);
    if (status == RA_OK) status = walk(&pass);
    if (status == RA_OK) status = device->forward_end(&forward);
    return finish(&pass, status);
}

ra_status ra_ring_backward(ra_plan *plan, const ra_backward_args *args) {
    const ra_device_ops *device = plan->kernel->device;
    RA_TRY(ra_plan_check_backward(plan));
    if (plan->config.offload) return ra_offload_backward(plan, args);
    ra_backward_pass backward = {.kernel = plan->kernel,
                                 .shape = ra_shape_of(&plan->config, &plan->view, &plan->problem, plan->kernel, true),
                                 .q = args->q,
                                 .out = args->out,
                                 .lse = args->lse,
                                 .dout = args->dout,
                                 .dlse = args->dlse,
                                 .dq = args->dq,
                                 .dk = args->dk,
                                 .dv = args->dv};
    ra_pass pass = {.backward = &backward};
    RA_TRY(begin(&pass, plan, "backward", &plan->backward, args->stream, &backward.state, &backward.scratch));
    ra_call *call = &pass.call;
    backward.queue = call->queue;
    if (pass.travelling[0]) backward.travelling = ra_frame_payload(pass.travelling[0]);
    device->backward_lay(&backward);
    pass.home = (ra_item_views){args->k, args->v, backward.dk_sums, backward.dv_sums, args->dk, args->dv, backward.sums_size};
    take_home(&pass, backward.shape.parted);
    ra_status status = device->backward_begin(&backward, call->entry->items, call->item_count);
    if (status == RA_OK) status = walk(&pass);
    if (status == RA_OK) status = device->backward_end(&backward);
    return finish(&pass, status);
}
