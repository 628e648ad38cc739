/* Lanes on which the receiver copies. The sender gives notice of where a payload lies and from when on; the receiver's lane
 * waits for that, copies, and tells in a receipt when the copy is done. The sender's call waits for that before it uses the
 * memory again.
 *
 *     sender     computed ---------- notice --.                       .-- receipt -> call waits
 *     receiver                                 `-> lane waits, copies -'             call waits
 *
 * Where a message is late the call waits a step later. For hosts no message is: they have its receipt in the same step.
 * Kinds differ in how they say where and when. */
#include <inttypes.h>
#include <string.h>

#include "core/status.h"
#include "ring/lane.h"

static ra_note read_note(char *frame) {
    ra_note note;
    memcpy(&note, ra_frame_payload(frame), sizeof note);
    return note;
}

static void write_note(char *frame, const ra_note *note) { memcpy(ra_frame_payload(frame), note, sizeof *note); }

ra_status ra_notices_recv(ra_call *call, ra_parcel *parcel, const ra_maker *maker) {
    ra_comm *comm = call->comm;
    (void)maker; /* there are peers */
    return ra_link_recv(comm->link, parcel->peer, comm->received[parcel->peer]++, parcel->step, parcel->notice, sizeof(ra_note),
                        &call->entry->transfers[parcel - call->entry->parcels]);
}

ra_status ra_notices_send(ra_call *call, ra_parcel *parcel) {
    ra_comm *comm = call->comm;
    ra_note notice = {.bytes = parcel->payload};
    RA_TRY(call->lane->ops->announce(call, parcel, &notice));
    write_note(parcel->notice, &notice);
    return ra_link_send(comm->link, parcel->peer, comm->sent[parcel->peer]++, parcel->step, parcel->notice, sizeof(ra_note),
                        &call->entry->transfers[parcel - call->entry->parcels]);
}

ra_status ra_notices_check(const ra_parcel *parcel) {
    const int64_t bytes = read_note(parcel->notice).bytes;
    if (bytes == parcel->payload) return RA_OK;
    return ra_fail(RA_PROTOCOL, "rank %d announced %" PRId64 " bytes where %" PRId64 " are expected", parcel->peer, bytes,
                   parcel->payload);
}

static ra_status copy_noticed(ra_call *call, ra_parcel *parcel) {
    const ra_note notice = read_note(parcel->notice);
    const char *payload = NULL;
    ra_lane *lane = call->lane;
    RA_TRY(ra_notices_check(parcel));
    RA_TRY(lane->ops->find(call, parcel, &notice, &payload));
    RA_TRY(ra_brake_hold(lane->brake, &lane->queue, notice.bytes));
    return lane->copies->copy(&lane->queue, ra_frame_payload(parcel->frame), payload, notice.bytes);
}

/* Both ends of a message come to its receipt in the order of their messages, as they did to its notice. */
ra_status ra_notices_post_receipts(ra_call *call) {
    ra_comm *comm = call->comm;
    for (int64_t i = 0; i < call->transfer_count; i++) {
        ra_parcel *p = &call->entry->parcels[i];
        ra_transfer *transfer = &call->entry->receipts[i];
        if (p->receiving) {
            ra_note receipt = {.bytes = p->payload};
            RA_TRY(call->lane->ops->acknowledge(call, p, &receipt));
            write_note(p->receipt, &receipt);
            RA_TRY(ra_link_send(comm->link, p->peer, comm->sent[p->peer]++, p->step, p->receipt, sizeof receipt, transfer));
        } else {
            RA_TRY(
                ra_link_recv(comm->link, p->peer, comm->received[p->peer]++, p->step, p->receipt, sizeof(ra_note), transfer));
        }
    }
    return RA_OK;
}

/* Statistics count the payload, not the notes that the link counted. */
void ra_notices_count(ra_call *call) {
    const int64_t note = (int64_t)sizeof(ra_note);
    for (int64_t i = 0; i < call->transfer_count; i++) {
        const ra_parcel *p = &call->entry->parcels[i];
        call->counts.bytes_received += note - (p->receiving ? p->payload : 0);
        call->counts.bytes_sent += note - (p->receiving ? 0 : p->payload);
        call->entry->transfers[i].payload = p->payload;
    }
}

/* Copies what came, cargo by cargo. *last: the moment when all that the call needs in this step is there; NULL: it needs
 * nothing. */
static ra_status copy_all(ra_call *call, void **last) {
    ra_lane *lane = call->lane;
    ra_parcel *parcels = call->entry->parcels;
    *last = NULL;
    for (ra_cargo cargo = 0; cargo < RA_CARGO_COUNT; cargo++) {
        bool any = false;
        for (ra_parcel *p = parcels; p < parcels + call->transfer_count; p++) {
            if (!p->receiving || p->cargo != cargo) continue;
            RA_TRY(copy_noticed(call, p));
            any = true;
        }
        if (!any) continue;
        void **moment = ra_lane_came(lane, parcels->step, cargo);
        RA_TRY(lane->copies->record(&lane->queue, moment));
        *(cargo == RA_CARGO_LATE ? &call->late : last) = *moment;
    }
    return RA_OK;
}

/* ipc: when it comes, no queue of the call waits for a peer any more. */
static ra_status mark_last_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    return lane->ops->settle ? lane->copies->record(&call->queue, &lane->out) : RA_OK;
}

ra_status ra_notices_wait(ra_call *call) {
    ra_lane *lane = call->lane;
    const int64_t parcels = call->transfer_count;
    void *last;
    RA_TRY(ra_link_wait(call->comm->link, call->entry->transfers, parcels, call->phase));
    RA_TRY(copy_all(call, &last));
    if (lane->ops->settle) RA_TRY(lane->copies->record(&lane->queue, &lane->in));
    RA_TRY(ra_notices_post_receipts(call));
    RA_TRY(ra_link_wait(call->comm->link, call->entry->receipts, parcels, call->phase));
    if (last) RA_TRY(lane->copies->wait(&call->queue, last));
    for (int64_t i = 0; i < parcels; i++) {
        const ra_parcel *p = &call->entry->parcels[i];
        const ra_note receipt = read_note(p->receipt);
        if (p->receiving) continue;
        if (p->cargo == RA_CARGO_LATE) call->entry->late[call->late_count++] = (struct ra_late){*p, receipt};
        else RA_TRY(lane->ops->heed(call, p, &receipt));
    }
    ra_notices_count(call);
    return mark_last_wait(call);
}

ra_status ra_lane_catch_up(ra_call *call) {
    ra_lane *lane = call->lane;
    if (!call->late && call->late_count == 0) return RA_OK;
    if (call->late) RA_TRY(lane->copies->wait(&call->queue, call->late));
    for (int64_t i = 0; i < call->late_count; i++)
        RA_TRY(lane->ops->heed(call, &call->entry->late[i].parcel, &call->entry->late[i].receipt));
    call->late = NULL;
    call->late_count = 0;
    return mark_last_wait(call);
}
