/* Lanes on which the receiver copies. The sender gives notice of where a payload lies and from when on; the receiver's lane
 * waits for that, copies, and tells in a receipt when the copy is done. The sender's lane waits for that before it brings
 * anything that may lie in the same memory, and its call waits for the lane.
 *
 *     step       h                                            h + 1
 *     sender     computed -- notice -.                     .- lane waits, copies what comes next | call waits
 *     receiver                        `- lane waits, copies | - receipt -'
 *
 * Hosts meet once a step: a receipt leaves as soon as the copy is enqueued, and the sender looks for it when it has the notices
 * of its next step, or in that step if it has no messages, or when the call ends. Until then what was sent rests. Receipts of
 * late messages hold up no copies of the next step: none goes to where something late was sent from.
 *
 * Of what a step brings the call waits for the last moment that it needs, behind which is all that the lane was given before.
 * In a step without messages there is none, and it waits for receipts itself, unless only the lane may wait for peers (ipc).
 *
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
        ra_transfer *transfer = &call->entry->receipts[call->receipt_count++];
        *transfer = (ra_transfer){0};
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

/* The queue waits until peers have copied what the step before sent them, late messages or the others. *any becomes true if it
 * sent any. */
static ra_status heed_receipts(ra_call *call, const ra_queue *queue, bool late, bool *any) {
    for (int64_t i = 0; i < call->receipt_count; i++) {
        const ra_parcel *p = &call->entry->before[i];
        if (p->receiving || (p->cargo == RA_CARGO_LATE) != late) continue;
        const ra_note receipt = read_note(p->receipt);
        RA_TRY(call->lane->ops->heed(call, queue, p, &receipt));
        *any = true;
    }
    return RA_OK;
}

static ra_status copy_cargo(ra_call *call, ra_cargo cargo, bool *any) {
    ra_parcel *parcels = call->entry->parcels;
    for (ra_parcel *p = parcels; p < parcels + call->transfer_count; p++) {
        if (!p->receiving || p->cargo != cargo) continue;
        RA_TRY(copy_noticed(call, p));
        *any = true;
    }
    return RA_OK;
}

static ra_status mark(ra_call *call, ra_cargo cargo, void **moment) {
    ra_lane *lane = call->lane;
    void **came = &lane->told[lane->now].came[cargo];
    *moment = NULL;
    RA_TRY(lane->copies->record(&lane->queue, came));
    *moment = *came;
    return RA_OK;
}

/* Gives the lane all that notices and receipts tell of. *last: the moment for which the call waits in this step; NULL: none. */
static ra_status enqueue(ra_call *call, void **last) {
    const ra_queue *queue = &call->lane->queue;
    bool kv = false, more = call->late; /* has the lane anything for the call since *last? */
    void *late;
    *last = NULL;
    RA_TRY(heed_receipts(call, queue, false, &more));
    RA_TRY(copy_cargo(call, RA_CARGO_KV, &kv));
    if (kv) {
        RA_TRY(mark(call, RA_CARGO_KV, last));
        more = false;
    }
    RA_TRY(copy_cargo(call, RA_CARGO_OTHER, &more));
    RA_TRY(heed_receipts(call, queue, true, &more));
    if (more) RA_TRY(mark(call, RA_CARGO_OTHER, last));
    call->late = false;
    RA_TRY(copy_cargo(call, RA_CARGO_LATE, &call->late));
    return call->late ? mark(call, RA_CARGO_LATE, &late) : RA_OK;
}

/* The parcels of this step are those before the next. */
static void turn_over(ra_call *call) {
    ra_entry *entry = call->entry;
    ra_parcel *parcels = entry->parcels;
    entry->parcels = entry->before;
    entry->before = parcels;
    call->lane->now = !call->lane->now;
    call->lane->awaited = NULL;
}

ra_status ra_notices_wait(ra_call *call) {
    ra_link *link = call->comm->link;
    ra_entry *entry = call->entry;
    void *last;
    RA_TRY(ra_link_wait(link, entry->receipts, call->receipt_count, call->phase)); /* sent before those */
    RA_TRY(ra_link_wait(link, entry->transfers, call->transfer_count, call->phase));
    RA_TRY(enqueue(call, &last));
    call->receipt_count = 0;
    RA_TRY(ra_notices_post_receipts(call));
    ra_notices_count(call);
    turn_over(call);
    return last ? call->lane->copies->wait(&call->queue, last) : RA_OK;
}

ra_status ra_lane_catch_up(ra_call *call) {
    ra_lane *lane = call->lane;
    bool any;
    if (call->receipt_count == 0 && !call->late) return RA_OK;
    if (lane->ops->settle) return ra_notices_wait(call);
    RA_TRY(ra_link_wait(call->comm->link, call->entry->receipts, call->receipt_count, call->phase));
    if (call->late) RA_TRY(lane->copies->wait(&call->queue, lane->told[!lane->now].came[RA_CARGO_LATE]));
    for (int late = 0; late < 2; late++) RA_TRY(heed_receipts(call, &call->queue, late, &any));
    call->receipt_count = 0;
    call->late = false;
    lane->awaited = NULL;
    return RA_OK;
}
