/* Solo: a rank played alone. The lane's queue makes what peers would send, in the device's memory and beside what the call
 * computes, as another lane's would bring it; what is sent goes nowhere, and the link counts it. */
#include "core/status.h"
#include "ring/lane.h"

static ra_transfer *transfer_of(const ra_call *call, const ra_parcel *parcel) {
    return &call->entry->transfers[parcel - call->entry->parcels];
}

/* Where there is nothing to make: gradients of peers count as zero. */
typedef struct zeros {
    const ra_call *call;
    int64_t bytes;
} zeros;

static ra_status make_zeros(void *arg, char *payload) {
    const zeros *wanted = arg;
    return wanted->call->device->zero(&wanted->call->lane->queue, payload, wanted->bytes);
}

static ra_status solo_recv(ra_call *call, ra_parcel *parcel, const ra_maker *maker) {
    ra_comm *comm = call->comm;
    zeros none = {call, parcel->payload};
    RA_TRY(ra_brake_hold(call->lane->brake, &call->lane->queue, parcel->payload));
    return ra_link_recv_or_make(comm->link, parcel->peer, comm->received[parcel->peer]++, parcel->step, parcel->frame,
                                parcel->payload, maker ? maker : &(ra_maker){make_zeros, &none}, transfer_of(call, parcel));
}

static ra_status solo_send(ra_call *call, ra_parcel *parcel) {
    ra_comm *comm = call->comm;
    return ra_link_send(comm->link, parcel->peer, comm->sent[parcel->peer]++, parcel->step, parcel->frame, parcel->payload,
                        transfer_of(call, parcel));
}

static ra_status solo_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    RA_TRY(lane->copies->record(&lane->queue, &lane->in));
    return lane->copies->wait(&call->queue, lane->in);
}

const ra_lane_ops ra_lane_solo = {.recv = solo_recv, .send = solo_send, .wait = solo_wait};
