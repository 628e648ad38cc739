#include "ring/lane.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/log.h"
#include "core/status.h"

const char *ra_lane_wish(void) {
    const char *wish = getenv("RINGATTN_LANE");
    if (!wish || !*wish || strcmp(wish, "staged") == 0 || strcmp(wish, "nccl") == 0) return wish ? wish : "";
    ra_log(RA_LOG_WARN, "RINGATTN_LANE is %s: ignored, since it is neither staged nor nccl", wish);
    return "";
}

/* -------------------------------------------------------------------------------------------------------- open and close */

/* Waits until no copy reads staged frames any more, so that they may be freed. Enqueued copies end by themselves. */
static void await_copies(ra_lane *lane) {
    bool passed = !lane->copying;
    while (!passed && lane->copies->passed(lane->in, &passed) == RA_OK) sched_yield();
    lane->copying = false;
}

/* Moments that peers may have been told of are left to them. False: the device is stuck, and memory that it may use is never
 * freed, for that would wait for it. */
static bool close_lane(ra_lane *lane, ra_together *together) {
    ra_ipc_close(lane->ipc);
    if (!lane->stuck && !ra_nccl_close(lane->nccl)) lane->stuck = lane->nccl;
    if (lane->stuck) return false;
    await_copies(lane);
    ra_brake_close(lane->brake, &lane->queue);
    void *moments[2 + RA_TOLD] = {lane->out, lane->in};
    memcpy(&moments[2], lane->told, sizeof lane->told);
    for (int i = 0; i < (together ? 2 : 2 + RA_TOLD); i++)
        if (moments[i]) lane->copies->forget(moments[i]);
    if (together) ra_together_leave(together, lane->copies, &moments[2]);
    if (lane->queue.stream) lane->copies->close(&lane->queue);
    ra_pool_destroy(lane->staging);
    ra_free(lane, sizeof *lane);
    return true;
}

void ra_lane_leave(ra_comm *comm) {
    if (!comm->lane && comm->together) ra_together_leave(comm->together, NULL, NULL);
    char *kept = comm->lane ? comm->lane->kept : NULL;
    if (!comm->lane || close_lane(comm->lane, comm->together)) {
        if (kept) ra_pool_give(comm->device_pool, kept);
    } else {
        ra_nccl_keep(comm->lane->stuck);
        comm->device_pool = NULL;
    }
    comm->lane = NULL;
}

ra_status ra_lane_open(ra_comm *comm, const ra_copy_ops *copies) {
    if (!copies || comm->ranks == 1 || comm->lane) return RA_OK;
    ra_lane *lane = ra_calloc(sizeof *lane);
    if (!lane) return ra_fail(RA_NOMEM, "no memory for a lane");
    lane->copies = copies;
    lane->staging = ra_pool_create_on(copies->pinned);
    ra_status status = lane->staging ? copies->open(&lane->queue) : ra_fail(RA_NOMEM, "no memory for a pool");
    if (status == RA_OK) status = ra_brake_open(copies, &lane->queue, &lane->brake);
    if (status != RA_OK) close_lane(lane, NULL);
    else comm->lane = lane;
    return status;
}

bool ra_lane_undecided(const ra_comm *comm, const ra_copy_ops *copies) {
    if (!copies || comm->ranks == 1 || comm->together || ra_link_is_solo(comm->link)) return false;
    return !comm->lane || !comm->lane->decided;
}

/* A checksum covers the payload only where that passes the link. */
static const ra_lane_ops *kind_of(const ra_comm *comm, const ra_plan *plan) {
    if (ra_link_is_solo(comm->link)) return &ra_lane_solo;
    if (!comm->lane || plan->config.checksum) return &ra_lane_staged;
    if (comm->together) return ra_together_staged(comm->together) ? &ra_lane_staged : &ra_lane_direct;
    return comm->lane->ipc ? &ra_lane_ipc : comm->lane->nccl ? &ra_lane_nccl : &ra_lane_staged;
}

int64_t ra_lane_holds(const ra_comm *comm, const ra_plan *plan, const ra_workspace *workspace) {
    return kind_of(comm, plan) == &ra_lane_ipc ? ra_frames_bytes(workspace) : 0;
}

ra_status ra_lane_prepare(ra_comm *comm, ra_pool *pool, const ra_plan *plan, int64_t most) {
    ra_lane *lane = comm->lane;
    if (!lane) return RA_OK;
    const bool undecided = ra_lane_undecided(comm, lane->copies);
    if (undecided) RA_TRY(ra_ipc_open(comm, lane->copies, &lane->ipc));
    const bool grows = kind_of(comm, plan) == &ra_lane_ipc && most > ra_ipc_bytes(lane->ipc);
    if (grows) RA_TRY(ra_ipc_grow(comm, pool, most, &lane->ipc));
    if ((undecided || grows) && !lane->ipc) RA_TRY(ra_nccl_open(comm, pool, &lane->nccl));
    lane->decided = true;
    return RA_OK;
}

/* Frames of notices and receipts. */
static int64_t notes_bytes(const ra_entry *entry) {
    return 2 * entry->transfers_most * ra_frame_bytes((int64_t)sizeof(ra_note));
}

ra_status ra_lane_reserve(ra_comm *comm, const ra_entry *entry) {
    const ra_lane_ops *kind = kind_of(comm, &entry->plan);
    if (!comm->lane || kind == &ra_lane_solo) return RA_OK;
    await_copies(comm->lane);
    return ra_pool_reserve(comm->lane->staging, kind->announce ? notes_bytes(entry) : ra_frames_bytes(&entry->plan.forward));
}

