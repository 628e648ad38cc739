/* Direct: ranks of one process. A note holds the address of a payload, and a moment.
 *
 * A moment of a notice is recorded again only when the receipts of that step have come, so that every wait for it has been
 * enqueued. One of a receipt is recorded again two steps with messages later. Who comes to it later still waits for more than
 * it needs, which does no harm: all that it waits for has been enqueued. A peer may hear of a moment after its rank has left,
 * so moments are freed with the last rank. If a call fails, a peer may have notice of memory and copy from it at any time: that
 * is kept for ever. */
#include "core/status.h"
#include "ring/lane.h"

static ra_status direct_announce(ra_call *call, const ra_parcel *parcel, ra_note *notice) {
    notice->payload = ra_frame_payload(parcel->frame);
    notice->moment = parcel->cargo == RA_CARGO_KV ? call->lane->told[!call->lane->now].came[RA_CARGO_KV]
                                                  : call->lane->told[call->lane->now].computed;
    notice->owner = call->device->owner(&call->queue);
    notice->place = call->comm->place;
    return RA_OK;
}

/* Once for each other device. */
static ra_status reach(ra_lane *lane, int place) {
    const uint64_t bit = place < 64 ? (uint64_t)1 << place : 0;
    if (lane->reached & bit) return RA_OK;
    lane->reached |= bit;
    return lane->copies->reach(place);
}

/* What several messages wait for, one after the other, is waited for once. */
static ra_status await_moment(ra_lane *lane, const ra_queue *queue, void *moment) {
    if (lane->awaited == moment) return RA_OK;
    lane->awaited = moment;
    return lane->copies->wait(queue, moment);
}

static ra_status direct_find(ra_call *call, const ra_parcel *parcel, const ra_note *notice, const char **payload) {
    const bool apart = notice->place != call->comm->place;
    if (apart) RA_TRY(reach(call->lane, notice->place));
    else if (notice->owner == call->device->owner(&call->queue))
        return ra_fail(RA_INVALID, "ranks %d and %d of this process use the same stream, and each needs one of its own",
                       (int)ra_min(parcel->peer, call->comm->rank), (int)ra_max(parcel->peer, call->comm->rank));
    *payload = notice->payload;
    return await_moment(call->lane, &call->lane->queue, notice->moment);
}

static ra_status direct_acknowledge(ra_call *call, const ra_parcel *parcel, ra_note *receipt) {
    receipt->moment = call->lane->told[call->lane->now].came[parcel->cargo];
    return RA_OK;
}

static ra_status direct_heed(ra_call *call, const ra_queue *queue, const ra_parcel *parcel, const ra_note *receipt) {
    (void)parcel;
    return await_moment(call->lane, queue, receipt->moment);
}

const ra_lane_ops ra_lane_direct = {
    .recv = ra_notices_recv,
    .send = ra_notices_send,
    .wait = ra_notices_wait,
    .announce = direct_announce,
    .find = direct_find,
    .acknowledge = direct_acknowledge,
    .heed = direct_heed,
};
