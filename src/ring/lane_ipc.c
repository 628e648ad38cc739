/* IPC: ranks that are processes of one host. The frames of a rank's calls lie in its *window*, a block of its device's memory
 * that every other rank has open. Queues of one process wait for those of another by counters in memory that all share:
 *
 *     counter[a][b]   how far the lane of rank a has got with what rank b waits for: the number of the latest message from a
 *                     to b whose payload is there (of a notice) or copied (of a receipt)
 *
 * A number is told after the lane was given the order to raise the counter to it, so no queue waits for work that has not been
 * enqueued. Only the lane of b waits for counter[a][b]. When b's link breaks, its thread sets all of these to ENDED, which ends
 * every wait, with whatever is in the windows; that may happen to a call whose host has not noticed, so a call ends by waiting
 * until its lane waits for no peer, and looks at the link once more. Results of a call that fails become NaN. The
 * thread sets them again and again, since a lane that still runs may raise a counter to less.
 *
 * What a rank copied after its waits were ended, its lane may send on, to ranks whose links have not broken yet. So before it
 * ends them it says so in shared memory, and a call looks there, too, when its lane is through.
 *
 * Windows are replaced by all ranks together, because CUDA wants memory closed everywhere before it is freed. Only when a rank
 * leaves, others may have its window open; then nobody copies from it any more, and the driver keeps it until they close it. */
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/log.h"
#include "core/shared.h"
#include "core/status.h"
#include "ring/council.h"
#include "ring/lane.h"

#define ENDED INT64_MAX /* more than any number, also for a device that looks at the sign of the difference */

struct ra_ipc {
    const ra_copy_ops *copies;
    ra_comm *comm;
    int64_t size; /* of this */
    ra_shared counters;
    bool shared; /* the device knows them */
    ra_pool *pool;
    void *window;  /* from the pool */
    int64_t bytes; /* of every window */
    void *done;    /* moment: the latest call is done with this rank's window */
    ra_council council;
    void *windows[]; /* of the others, as they are open here */
};

static int64_t counters_bytes(const ra_comm *comm) {
    return ra_round_up((int64_t)sizeof(uint64_t) * comm->ranks * (comm->ranks + 1), 4096);
}

static uint64_t *counter(const ra_ipc *ipc, int from, int to) {
    return (uint64_t *)ipc->counters.memory + (int64_t)from * ipc->comm->ranks + to;
}

/* Not 0: this rank's waits were ended, by its broken link. They lie after the counters. */
static _Atomic uint64_t *broken(const ra_ipc *ipc, int rank) {
    return (_Atomic uint64_t *)counter(ipc, ipc->comm->ranks, rank);
}

static void end_waits(const ra_ipc *ipc) {
    for (int from = 0; from < ipc->comm->ranks; from++)
        atomic_store((_Atomic uint64_t *)counter(ipc, from, ipc->comm->rank), (uint64_t)ENDED);
}

static void on_break(void *arg) {
    const ra_ipc *ipc = arg;
    atomic_store(broken(ipc, ipc->comm->rank), 1);
    end_waits(ipc);
}

/* ------------------------------------------------------------------------------------------------------ deciding together */

/* May this rank open what the others share? */
static ra_status check_hosts(const ra_ipc *ipc) {
    const ra_ballot *all = ipc->council.all, *mine = &ipc->council.mine;
    for (int rank = 0; rank < ipc->comm->ranks; rank++) {
        if (all[rank].host == 0 || all[rank].host != mine->host)
            return ra_fail(RA_NOT_AVAILABLE, "rank %d is on another host", rank);
        if (all[rank].process == mine->process && rank != ipc->comm->rank)
            return ra_fail(RA_NOT_AVAILABLE, "rank %d is of the same process", rank);
    }
    return RA_OK;
}

static ra_status share_counters(ra_ipc *ipc) {
    const ra_ballot *first = &ipc->council.all[0];
    RA_TRY(check_hosts(ipc));
    if (ipc->comm->rank != 0)
        RA_TRY(ra_shared_open((pid_t)first->process, (int)first->file, counters_bytes(ipc->comm), &ipc->counters));
    RA_TRY(ipc->copies->share(ipc->counters.memory, ipc->counters.bytes));
    ipc->shared = true;
    return RA_OK;
}

