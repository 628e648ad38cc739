#include "ring/call.h"

#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/status.h"
#include "ring/pack.h"

double ra_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void ra_call_trace(const ra_call *call, ra_activity activity, int peer, int64_t bytes, double begin) {
    const ra_comm *comm = call->plan->comm;
    if (!comm->trace) return;
    int64_t step = activity == RA_COMPUTE ? call->step : ra_max(0, call->step - 1); /* computing has moved on to the next */
    ra_trace_event event = {activity, comm->rank, peer, step, bytes, begin, ra_seconds(), call->phase};
    comm->trace(comm->trace_ctx, &event);
}

/* Where the workspaces of this kernel come from; NULL: there is no memory for a pool. */
static ra_pool *pool_of(ra_comm *comm, const ra_kernel *kernel) {
    if (kernel->device == RA_DEVICE_CPU) return comm->pool;
    if (!comm->device_pool) comm->device_pool = ra_pool_create_on(kernel->memory);
    return comm->device_pool;
}

/* Work of a device runs on after the call, so that its workspace is its stream's until then. */
static const void *owner_of(const ra_call *call) {
    static const char default_stream;
    if (call->plan->kernel->device == RA_DEVICE_CPU) return NULL;
    return call->stream ? call->stream : &default_stream;
}

ra_status ra_call_reserve(ra_comm *comm, const ra_plan *plan) {
    if (plan->kernel->device == RA_DEVICE_CPU) return RA_OK;
    ra_pool *pool = pool_of(comm, plan->kernel);
    return pool ? ra_pool_reserve(pool, plan->forward.total) : ra_fail(RA_NOMEM, "no memory for a pool");
}

ra_status ra_call_begin(ra_call *call, ra_plan *plan, const char *phase, int64_t workspace_bytes, void *stream) {
    ra_comm *comm = plan->comm;
    *call = (ra_call){.plan = plan, .phase = phase, .stream = stream};
    RA_TRY(ra_comm_usable(comm));
    ra_link_begin(comm->link, phase, &(ra_subject){plan->digest, plan->key, plan->shared_bytes});
    void *block = NULL;
    call->pool = pool_of(comm, plan->kernel);
    ra_status status = call->pool ? ra_pool_take_for(call->pool, workspace_bytes, owner_of(call), &block)
                                  : ra_fail(RA_NOMEM, "no memory for a pool");
    if (status == RA_OK && plan->kernel->device == RA_DEVICE_CPU) status = ra_comm_workers(comm, plan->threads);
    call->workspace = block;
    call->started = ra_seconds();
    call->counts = ra_link_read(comm->link);
    plan->stats.steps = 0;
    plan->stats.compute_seconds = 0;
    return status == RA_OK ? RA_OK : ra_call_end(call, status);
}

ra_status ra_call_end(ra_call *call, ra_status status) {
    ra_comm *comm = call->plan->comm;
    bool reusable = true;
    ra_link_end(comm->link);
    if (call->dropped) {
        ra_workers_drop(comm->workers, false);
        status = ra_link_status(comm->link);
    }
    if (status != RA_OK) {
        ra_link_abort(comm->link, status, ra_last_error());
        reusable = ra_link_cancel(comm->link, call->plan->transfers, call->transfer_count);
    }
    const ra_kernel *kernel = call->plan->kernel;
    if (kernel->capturing && kernel->capturing(call->stream)) reusable = false; /* it belongs to the graph from now on */
    if (call->workspace && reusable) ra_pool_give(call->pool, call->workspace);
    ra_link_counts now = ra_link_read(comm->link);
    ra_stats_data *stats = &call->plan->stats;
    stats->bytes_sent = now.bytes_sent - call->counts.bytes_sent + comm->solo_bytes;
    comm->solo_bytes = 0;
    stats->bytes_received = now.bytes_received - call->counts.bytes_received;
    stats->wait_seconds = now.wait_seconds - call->counts.wait_seconds;
    return status;
}

char *ra_call_carve(const ra_call *call, int64_t *cursor, int64_t bytes) {
    char *at = call->workspace + *cursor;
    *cursor += ra_round_up(bytes, RA_ALIGN);
    return bytes ? at : NULL;
}

/* ------------------------------------------------------------------------------------------------------- messages */

ra_status ra_call_recv(ra_call *call, int peer, char *buffer, int64_t payload) {
    ra_comm *comm = call->plan->comm;
    if (comm->solo.make_row) {
        memset(buffer + RA_LINK_HEADER, 0, (size_t)payload);
        return RA_OK;
    }
    if (call->transfer_count == 0) call->posted = ra_seconds();
    ra_transfer *transfer = &call->plan->transfers[call->transfer_count++];
    return ra_link_recv(comm->link, peer, comm->received[peer]++, call->step, buffer, payload, transfer);
}

