/* How payload gets from rank to rank where a device has memory of its own, which the link cannot reach.
 *
 *     staged   device -> pinned frame -> link -> pinned frame -> device, over every transport
 *     direct   one copy from the peer's memory into this rank's, where both ranks are of one process
 *     solo     made in the device's memory, where a rank is played alone
 *
 * A lane has a queue of its own, so that copies run beside what a call computes:
 *
 *     call    ... pack | step h                            | wait | step h + 1
 *     lane           wait | copy out  ...  copy what came  |
 *
 * When a message is posted, the lane waits for what the call was given so far; when the messages of a step have come, the call
 * waits for the lane. Hosts meet over the link, which finds lost and disagreeing ranks, and no queue ever waits for work that
 * has not been enqueued: no order of calls can deadlock devices.
 *
 * Where the link reaches the device's memory there is no lane. */
#ifndef RA_RING_LANE_H
#define RA_RING_LANE_H

#include "core/frame.h"
#include "ring/call.h"

enum { RA_PARCEL_NOTE = 32 };

/* A message of a step. */
struct ra_parcel {
    char *frame; /* in the device's memory */
    int64_t payload, step;
    int32_t peer;
    bool receiving;
    char notice[RA_FRAME_BYTES(RA_PARCEL_NOTE)], receipt[RA_FRAME_BYTES(RA_PARCEL_NOTE)]; /* direct */
};

/* How a kind of lane moves the messages of a step; each message is a parcel of the call. */
typedef struct ra_lane_ops {
    ra_status (*recv)(ra_call *call, ra_parcel *parcel, const ra_maker *maker);
    ra_status (*send)(ra_call *call, ra_parcel *parcel);
    /* Waits until all messages of the step are received and sent. */
    ra_status (*wait)(ra_call *call);
} ra_lane_ops;
extern const ra_lane_ops ra_lane_staged, ra_lane_direct, ra_lane_solo;

struct ra_lane {
    const ra_copy_ops *copies;
    const ra_lane_ops *ops; /* of this call */
    ra_queue queue;
    void *computed; /* moment of a call: all that it was given when it posted a message */
    void *out, *in; /* moments of the lane: copies out of the device's memory, and into it */
    bool copying;   /* staged: copies to the device read frames until `in` */
    ra_pool *staging;
};

/* Makes the communicator's lane and the frames of a plan's calls, so that the calls allocate nothing. */
ra_status ra_lane_reserve(ra_comm *comm, const ra_copy_ops *copies, const ra_plan *plan);

/* Ranks of one process, between which lanes are direct. Moments that others may still wait for when a rank leaves are freed
 * with the last rank. */
ra_status ra_together_create(ra_comm **comms, int ranks);
/* A communicator is destroyed: its lane closes, and it leaves the others. */
void ra_lane_leave(ra_comm *comm);

/* Begins a call, whose frames are the next `bytes` of its workspace. */
ra_status ra_lane_begin(ra_call *call, int64_t bytes);
/* False: the workspace must never serve another call. `cancelled`: the link has let go of all buffers. */
bool ra_lane_end(ra_call *call, ra_status status, bool cancelled);

ra_status ra_lane_recv(ra_call *call, int peer, char *frame, int64_t payload, const ra_maker *maker);
ra_status ra_lane_send(ra_call *call, int peer, char *frame, int64_t payload);

/* For both kinds. follow: the lane's next copies run after what the call was given so far. await: the host waits for a moment,
 * and polls the link meanwhile. */
ra_status ra_lane_follow(ra_call *call);
ra_status ra_lane_await(ra_call *call, void *moment);

#endif