/* All ranks come to the same end: with `ipc`, or without. */
static ra_status decide(ra_ipc **ipc, ra_status status) {
    const ra_council *council = &(*ipc)->council;
    if (status == RA_OK && council->objector < 0) return RA_OK;
    if (status == RA_OK)
        ra_log(RA_LOG_INFO, "rank %d: payload between processes does not go by IPC, since rank %d says: %s",
               council->comm->rank, council->objector, ra_council_objection(council));
    ra_link_on_break((*ipc)->comm->link, NULL, NULL);
    ra_ipc_close(*ipc);
    *ipc = NULL;
    return status;
}

ra_status ra_ipc_open(ra_comm *comm, const ra_copy_ops *copies, ra_ipc **result) {
    const int64_t size = (int64_t)sizeof(ra_ipc) + comm->ranks * (int64_t)sizeof(void *);
    ra_council council;
    RA_TRY(ra_council_open(&council, comm));
    ra_ipc *ipc = ra_calloc(size);
    if (!ipc) {
        ra_council_close(&council);
        ra_fail(RA_NOMEM, "no memory for a lane");
        ra_link_abort(comm->link, RA_NOMEM, ra_last_error());
        return RA_NOMEM;
    }
    *ipc = (ra_ipc){.copies = copies, .comm = comm, .size = size, .counters = {.file = -1}, .council = council};
    const char *wish = ra_lane_wish();
    ra_status status = *wish ? ra_fail(RA_NOT_AVAILABLE, "RINGATTN_LANE is %s", wish) : RA_OK;
    if (status == RA_OK && comm->rank == 0) status = ra_shared_create(counters_bytes(comm), &ipc->counters);
    ipc->council.mine.host = ra_host_id();
    ipc->council.mine.process = getpid();
    ipc->council.mine.file = ipc->counters.file;
    status = ra_council_vote(&ipc->council, status);
    if (status == RA_OK && ipc->council.objector < 0) {
        ra_status shared = share_counters(ipc);
        if (shared == RA_OK && !ra_link_on_break(comm->link, on_break, ipc))
            shared = ra_fail(RA_NOT_AVAILABLE, "its transport wants the caller's thread, so that nobody could end waits");
        status = ra_council_vote(&ipc->council, shared);
    }
    *result = ipc;
    return decide(result, status);
}

static void close_windows(ra_ipc *ipc) {
    for (int rank = 0; rank < ipc->comm->ranks; rank++) {
        if (ipc->windows[rank]) ipc->copies->release(ipc->windows[rank]);
        ipc->windows[rank] = NULL;
    }
}

static ra_status make_window(ra_ipc *ipc, int64_t bytes) {
    RA_TRY(ra_pool_take(ipc->pool, bytes, &ipc->window));
    return ipc->copies->export(ipc->window, ipc->council.mine.handle);
}

static ra_status open_windows(ra_ipc *ipc) {
    for (int rank = 0; rank < ipc->comm->ranks; rank++)
        if (rank != ipc->comm->rank) RA_TRY(ipc->copies->import(ipc->council.all[rank].handle, &ipc->windows[rank]));
    return RA_OK;
}

/* Waits until the latest call is done with this rank's window. It has no wait for a peer left. */
static void finish_with_window(const ra_ipc *ipc) {
    bool passed = !ipc->done;
    while (!passed && ipc->copies->passed(ipc->done, &passed) == RA_OK) sched_yield();
}

ra_status ra_ipc_grow(ra_comm *comm, ra_pool *pool, int64_t bytes, ra_ipc **result) {
    ra_ipc *ipc = *result;
    RA_TRY(ra_comm_usable(comm));
    if (ipc->window) { /* others close it before it goes */
        close_windows(ipc);
        RA_TRY(ra_council_vote(&ipc->council, RA_OK));
        finish_with_window(ipc); /* the pool may give it to a call on another stream */
        ra_pool_give(ipc->pool, ipc->window);
        ipc->window = NULL;
    }
    ipc->pool = pool;
    ipc->bytes = bytes;
    ra_status status = ra_council_vote(&ipc->council, make_window(ipc, bytes));
    if (status == RA_OK && ipc->council.objector < 0) status = ra_council_vote(&ipc->council, open_windows(ipc));
    status = decide(result, status);
    if (*result)
        ra_log(RA_LOG_INFO, "rank %d: payload between processes goes by IPC, in windows of %" PRId64 " bytes", comm->rank,
               bytes);
    return status;
}

int64_t ra_ipc_bytes(const ra_ipc *ipc) { return ipc->bytes; }

