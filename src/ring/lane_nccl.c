/* NCCL: ranks on any hosts. A step's messages are one exchange, a single kernel of the library on each rank, which waits for
 * the kernels of its peers. So hosts meet first. All muster when a call begins: from then on no host waits for a device until
 * it has enqueued its last exchange, and what one rank has enqueued never waits for a host that is held up, say, in cudaFree
 * behind that very kernel. Then, step by step, the sender of a message gives notice of it and the receiver answers, so that
 * lost and disagreeing ranks are found before anything is enqueued. Steps come in the same order on all ranks, and each is
 * complete in itself, so the earliest exchange that is not done has all its ends on the way.
 *
 *     host     notices, receipts, exchange, step h ...
 *     lane     wait for computed | send, receive |
 *     call     ... pack          | step h        | wait | step h + 1
 *
 * The exchange is enqueued before the step's kernel, and the call waits until the lane has come to it: that kernel may fill the
 * device, and an exchange that comes later would have to wait for its end.
 *
 * One group spans all ranks: it has one name and one end, and the library connects two ranks when they first exchange
 * something, so that a ring has two connections a rank whatever the number of ranks.
 *
 * When the link breaks, its thread has the group aborted (lane_nccl_end.c): kernels that wait for a lost rank end, with
 * whatever is in their buffers. That may happen to a call whose host has not noticed, so a call ends by waiting until its last
 * exchange is done, and looks at the link once more. Such a kernel may even have sent something, to a rank whose link is whole.
 * So then the hosts meet again: a result is one when it is one on all ranks. Devices compute the last step meanwhile.
 *
 * Ranks that are all alive may still wait for ever, when the library does. The lane's queue counts the exchanges that it begins
 * and those that are done, so a host that waits knows whether its device waits for others, or still computes; it tells the
 * link, which finds out when all do (ra_link_set_stalled). */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/status.h"
#include "ring/lane_nccl.h"

#define SLOWEST 1e6 /* bytes a second: an exchange may take this long while nothing else is known of it */

enum { BEGUN, DONE, COUNTERS_BYTES = 4096 };

/* --------------------------------------------------------------------------------------------------------------- waiting */

static uint64_t *counter(const ra_nccl *nccl, int which) { return (uint64_t *)nccl->progress.memory + which; }

static uint64_t read_counter(const ra_nccl *nccl, int which) {
    return atomic_load((_Atomic uint64_t *)counter(nccl, which));
}

/* Since when the device has done nothing but wait for others; 0: it does something else. */
static double device_stalled(ra_nccl *nccl) {
    const uint64_t done = read_counter(nccl, DONE), begun = read_counter(nccl, BEGUN);
    if (nccl->seen != begun + done) {
        nccl->seen = begun + done;
        nccl->seen_at = ra_seconds();
    }
    return begun > done ? nccl->seen_at + nccl->allowance : 0;
}

static void tell_stalled(ra_nccl *nccl, double since) {
    if (since == nccl->told) return;
    nccl->told = since;
    ra_link_set_stalled(nccl->comm->link, since);
}

/* The library has failed. In a call that may be the first sign of a lost rank, which the link will name: its verdict comes
 * first, if there is one. */
static ra_status hear_verdict(ra_nccl *nccl, ra_status status) {
    const ra_sentence why = ra_sentence_keep();
    tell_stalled(nccl, 0); /* it is known what is wrong */
    if (ra_lane_hears_verdict(nccl->comm)) return ra_link_status(nccl->comm->link);
    ra_sentence_restore(&why);
    return status;
}

/* Is the library done with what it was given? */
static ra_status look(ra_nccl *nccl, bool calling, bool *done) {
    *done = false;
    if (!ra_nccl_enter(nccl)) return ra_link_status(nccl->comm->link);
    const ra_status status = nccl->net->poll(nccl->group, done);
    ra_nccl_exit(nccl);
    return status == RA_OK || !calling ? status : hear_verdict(nccl, status);
}

/* Two ranks that exchange something for the first time are connected, for which they may take as long as to arrive. */
static double connecting_stalled(const ra_nccl *nccl, double since) {
    const ra_link *link = nccl->comm->link;
    return since + fmax(0, ra_link_start_timeout(link) - ra_link_timeout(link));
}

/* Waits until the library is done, or if there is a moment, until that has come. `limit`: in seconds; 0: this is in a call,
 * which has no limit. */
