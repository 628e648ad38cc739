#include "ring/call.h"

#include "core/alloc.h"
#include "core/log.h"
#include "core/status.h"
#include "ring/lane.h"
#include "ring/offload.h"
#include "ring/solo.h"

/* Tells the tracer, if there is one, about a stretch that ends now. */
static void trace(const ra_call *call, ra_activity activity, int peer, int64_t bytes, double begin) {
    const ra_comm *comm = call->comm;
    if (!comm->trace) return;
    int64_t step = activity == RA_COMPUTE ? call->step : ra_max(0, call->step - 1); /* ra_call_computed has moved it on */
    ra_trace_event event = {activity, comm->rank, peer, step, bytes, begin, ra_seconds(), call->phase};
    comm->trace(comm->trace_ctx, &event);
}

/* ---------------------------------------------------------------------------------------------------- begin and end */

/* Where the workspaces of this device come from; NULL: there is no memory for a pool. */
static ra_pool *pool_of(ra_comm *comm, const ra_device_ops *device) {
    if (!device->memory) return comm->pool;
    if (!comm->device_pool) comm->device_pool = ra_pool_create_on(device->memory);
    return comm->device_pool;
}

/* What a communicator has on a device, workspaces and streams, is of no use on another one. */
static ra_status keep_place(ra_comm *comm, const ra_device_ops *device) {
    int place = 0;
    if (!device->copies) return RA_OK;
    RA_TRY(device->copies->current(&place));
    if (!comm->placed) ra_log(RA_LOG_INFO, "rank %d computes on %s %d", comm->rank, device->name, place);
    if (comm->placed && comm->place != place)
        return ra_fail(RA_INVALID, "rank %d began on %s %d and keeps to it, but now %s %d is the current one", comm->rank,
                       device->name, comm->place, device->name, place);
    comm->placed = true;
    comm->place = place;
    return RA_OK;
}

ra_status ra_call_reserve(ra_entry *entry) {
    const ra_device_ops *device = entry->plan.kernel->device;
    if (!device->memory) return RA_OK;
    RA_TRY(keep_place(entry->comm, device));
    ra_pool *pool = pool_of(entry->comm, device);
    if (!pool) return ra_fail(RA_NOMEM, "no memory for a pool");
    RA_TRY(ra_lane_open(entry->comm, device->copies));
    if (entry->plan.config.offload) RA_TRY(ra_offload_open(device->copies, &entry->comm->offload));
    if (ra_lane_undecided(entry->comm, device->copies)) return RA_OK;
    const ra_workspace *w = &entry->plan.forward;
    RA_TRY(ra_pool_reserve(pool, w->total - ra_lane_holds(entry->comm, &entry->plan, w)));
    return ra_lane_reserve(entry->comm, entry);
}

ra_status ra_call_prepare(ra_entry *entry, bool backward) {
    ra_comm *comm = entry->comm;
    const ra_device_ops *device = entry->plan.kernel->device;
    if (!device->copies) return RA_OK;
    RA_TRY(ra_comm_usable(comm));
    const bool first = ra_lane_undecided(comm, device->copies);
    ra_status status = keep_place(comm, device); /* before a lane makes memory on it */
    if (status == RA_OK) RA_TRY(ra_lane_prepare(comm, comm->device_pool, &entry->plan, entry->frames_most[backward]));
    if (status == RA_OK && first) status = ra_call_reserve(entry);
    if (status != RA_OK) ra_link_abort(comm->link, status, ra_last_error()); /* the others have their plans already */
    return status;
}

/* Stops a step when the link breaks: its result is void, and it may take longer than a lost rank may go unreported. */
static void poll_link(void *call_) {
    ra_call *call = call_;
    if (ra_link_poll(call->comm->link)) return;
    call->dropped = true;
    ra_workers_drop(call->comm->workers, true);
}

ra_status ra_call_begin(ra_call *call, ra_entry *entry, const char *phase, const ra_workspace *workspace, void *stream) {
    ra_comm *comm = entry->comm;
    const ra_device_ops *device = entry->plan.kernel->device;
    *call = (ra_call){.entry = entry, .plan = &entry->plan, .comm = comm, .device = device, .phase = phase};
    call->queue = (ra_queue){.stream = stream, .poll_arg = call};
    if (comm->ranks > 1) call->queue.poll = poll_link; /* alone: no transfers */
    RA_TRY(ra_comm_usable(comm));
    ra_link_begin(comm->link, phase, &(ra_subject){entry->digest, entry->key, entry->shared_bytes});
    const int64_t workspace_bytes = workspace->total - ra_lane_holds(comm, &entry->plan, workspace);
    void *block = NULL;
    ra_status status = RA_OK;
    call->pool = pool_of(comm, device);
    if (comm->ranks > 1 && device->recording(&call->queue))
        status = ra_fail(RA_NOT_AVAILABLE,
                         "a call of several ranks cannot be captured into a CUDA graph: the ranks exchange messages while it "
                         "is made");
    else if (!call->pool) status = ra_fail(RA_NOMEM, "no memory for a pool");
    else status = keep_place(comm, device);
    if (status == RA_OK) status = ra_pool_take_for(call->pool, workspace_bytes, device->owner(&call->queue), &block);
    if (status == RA_OK && device->by_workers) status = ra_comm_workers(comm, entry->plan.threads);
    call->queue.workers = comm->workers;
    call->workspace = block;
    call->counts = ra_link_read(comm->link);
    entry->stats.steps = 0;
    entry->stats.compute_seconds = 0;
    return status == RA_OK ? RA_OK : ra_call_end(call, status);
}