/* ---------------------------------------------------------------------------------------------------- begin and end */

ra_status ra_lane_begin(ra_call *call, int64_t bytes) {
    ra_lane *lane = call->comm->lane;
    if (!call->device->copies || call->comm->ranks == 1) return RA_OK;
    lane->ops = kind_of(call->comm, call->plan);
    lane->departed = false;
    call->lane = lane;
    if (lane->ops == &ra_lane_solo) return RA_OK;
    if (lane->ops == &ra_lane_ipc) RA_TRY(ra_ipc_begin(call));
    if (lane->ops->announce) bytes = notes_bytes(call->entry);
    if (lane->copying) RA_TRY(ra_lane_await(call, lane->in)); /* the pool may free frames that the last call's copies read */
    lane->copying = false;
    void *block;
    RA_TRY(ra_pool_take(lane->staging, bytes, &block));
    call->staging = block;
    return lane->ops == &ra_lane_nccl ? ra_nccl_muster(call) : RA_OK;
}

ra_status ra_lane_depart(ra_call *call) {
    return call->lane && call->lane->ops->depart && call->transfer_count > 0 ? call->lane->ops->depart(call) : RA_OK;
}

ra_status ra_lane_settle(ra_call *call) {
    if (!call->lane) return RA_OK;
    RA_TRY(ra_lane_catch_up(call));
    return call->lane->ops->settle ? call->lane->ops->settle(call) : RA_OK;
}

bool ra_lane_end(ra_call *call, ra_status status, bool cancelled) {
    ra_lane *lane = call->lane;
    if (status != RA_OK && !ra_link_cancel(call->comm->link, call->entry->receipts, call->receipt_count)) cancelled = false;
    if (call->staging && cancelled) ra_pool_give(lane->staging, call->staging);
    if (status == RA_OK) return true;
    if (lane->ops == &ra_lane_ipc) ra_ipc_fail(call);
    if (lane->ops == &ra_lane_nccl) lane->kept = call->workspace; /* a pool may free something, and wait for the device */
    if (lane->ops->announce)
        return lane->ops == &ra_lane_ipc; /* direct: peers may have notice of it, and copy whenever they like */
    const ra_sentence kept = ra_sentence_keep();
    lane->copying = lane->copies->record(&lane->queue, &lane->in) == RA_OK;
    const bool joined = lane->copying && lane->copies->wait(&call->queue, lane->in) == RA_OK;
    ra_sentence_restore(&kept);
    return joined; /* else copies into it may still run */
}

/* -------------------------------------------------------------------------------------------------------- messages */

ra_status ra_lane_follow(ra_call *call) {
    ra_lane *lane = call->lane;
    void **computed = &lane->told[lane->now].computed;
    call->packed = false;
    RA_TRY(lane->copies->record(&call->queue, computed));
    return lane->copies->wait(&lane->queue, *computed);
}

ra_status ra_lane_await(ra_call *call, void *moment) {
    enum { EAGER = 64 }; /* looks before the thread goes to sleep between them */
    for (int looks = 0;; looks++) {
        bool passed = false;
        RA_TRY(call->lane->copies->passed(moment, &passed));
        if (passed) return RA_OK;
        if (!ra_link_poll(call->comm->link)) return ra_link_status(call->comm->link);
        if (looks < EAGER) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

#define VERDICT 0.9 /* seconds beyond the timeout within which the link names a lost rank */

bool ra_lane_hears_verdict(const ra_comm *comm) {
    const double until = ra_seconds() + ra_link_timeout(comm->link) + VERDICT;
    while (ra_link_poll(comm->link)) {
        if (ra_seconds() > until) return false;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return true;
}

static ra_parcel *next_parcel(ra_call *call, const ra_parcel *wanted) {
    ra_parcel *parcel = &call->entry->parcels[call->transfer_count];
    call->entry->transfers[call->transfer_count] = (ra_transfer){0};
    if (call->transfer_count == 0) call->posted = ra_seconds();
    call->transfer_count++;
    *parcel = *wanted;
    parcel->step = call->step;
    if (!call->lane->ops->announce) return parcel;
    const int64_t note = ra_frame_bytes((int64_t)sizeof(ra_note));
    parcel->notice = call->staging + 2 * note * (parcel - call->entry->parcels);
    parcel->receipt = parcel->notice + note;
    return parcel;
}

/* All messages of a step are posted before what it computes, and copies need not wait for that. So the lane follows at the
 * first of them, and again when one was packed. */
ra_status ra_lane_recv(ra_call *call, int peer, char *frame, int64_t payload, const ra_maker *maker, ra_cargo cargo) {
    if (call->transfer_count == 0) RA_TRY(ra_lane_follow(call));
    const ra_parcel wanted = {.frame = frame, .payload = payload, .peer = peer, .receiving = true, .cargo = cargo};
    return call->lane->ops->recv(call, next_parcel(call, &wanted), maker);
}

ra_status ra_lane_send(ra_call *call, int peer, char *frame, int64_t payload, ra_cargo cargo) {
    if (call->transfer_count == 0 || call->packed) RA_TRY(ra_lane_follow(call));
    const ra_parcel wanted = {.frame = frame, .payload = payload, .peer = peer, .cargo = cargo};
    return call->lane->ops->send(call, next_parcel(call, &wanted));
}