/* Waits until this rank's queues are past every wait for a peer. */
static void drain(ra_ipc *ipc) {
    void *moments[] = {ipc->comm->lane->in, ipc->done};
    for (int i = 0; i < 2; i++) {
        bool passed = !moments[i];
        while (!passed && ipc->copies->passed(moments[i], &passed) == RA_OK) {
            end_waits(ipc);
            sched_yield();
        }
    }
}

void ra_ipc_close(ra_ipc *ipc) {
    if (!ipc) return;
    if (ipc->shared) drain(ipc);
    if (ipc->done) ipc->copies->forget(ipc->done);
    close_windows(ipc);
    if (ipc->window) ra_pool_give(ipc->pool, ipc->window);
    if (ipc->shared) ipc->copies->unshare(ipc->counters.memory);
    ra_shared_close(&ipc->counters);
    ra_council_close(&ipc->council);
    ra_free(ipc, ipc->size);
}

/* ----------------------------------------------------------------------------------------------------------------- calls */

/* Calls on different streams share the window: one begins when the one before is done with it. */
ra_status ra_ipc_begin(ra_call *call) {
    ra_ipc *ipc = call->lane->ipc;
    call->frames = ipc->window;
    return ipc->done ? ipc->copies->wait(&call->queue, ipc->done) : RA_OK;
}

/* The lane raises this rank's counter for a peer, to the number of the message that tells of it. */
static ra_status raise_for(ra_call *call, int peer, uint64_t *number) {
    const ra_comm *comm = call->comm;
    *number = comm->sent[peer] + 1;
    return call->lane->copies->raise(&call->lane->queue, counter(call->lane->ipc, comm->rank, peer), *number);
}

static ra_status await_peer(ra_call *call, const ra_queue *queue, int peer, uint64_t number) {
    return call->lane->copies->await(queue, counter(call->lane->ipc, peer, call->comm->rank), number);
}

static ra_status ipc_announce(ra_call *call, const ra_parcel *parcel, ra_note *notice) {
    notice->offset = ra_frame_payload(parcel->frame) - call->frames;
    return raise_for(call, parcel->peer, &notice->number);
}

static ra_status ipc_find(ra_call *call, const ra_parcel *parcel, const ra_note *notice, const char **payload) {
    const ra_ipc *ipc = call->lane->ipc;
    if (notice->offset < 0 || notice->offset > ipc->bytes - notice->bytes)
        return ra_fail(RA_PROTOCOL, "rank %d announced %" PRId64 " bytes at %" PRId64 " of its window of %" PRId64,
                       parcel->peer, notice->bytes, notice->offset, ipc->bytes);
    *payload = (const char *)ipc->windows[parcel->peer] + notice->offset;
    return await_peer(call, &call->lane->queue, parcel->peer, notice->number);
}

static ra_status ipc_acknowledge(ra_call *call, const ra_parcel *parcel, ra_note *receipt) {
    return raise_for(call, parcel->peer, &receipt->number);
}

static ra_status ipc_heed(ra_call *call, const ra_queue *queue, const ra_parcel *parcel, const ra_note *receipt) {
    return await_peer(call, queue, parcel->peer, receipt->number);
}

static ra_status ipc_settle(ra_call *call) {
    ra_lane *lane = call->lane;
    const ra_comm *comm = call->comm;
    RA_TRY(lane->copies->record(&lane->queue, &lane->in));
    RA_TRY(ra_lane_await(call, lane->in));
    RA_TRY(lane->copies->record(&call->queue, &lane->ipc->done));
    for (int rank = 0; rank < comm->ranks; rank++)
        if (atomic_load(broken(lane->ipc, rank)) && !ra_lane_hears_verdict(comm))
            return ra_fail(RA_ABORTED, "the link of rank %d broke, and it does not say why", rank);
    return ra_link_status(comm->link); /* of a link that broke before, waits were ended */
}

/* What was enqueued goes on, and ra_ipc_close waits for it. */
void ra_ipc_fail(ra_call *call) {
    ra_lane *lane = call->lane;
    const ra_sentence kept = ra_sentence_keep();
    end_waits(lane->ipc);
    lane->copies->record(&lane->queue, &lane->in);
    lane->copies->record(&call->queue, &lane->ipc->done);
    ra_sentence_restore(&kept);
}

const ra_lane_ops ra_lane_ipc = {
    .recv = ra_notices_recv,
    .send = ra_notices_send,
    .wait = ra_notices_wait,
    .announce = ipc_announce,
    .find = ipc_find,
    .acknowledge = ipc_acknowledge,
    .heed = ipc_heed,
    .settle = ipc_settle,
};
