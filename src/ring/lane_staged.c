/* Staged: every frame in the device's memory has a twin in pinned memory, at the same place of the call's frames. The link sees
 * twins alone, so that every transport will do. A message is sent when the copy of it has arrived there, for which the host
 * waits; the device computes on meanwhile. */
#include "core/status.h"
#include "ring/lane.h"

static char *twin_of(const ra_call *call, const ra_parcel *parcel) { return call->staging + (parcel->frame - call->frames); }

static ra_transfer *transfer_of(const ra_call *call, const ra_parcel *parcel) {
    return &call->entry->transfers[parcel - call->entry->parcels];
}

static ra_status staged_recv(ra_call *call, ra_parcel *parcel, const ra_maker *maker) {
    ra_comm *comm = call->comm;
    ra_lane *lane = call->lane;
    if (lane->copying) RA_TRY(ra_lane_await(call, lane->in)); /* copies of the step before may still read this frame */
    lane->copying = false;
    return ra_link_recv_or_make(comm->link, parcel->peer, comm->received[parcel->peer]++, parcel->step, twin_of(call, parcel),
                                parcel->payload, maker, transfer_of(call, parcel));
}

static ra_status staged_send(ra_call *call, ra_parcel *parcel) {
    ra_lane *lane = call->lane;
    RA_TRY(lane->copies->copy(&lane->queue, ra_frame_payload(twin_of(call, parcel)), ra_frame_payload(parcel->frame),
                              parcel->payload));
    return lane->copies->record(&lane->queue, &lane->out);
}

static ra_status send_twins(ra_call *call) {
    ra_comm *comm = call->comm;
    bool waited = false;
    for (ra_parcel *p = call->entry->parcels; p < call->entry->parcels + call->transfer_count; p++) {
        if (p->receiving) continue;
        if (!waited) RA_TRY(ra_lane_await(call, call->lane->out));
        waited = true;
        RA_TRY(ra_link_send(comm->link, p->peer, comm->sent[p->peer]++, p->step, twin_of(call, p), p->payload,
                            transfer_of(call, p)));
    }
    return RA_OK;
}

static ra_status staged_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    bool came = false;
    RA_TRY(send_twins(call));
    RA_TRY(ra_link_wait(call->comm->link, call->entry->transfers, call->transfer_count, call->phase));
    for (ra_parcel *p = call->entry->parcels; p < call->entry->parcels + call->transfer_count; p++) {
        if (!p->receiving) continue;
        RA_TRY(ra_brake_hold(lane->brake, &lane->queue, p->payload));
        RA_TRY(lane->copies->copy(&lane->queue, ra_frame_payload(p->frame), ra_frame_payload(twin_of(call, p)), p->payload));
        came = true;
    }
    if (!came) return RA_OK;
    RA_TRY(lane->copies->record(&lane->queue, &lane->in));
    lane->copying = true;
    return lane->copies->wait(&call->queue, lane->in);
}

const ra_lane_ops ra_lane_staged = {.recv = staged_recv, .send = staged_send, .wait = staged_wait};