ra_status ra_call_recv_kv(ra_call *call, int peer, char *buffer, int64_t payload, const ra_piece *pieces, int64_t count) {
    ra_comm *comm = call->plan->comm;
    if (!comm->solo.make_row) return ra_call_recv(call, peer, buffer, payload);
    ra_make_pieces(&call->plan->route, pieces, count, comm->workers, &comm->solo, buffer + RA_LINK_HEADER);
    return RA_OK;
}

ra_status ra_call_send(ra_call *call, int peer, char *buffer, int64_t payload) {
    ra_comm *comm = call->plan->comm;
    if (comm->solo.make_row) {
        comm->solo_bytes += payload;
        return RA_OK;
    }
    if (call->transfer_count == 0) call->posted = ra_seconds();
    ra_transfer *transfer = &call->plan->transfers[call->transfer_count++];
    return ra_link_send(comm->link, peer, comm->sent[peer]++, call->step, buffer, payload, transfer);
}

ra_status ra_call_wait(ra_call *call) {
    if (call->transfer_count == 0) return RA_OK;
    const ra_transfer *transfers = call->plan->transfers;
    double begin = ra_seconds();
    RA_TRY(ra_link_wait(call->plan->comm->link, call->plan->transfers, call->transfer_count, call->phase));
    ra_call_trace(call, RA_WAIT, -1, 0, begin);
    for (int64_t i = 0; i < call->transfer_count; i++)
        ra_call_trace(call, transfers[i].receiving ? RA_RECEIVE : RA_SEND, transfers[i].peer, transfers[i].payload,
                      call->posted);
    call->transfer_count = 0;
    return RA_OK;
}

/* Nobody wants what is computed after the link broke, and a step can take longer than the time in which a lost rank must be
 * told. */
void ra_call_poll(void *call_) {
    ra_call *call = call_;
    if (ra_link_poll(call->plan->comm->link)) return;
    call->dropped = true;
    ra_workers_drop(call->plan->comm->workers, true);
}

/* ---------------------------------------------------------------------------------------------------------- items */

/* A view by head instead of by head index: the heads of a class start somewhere and have a step. */
static ra_tensor by_index(ra_tensor tensor, int64_t size, const ra_item *item) {
    tensor.data = tensor.data ? (char *)tensor.data + item->heads.start * tensor.head * size : NULL;
    tensor.head *= item->heads.step;
    return tensor;
}

static void add_items(ra_call *call, const ra_piece *piece, const ra_item_views *views, bool packed) {
    ra_plan *plan = call->plan;
    const ra_ring *ring = &plan->route.rings.rings[piece->ring];
    int64_t size = (int64_t)ra_dtype_size(plan->config.dtype), state = plan->config.dtype == RA_F64 ? 8 : 4;
    for (int64_t t = 0; t < ring->target_count; t++) {
        if (ring->targets[t].rank != plan->view.rank) continue;
        ra_item *items = &plan->items[call->item_count];
        int64_t count = ra_items(&plan->route, piece, &ring->targets[t], packed, items);
        for (int64_t i = 0; i < count; i++) {
            items[i].k_view = packed ? views->k : by_index(views->k, size, &items[i]);
            items[i].v_view = packed ? views->v : by_index(views->v, size, &items[i]);
            items[i].dk_view = packed ? views->dk : by_index(views->dk, state, &items[i]);
            items[i].dv_view = packed ? views->dv : by_index(views->dv, state, &items[i]);
            items[i].dk_result = by_index(views->dk_result, size, &items[i]);
            items[i].dv_result = by_index(views->dv_result, size, &items[i]);
        }
        call->item_count += count;
    }
}

void ra_call_items_home(ra_call *call, const ra_piece *piece, const ra_item_views *home) {
    add_items(call, piece, home, false);
}
void ra_call_items_packed(ra_call *call, const ra_piece *piece, const ra_item_views *packed) {
    add_items(call, piece, packed, true);
}

void ra_call_items_local(ra_call *call, const ra_item_views *home) {
    const ra_view *view = &call->plan->view;
    for (int64_t i = 0; i < view->local_count; i++) {
        const ra_ring *ring = &call->plan->route.rings.rings[view->local[i]];
        for (int64_t s = 0; s < ring->source_count; s++) {
            ra_piece whole = {
                .ring = view->local[i], .source = (int32_t)s, .repeats = ring->repeat, .rows = ring->sources[s].rows.count};
            add_items(call, &whole, home, false);
        }
    }
}