static ra_status await(ra_nccl *nccl, void *moment, double limit) {
    enum { EAGER = 64, PATIENT = 256 }; /* looks before the thread goes to sleep between them, and before it sleeps long */
    const double begin = ra_seconds(), until = begin + limit;
    const bool calling = limit == 0;
    for (int looks = 0;; looks++) {
        bool passed = !moment, done = false;
        if (moment) RA_TRY(nccl->lane->copies->passed(moment, &passed));
        RA_TRY(look(nccl, calling, &done)); /* after that: a failure may be why it has come */
        if (moment) done = passed;
        if (calling) tell_stalled(nccl, done ? 0 : moment ? device_stalled(nccl) : connecting_stalled(nccl, begin));
        if (done) return RA_OK;
        if (!ra_link_poll(nccl->comm->link)) return ra_link_status(nccl->comm->link);
        if (!calling && ra_seconds() > until) return ra_fail(RA_TIMEOUT, "NCCL was not ready within %.3g s", limit);
        if (looks < EAGER) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = looks < PATIENT ? 20000 : 100000}, NULL);
    }
}

static ra_status exchange(ra_nccl *nccl, const ra_net_message *messages, int64_t count, double limit) {
    ra_lane *lane = nccl->lane;
    int64_t bytes = 0, received = 0;
    for (int64_t i = 0; i < count; i++) {
        bytes += messages[i].bytes;
        received += messages[i].receiving ? messages[i].bytes : 0;
    }
    nccl->allowance = fmax(nccl->allowance, (double)bytes / SLOWEST);
    nccl->exchanges++;
    RA_TRY(lane->copies->raise(&lane->queue, counter(nccl, BEGUN), nccl->exchanges));
    RA_TRY(lane->copies->record(&lane->queue, &lane->out));
    if (!ra_nccl_enter(nccl)) return ra_link_status(nccl->comm->link);
    const ra_status status = nccl->net->exchange(nccl->group, &lane->queue, messages, count);
    ra_nccl_exit(nccl);
    if (status != RA_OK) return limit > 0 ? status : hear_verdict(nccl, status);
    RA_TRY(await(nccl, NULL, limit)); /* until then the library may not have enqueued it */
    RA_TRY(lane->copies->raise(&lane->queue, counter(nccl, DONE), nccl->exchanges));
    RA_TRY(ra_brake_hold(lane->brake, &lane->queue, received));
    return lane->copies->record(&lane->queue, &lane->in);
}

/* -------------------------------------------------------------------------------------------------------- deciding together */

static void abort_group(void *nccl) { ra_nccl_ask(nccl, RA_NCCL_ABORT); }

static ra_status load(ra_nccl *nccl) {
    nccl->council.mine.insists = strcmp(ra_lane_wish(), "nccl") == 0;
    if (strcmp(ra_lane_wish(), "staged") == 0) return ra_fail(RA_NOT_AVAILABLE, "RINGATTN_LANE is staged");
    RA_TRY(nccl->net->load(&nccl->council.mine.version));
    if (!ra_link_on_break(nccl->comm->link, abort_group, nccl))
        return ra_fail(RA_NOT_AVAILABLE, "its transport wants the caller's thread, so that nobody could end waits");
    return RA_OK;
}

enum { FEW = 256 }; /* bytes of a message of the trial */

/* All have the same version, and everything that they need: who joins waits for all others. The first rank names the group. */
static ra_status prepare(ra_nccl *nccl) {
    const int64_t mine = nccl->council.mine.version;
    for (int rank = 0; rank < nccl->comm->ranks; rank++) {
        const int64_t other = nccl->council.all[rank].version;
        char texts[2][32];
        if (other == mine) continue;
        nccl->net->version_text(mine, texts[0]);
        nccl->net->version_text(other, texts[1]);
        return ra_fail(RA_NOT_AVAILABLE, "it has NCCL %s, and rank %d has %s", texts[0], rank, texts[1]);
    }
    RA_TRY(ra_shared_create(COUNTERS_BYTES, &nccl->progress));
    RA_TRY(nccl->lane->copies->share(nccl->progress.memory, nccl->progress.bytes));
    nccl->shared = true;
    RA_TRY(ra_pool_take(nccl->pool, 2 * FEW, &nccl->trial));
    return nccl->comm->rank == 0 ? nccl->net->name(nccl->council.mine.name) : RA_OK;
}