ra_status ra_call_end(ra_call *call, ra_status status) {
    ra_comm *comm = call->comm;
    bool reusable = true;
    ra_link_end(comm->link);
    if (call->dropped) {
        ra_workers_drop(comm->workers, false);
        status = ra_link_status(comm->link);
    }
    if (status != RA_OK) {
        ra_link_abort(comm->link, status, ra_last_error());
        reusable = ra_link_cancel(comm->link, call->entry->transfers, call->transfer_count);
    }
    if (call->lane) reusable = ra_lane_end(call, status, reusable);
    if (call->device->recording(&call->queue)) reusable = false; /* the workspace belongs to the recording from now on */
    if (call->workspace && reusable) ra_pool_give(call->pool, call->workspace);
    ra_link_counts now = ra_link_read(comm->link);
    ra_stats_data *stats = &call->entry->stats;
    stats->bytes_sent = now.bytes_sent - call->counts.bytes_sent;
    stats->bytes_received = now.bytes_received - call->counts.bytes_received;
    stats->wait_seconds = now.wait_seconds - call->counts.wait_seconds;
    return status;
}

char *ra_call_carve(ra_call *call, int64_t bytes) {
    if (bytes == 0) return NULL;
    char *at = call->workspace + call->carved;
    call->carved += ra_round_up(bytes, RA_ALIGN);
    return at;
}

/* ------------------------------------------------------------------------------------------------------- messages */

static ra_transfer *next_transfer(ra_call *call) {
    if (call->transfer_count == 0) call->posted = ra_seconds();
    return &call->entry->transfers[call->transfer_count++];
}

static ra_status receive(ra_call *call, int peer, char *frame, int64_t payload, const ra_maker *maker, ra_cargo cargo) {
    ra_comm *comm = call->comm;
    if (call->lane) return ra_lane_recv(call, peer, frame, payload, maker, cargo);
    return ra_link_recv_or_make(comm->link, peer, comm->received[peer]++, call->step, frame, payload, maker,
                                next_transfer(call));
}

ra_status ra_call_recv(ra_call *call, int peer, char *frame, int64_t payload) {
    return receive(call, peer, frame, payload, NULL, RA_CARGO_OTHER);
}

ra_status ra_call_recv_late(ra_call *call, int peer, char *frame, int64_t payload) {
    return receive(call, peer, frame, payload, NULL, RA_CARGO_LATE);
}

ra_status ra_call_recv_kv(ra_call *call, int peer, char *frame, int64_t payload, const ra_piece *pieces, int64_t count) {
    const ra_queue *queue = call->lane ? &call->lane->queue : &call->queue;
    ra_made_pieces made = {&call->plan->route, pieces, count, call->comm, call->device, queue};
    return receive(call, peer, frame, payload, &(ra_maker){ra_make_pieces, &made}, RA_CARGO_KV);
}

static ra_status send(ra_call *call, int peer, char *frame, int64_t payload, ra_cargo cargo) {
    ra_comm *comm = call->comm;
    if (call->lane) return ra_lane_send(call, peer, frame, payload, cargo);
    return ra_link_send(comm->link, peer, comm->sent[peer]++, call->step, frame, payload, next_transfer(call));
}

ra_status ra_call_send(ra_call *call, int peer, char *frame, int64_t payload) {
    return send(call, peer, frame, payload, RA_CARGO_OTHER);
}

ra_status ra_call_pass_on(ra_call *call, int peer, char *frame, int64_t payload) {
    return send(call, peer, frame, payload, RA_CARGO_KV);
}

ra_status ra_call_send_late(ra_call *call, int peer, char *frame, int64_t payload) {
    return send(call, peer, frame, payload, RA_CARGO_LATE);
}

ra_status ra_call_wait(ra_call *call) {
    if (call->transfer_count == 0) return call->lane ? ra_lane_catch_up(call) : RA_OK;
    ra_transfer *transfers = call->entry->transfers;
    double begin = ra_seconds();
    RA_TRY(call->lane ? call->lane->ops->wait(call)
                      : ra_link_wait(call->comm->link, transfers, call->transfer_count, call->phase));
    trace(call, RA_WAIT, -1, 0, begin);
    for (int64_t i = 0; i < call->transfer_count; i++)
        trace(call, transfers[i].receiving ? RA_RECEIVE : RA_SEND, transfers[i].peer, transfers[i].payload, call->posted);
    call->transfer_count = 0;
    return RA_OK;
}

void ra_call_computed(ra_call *call, double start) {
    call->entry->stats.compute_seconds += ra_seconds() - start;
    call->entry->stats.steps++;
    trace(call, RA_COMPUTE, -1, call->item_count, start);
    ra_log(RA_LOG_TRACE, "rank %d, %s, step %lld: %lld items", call->plan->view.rank, call->phase, (long long)call->step,
           (long long)call->item_count);
    call->item_count = 0;
    call->step++;
}
