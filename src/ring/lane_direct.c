/* Direct: ranks of one process. The sender gives notice of where a payload lies and of the moment from which on it is there;
 * the receiver's lane waits for that moment, copies, and returns the moment when the copy is done, as a receipt. The sender's
 * call waits for that before it uses the memory again.
 *
 *     sender     computed ---------- notice --.                       .-- receipt -> call waits for `in`
 *     receiver                                 `-> lane waits, copies -'             call waits for `in`
 *
 * A moment is recorded again only in a later step. By then every wait for it has been enqueued; one that comes later waits for
 * more than it needs, which does no harm. A peer may hear of a moment after its rank has left, so moments are freed with the
 * last rank. If a call fails, a peer may have notice of memory and copy from it at any time: that is kept for ever. */
#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "core/status.h"
#include "ring/lane.h"

typedef struct notice {
    const char *payload;
    int64_t bytes;
    void *computed;
    const void *owner; /* of the sender's work */
} notice;

typedef struct receipt {
    void *in;
} receipt;

static_assert(sizeof(notice) <= RA_PARCEL_NOTE, "a notice fits");

static ra_status direct_recv(ra_call *call, ra_parcel *parcel, const ra_maker *maker) {
    ra_comm *comm = call->comm;
    (void)maker; /* there are peers */
    return ra_link_recv(comm->link, parcel->peer, comm->received[parcel->peer]++, parcel->step, parcel->notice, sizeof(notice),
                        &call->entry->transfers[parcel - call->entry->parcels]);
}

static ra_status direct_send(ra_call *call, ra_parcel *parcel) {
    ra_comm *comm = call->comm;
    const notice told = {ra_frame_payload(parcel->frame), parcel->payload, call->lane->computed,
                         call->device->owner(&call->queue)};
    memcpy(ra_frame_payload(parcel->notice), &told, sizeof told);
    return ra_link_send(comm->link, parcel->peer, comm->sent[parcel->peer]++, parcel->step, parcel->notice, sizeof(notice),
                        &call->entry->transfers[parcel - call->entry->parcels]);
}

/* Statistics count the payload, not the note that the link counted. */
static void count(ra_call *call, const ra_parcel *parcel) {
    const int64_t in = parcel->receiving ? parcel->payload - (int64_t)sizeof(notice) : -(int64_t)sizeof(receipt);
    const int64_t out = parcel->receiving ? -(int64_t)sizeof(receipt) : parcel->payload - (int64_t)sizeof(notice);
    call->counts.bytes_received -= in;
    call->counts.bytes_sent -= out;
}

static ra_status copy_noticed(ra_call *call, ra_parcel *parcel) {
    const ra_copy_ops *copies = call->lane->copies;
    notice told;
    memcpy(&told, ra_frame_payload(parcel->notice), sizeof told);
    if (told.owner == call->device->owner(&call->queue))
        return ra_fail(RA_INVALID, "ranks %d and %d of this process use the same stream, and each needs one of its own",
                       (int)ra_min(parcel->peer, call->comm->rank), (int)ra_max(parcel->peer, call->comm->rank));
    if (told.bytes != parcel->payload)
        return ra_fail(RA_PROTOCOL, "rank %d announced %" PRId64 " bytes where %" PRId64 " are expected", parcel->peer,
                       told.bytes, parcel->payload);
    RA_TRY(copies->wait(&call->lane->queue, told.computed));
    return copies->copy(&call->lane->queue, ra_frame_payload(parcel->frame), told.payload, told.bytes);
}

/* Both ends of a message come to its receipt in the order of their messages, as they did to its notice. */
static ra_status exchange_receipts(ra_call *call) {
    ra_comm *comm = call->comm;
    for (int64_t i = 0; i < call->transfer_count; i++) {
        ra_parcel *p = &call->entry->parcels[i];
        ra_transfer *transfer = &call->entry->receipts[i];
        if (p->receiving) {
            memcpy(ra_frame_payload(p->receipt), &(receipt){call->lane->in}, sizeof(receipt));
            RA_TRY(ra_link_send(comm->link, p->peer, comm->sent[p->peer]++, p->step, p->receipt, sizeof(receipt), transfer));
        } else {
            RA_TRY(
                ra_link_recv(comm->link, p->peer, comm->received[p->peer]++, p->step, p->receipt, sizeof(receipt), transfer));
        }
    }
    return ra_link_wait(comm->link, call->entry->receipts, call->transfer_count, call->phase);
}

static ra_status direct_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    const int64_t parcels = call->transfer_count;
    bool receives = false;
    RA_TRY(ra_link_wait(call->comm->link, call->entry->transfers, parcels, call->phase));
    for (ra_parcel *p = call->entry->parcels; p < call->entry->parcels + parcels; p++) {
        if (!p->receiving) continue;
        RA_TRY(copy_noticed(call, p));
        receives = true;
    }
    if (receives) RA_TRY(lane->copies->record(&lane->queue, &lane->in));
    RA_TRY(exchange_receipts(call));
    for (int64_t i = 0; i < parcels; i++) {
        ra_parcel *p = &call->entry->parcels[i];
        receipt told;
        memcpy(&told, ra_frame_payload(p->receipt), sizeof told); /* its own, if it received */
        RA_TRY(lane->copies->wait(&call->queue, told.in));
        count(call, p);
        call->entry->transfers[i].payload = p->payload;
    }
    return RA_OK;
}

const ra_lane_ops ra_lane_direct = {direct_recv, direct_send, direct_wait};