/* In a call: a rank that dies meanwhile is found. Calls are counted, so that every rank makes them, whatever it fails in. */
static void begin_call(const ra_comm *comm) { ra_link_begin(comm->link, "plan", &(ra_subject){.text = ""}); }

static ra_status join(ra_nccl *nccl) {
    ra_comm *comm = nccl->comm;
    begin_call(comm);
    ra_status status = nccl->net->join(nccl->council.all[0].name, comm->rank, comm->ranks, &nccl->group);
    if (nccl->group && ra_nccl_start(nccl) != RA_OK) { /* the thread finds the group that it is to end */
        status = RA_NOMEM;
        nccl->net->abort(nccl->group);
        nccl->group = NULL;
    }
    if (status == RA_OK) status = await(nccl, NULL, ra_link_start_timeout(comm->link));
    ra_link_end(comm->link);
    return status;
}

/* A few bytes around the ring: what cannot work shows now, and neighbours are connected before the first call. */
static ra_status try_out(ra_nccl *nccl) {
    ra_comm *comm = nccl->comm;
    const double limit = ra_link_start_timeout(comm->link);
    const ra_net_message messages[] = {
        {.memory = nccl->trial, .bytes = FEW, .peer = (comm->rank + comm->ranks - 1) % comm->ranks, .receiving = true},
        {.memory = (char *)nccl->trial + FEW, .bytes = FEW, .peer = (comm->rank + 1) % comm->ranks}};
    begin_call(comm);
    ra_status status = exchange(nccl, messages, 2, limit);
    if (status == RA_OK) status = await(nccl, nccl->lane->in, limit);
    ra_link_end(comm->link);
    return status;
}

#define BRIEFLY 0.5 /* seconds for a queue that is given nothing any more */

/* NCCL did not end. If the lane's queue waits for it, so would all that this rank stages, and whatever it frees: then the rank
 * is of no use to the others, who hear why. */
static ra_status go_on_without(ra_nccl *nccl, ra_status status) {
    ra_comm *comm = nccl->comm;
    comm->lane->stuck = nccl;
    if (ra_nccl_drain(comm->lane, BRIEFLY)) return status;
    const ra_sentence kept = ra_sentence_keep();
    ra_fail(RA_DEVICE, "its device is stuck in NCCL, which did not end within %.3g s", nccl->patience);
    ra_link_abort(comm->link, RA_DEVICE, ra_last_error());
    if (status == RA_OK) return RA_DEVICE;
    ra_sentence_restore(&kept);
    return status;
}

/* All ranks come to the same end: with NCCL, or without. */
static ra_status decide(ra_nccl **result, ra_status status) {
    ra_nccl *nccl = *result;
    const ra_council *council = &nccl->council;
    const ra_comm *comm = nccl->comm;
    ra_pool *pool = nccl->pool;
    void *trial = nccl->trial;
    if (status == RA_OK && council->objector < 0) {
        char text[32];
        ra_pool_give(pool, trial);
        nccl->net->version_text(council->mine.version, text);
        ra_log(RA_LOG_INFO, "rank %d: payload between processes goes by NCCL %s", comm->rank, text);
        return RA_OK;
    }
    bool insists = false;
    for (int rank = 0; status == RA_OK && rank < comm->ranks; rank++) insists |= council->all[rank].insists != 0;
    if (status == RA_OK && !insists)
        ra_log(RA_LOG_INFO, "rank %d: payload between processes is staged in pinned memory, since rank %d says: %s",
               comm->rank, council->objector, ra_council_objection(council));
    if (insists)
        status = ra_fail(RA_NOT_AVAILABLE, "RINGATTN_LANE asks for NCCL, and rank %d says: %s", council->objector,
                         ra_council_objection(council));
    const ra_sentence kept = ra_sentence_keep();
    ra_link_on_break(comm->link, NULL, NULL);
    ra_nccl_ask(nccl, RA_NCCL_ABORT);
    const bool closed = ra_nccl_close(nccl);
    if (closed && trial) ra_pool_give(pool, trial);
    ra_sentence_restore(&kept);
    *result = NULL;
    return closed ? status : go_on_without(nccl, status);
}

static ra_status decline(ra_comm *comm) {
    ra_fail(RA_NOMEM, "no memory for a lane");
    ra_link_abort(comm->link, RA_NOMEM, ra_last_error());
    return RA_NOMEM;
}

ra_status ra_nccl_open(ra_comm *comm, ra_pool *pool, ra_nccl **result) {
    ra_council council;
    RA_TRY(ra_council_open(&council, comm));
    ra_nccl *nccl = ra_calloc(sizeof *nccl);
    if (!nccl) {
        ra_council_close(&council);
        return decline(comm);
    }
    *nccl = (ra_nccl){.net = comm->lane->copies->net,
                      .comm = comm,
                      .lane = comm->lane,
                      .council = council,
                      .pool = pool,
                      .progress = {.file = -1}};
    nccl->patience = ra_link_timeout(comm->link);
    pthread_mutex_init(&nccl->mutex, NULL);
    ra_cond_init(&nccl->changed);
    *result = nccl;
    ra_council *votes = &nccl->council;
    ra_status status = ra_council_vote(votes, load(nccl));
    if (status == RA_OK && votes->objector < 0) status = ra_council_vote(votes, prepare(nccl));
    if (status == RA_OK && votes->objector < 0) status = ra_council_vote(votes, join(nccl));
    if (status == RA_OK && votes->objector < 0) status = ra_council_vote(votes, try_out(nccl));
    return decide(result, status);
}

/* ----------------------------------------------------------------------------------------------------------------- calls */

/* Returns when every rank has come here: in round i each hears from the rank 2^i before it, and so of twice as many. */
static ra_status meet(ra_call *call) {
    ra_comm *comm = call->comm;
    ra_transfer *transfers = call->entry->transfers;
    char *in = call->staging, *out = call->staging + ra_frame_bytes((int64_t)sizeof(ra_note));
    for (int apart = 1; apart < comm->ranks; apart *= 2) {
        const int from = (comm->rank + comm->ranks - apart) % comm->ranks, to = (comm->rank + apart) % comm->ranks;
        transfers[0] = transfers[1] = (ra_transfer){0};
        call->transfer_count = 2;
        RA_TRY(ra_link_recv(comm->link, from, comm->received[from]++, call->step, in, 0, &transfers[0]));
        RA_TRY(ra_link_send(comm->link, to, comm->sent[to]++, call->step, out, 0, &transfers[1]));
        RA_TRY(ra_link_wait(comm->link, transfers, 2, call->phase));
        call->transfer_count = 0;
    }
    return RA_OK;
}

ra_status ra_nccl_muster(ra_call *call) {
    ra_nccl *nccl = call->lane->nccl;
    nccl->patience = ra_link_timeout(call->comm->link);
    nccl->allowance = nccl->told = 0;
    return meet(call);
}

/* The notice says all; the answer, that the receiver is there. */
static ra_status nothing_more(ra_call *call, const ra_parcel *parcel, ra_note *note) {
    (void)call, (void)parcel, (void)note;
    return RA_OK;
}

static ra_status nccl_depart(ra_call *call) {
    ra_lane *lane = call->lane;
    ra_entry *entry = call->entry;
    const int64_t count = call->transfer_count;
    if (lane->departed) return RA_OK;
    RA_TRY(ra_notices_post_receipts(call));
    RA_TRY(ra_link_wait(call->comm->link, entry->transfers, count, call->phase));
    RA_TRY(ra_link_wait(call->comm->link, entry->receipts, count, call->phase));
    call->receipt_count = 0;
    for (int64_t i = 0; i < count; i++) {
        const ra_parcel *p = &entry->parcels[i];
        if (p->receiving) RA_TRY(ra_notices_check(p));
        entry->exchange[i] = (ra_net_message){ra_frame_payload(p->frame), p->payload, p->peer, p->receiving};
    }
    RA_TRY(exchange(lane->nccl, entry->exchange, count, 0));
    lane->departed = true;
    return lane->copies->wait(&call->queue, lane->out);
}

static ra_status nccl_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    RA_TRY(nccl_depart(call));
    RA_TRY(lane->copies->wait(&call->queue, lane->in));
    lane->departed = false;
    ra_notices_count(call);
    return RA_OK;
}

/* Of a link that broke before, kernels were aborted. */
static ra_status nccl_settle(ra_call *call) {
    RA_TRY(await(call->lane->nccl, call->lane->in, 0));
    RA_TRY(ra_link_status(call->comm->link));
    return meet(call);
}

const ra_lane_ops ra_lane_nccl = {
    .recv = ra_notices_recv,
    .send = ra_notices_send,
    .depart = nccl_depart,
    .wait = nccl_wait,
    .announce = nothing_more,
    .acknowledge = nothing_more,
    .settle = nccl_settle,
};
