/* How payload gets from rank to rank where a device has memory of its own, which the link cannot reach.
 *
 *     staged   device -> pinned frame -> link -> pinned frame -> device, over every transport
 *     direct   one copy from the peer's memory into this rank's, where both ranks are of one process
 *     ipc      the same, where all ranks are processes of one host whose devices open each other's memory
 *     nccl     by the device's own library, between any hosts
 *     solo     made in the device's memory, where a rank is played alone
 *
 * A lane has a queue of its own, so that copies run beside what a call computes:
 *
 *     call    ... pack | step h                            | wait | step h + 1
 *     lane           wait | copy out  ...  copy what came  |
 *
 * When a message is posted, the lane waits for what the call was given so far; when the messages of a step have come, the call
 * waits for the lane. On a direct lane, K and V that go on wait for no call: a rank with much to do in a step does not hold up
 * the others, who may have them from the moment when they came here. And on lanes of notices (direct, ipc) the call waits a
 * step later for gradients that come home, and for copies of what it sent. Hosts meet over the link, once a step, which finds
 * lost and disagreeing ranks, and no queue ever waits for work that has not been enqueued: no order of calls can deadlock
 * devices.
 *
 * Where the link reaches the device's memory there is no lane. */
#ifndef RA_RING_LANE_H
#define RA_RING_LANE_H

#include "core/frame.h"
#include "ring/call.h"

/* What a message of a step holds, in the order in which a lane brings it: K and V, which came in the step before if they are
 * sent; anything else; what is late (ra_call_recv_late). */
typedef enum ra_cargo { RA_CARGO_KV, RA_CARGO_OTHER, RA_CARGO_LATE, RA_CARGO_COUNT } ra_cargo;

/* A message of a step. */
struct ra_parcel {
    char *frame; /* in the device's memory */
    int64_t payload, step;
    int32_t peer;
    bool receiving;
    ra_cargo cargo;
    char *notice, *receipt; /* direct, ipc, nccl: frames of what goes over the link in its place (lane_notices.c) */
};

/* What a notice, or a receipt, says. */
typedef struct ra_note {
    int64_t bytes;       /* of the payload */
    const char *payload; /* direct: where it lies, */
    void *moment;        /* from when on; of a receipt, the moment when it was copied, */
    const void *owner;   /* and the owner of the sender's work, */
    int place;           /* on this one of several devices */
    int64_t offset;      /* ipc: where it lies in the sender's window, */
    uint64_t number;     /* and the counter's number that is reached then */
} ra_note;

/* How a kind of lane moves the messages of a step; each message is a parcel of the call. */
typedef struct ra_lane_ops {
    ra_status (*recv)(ra_call *call, ra_parcel *parcel, const ra_maker *maker);
    ra_status (*send)(ra_call *call, ra_parcel *parcel);
    /* All messages of the step are posted, and nothing of it is computed yet: NULL if that is no time to do anything. */
    ra_status (*depart)(ra_call *call);
    /* Waits until all messages of the step are received and sent. */
    ra_status (*wait)(ra_call *call);

    /* Lanes of notices; NULL in others. Sender: says where the payload lies, and when. Receiver: makes the lane wait for that,
     * and finds the address. Receiver: says when the lane will have copied all that it was given so far. Sender: makes a
     * queue wait for that. */
    ra_status (*announce)(ra_call *call, const ra_parcel *parcel, ra_note *notice);
    ra_status (*find)(ra_call *call, const ra_parcel *parcel, const ra_note *notice, const char **payload);
    ra_status (*acknowledge)(ra_call *call, const ra_parcel *parcel, ra_note *receipt);
    ra_status (*heed)(ra_call *call, const ra_queue *queue, const ra_parcel *parcel, const ra_note *receipt);

    /* All is enqueued: waits until nothing of it waits for a peer any more. NULL: nothing does. */
    ra_status (*settle)(ra_call *call);
} ra_lane_ops;
extern const ra_lane_ops ra_lane_staged, ra_lane_direct, ra_lane_ipc, ra_lane_nccl, ra_lane_solo;

/* lane_notices.c: functions of lanes of notices, */
ra_status ra_notices_recv(ra_call *call, ra_parcel *parcel, const ra_maker *maker);
ra_status ra_notices_send(ra_call *call, ra_parcel *parcel);
ra_status ra_notices_wait(ra_call *call);
/* and what they are made of: RA_PROTOCOL if a notice that came announces something else than this parcel; post all receipts of
 * a step, and call.receipt_count says how many; count the payload of its messages instead of their notes. */
ra_status ra_notices_check(const ra_parcel *parcel);
ra_status ra_notices_post_receipts(ra_call *call);
void ra_notices_count(ra_call *call);

typedef struct ra_ipc ra_ipc;     /* lane_ipc.c */
typedef struct ra_nccl ra_nccl;   /* lane_nccl.c */
typedef struct ra_brake ra_brake; /* lane_brake.c */

/* Moments of a lane of notices that peers are told of in a step. */
typedef struct ra_told {
    void *computed; /* of the call: all that it was given when it posted a message */
    void *came[RA_CARGO_COUNT]; /* of the lane: all of a cargo has come */
} ra_told;
enum { RA_TOLD = 2 * sizeof(ra_told) / sizeof(void *) };

struct ra_lane {
    const ra_copy_ops *copies;
    const ra_lane_ops *ops; /* of this call */
    ra_queue queue;
    ra_told told[2]; /* of this step, told[now], and of the one before */
    int now;
    void *awaited;  /* direct: what the lane was told last to wait for in this step */
    void *out, *in; /* moments of the lane: copies out of the device's memory (nccl: an exchange is about to begin), and into
                     * it (ipc: it waits for no peer any more) */
    bool copying;   /* staged: copies to the device read frames until `in` */
    bool departed;  /* nccl: the messages of this step are enqueued */
    uint64_t reached; /* direct: other devices from which copies go straight, a bit for each of the first 64 */
    ra_pool *staging;
    bool decided; /* how processes exchange payload: by one of these, or staged */
    ra_ipc *ipc;
    ra_nccl *nccl;
    ra_nccl *stuck; /* the device is, in what this began */
    char *kept;     /* nccl: the workspace of a call that failed, which kernels use until they are aborted */
    ra_brake *brake; /* NULL: messages come as fast as they can */
};

/* The lane that the environment asks for (RINGATTN_LANE): "staged", "nccl", or "" for whatever is best. */
const char *ra_lane_wish(void);

/* Must ranks still decide on a lane, before calls on this device? */
bool ra_lane_undecided(const ra_comm *comm, const ra_copy_ops *copies);
/* Makes the communicator's lane, if there is none. */
ra_status ra_lane_open(ra_comm *comm, const ra_copy_ops *copies);
/* All ranks do this together: decides, and makes room for frames of `most` bytes, the same on all ranks. */
ra_status ra_lane_prepare(ra_comm *comm, ra_pool *pool, const ra_plan *plan, int64_t most);
/* Makes the frames of a plan's calls, so that the calls allocate nothing. */
ra_status ra_lane_reserve(ra_comm *comm, const ra_entry *entry);
/* Bytes of a workspace that a plan's calls need not have: their frames lie with the lane. */
int64_t ra_lane_holds(const ra_comm *comm, const ra_plan *plan, const ra_workspace *workspace);

/* together.c: ranks of one process, between which lanes are direct. Moments that others may still wait for when a rank leaves
 * (NULL: it has none) are freed with the last rank. staged: they asked for that, all the same. */
ra_status ra_together_create(ra_comm **comms, int ranks);
bool ra_together_staged(const ra_together *together);
void ra_together_leave(ra_together *together, const ra_copy_ops *copies, void *const *moments);
/* A communicator is destroyed: its lane closes, and it leaves the others. */
void ra_lane_leave(ra_comm *comm);

/* Begins a call, whose frames are the next `bytes` of its workspace, unless the lane holds them. */
ra_status ra_lane_begin(ra_call *call, int64_t bytes);
/* All messages of a step are posted, and its items come next. */
ra_status ra_lane_depart(ra_call *call);
/* After the last step. */
ra_status ra_lane_settle(ra_call *call);
/* False: the workspace must never serve another call. `cancelled`: the link has let go of all buffers. */
bool ra_lane_end(ra_call *call, ra_status status, bool cancelled);

ra_status ra_lane_recv(ra_call *call, int peer, char *frame, int64_t payload, const ra_maker *maker, ra_cargo cargo);
ra_status ra_lane_send(ra_call *call, int peer, char *frame, int64_t payload, ra_cargo cargo);

/* In a step without messages: waits for what the step before left over. */
ra_status ra_lane_catch_up(ra_call *call);

/* For all kinds. follow: the lane's next copies run after what the call was given so far. await: the host waits for a moment,
 * and polls the link meanwhile. hears_verdict: something is wrong, and the link will say what, if a rank is lost or has given
 * up: waits until it breaks, as long as that may take; false: it does not. */
ra_status ra_lane_follow(ra_call *call);
ra_status ra_lane_await(ra_call *call, void *moment);
bool ra_lane_hears_verdict(const ra_comm *comm);

/* lane_ipc.c. open: all ranks do this together; *ipc is NULL if one of them cannot. grow: the same, for a window of so many
 * bytes; frees *ipc if one of them cannot. */
ra_status ra_ipc_open(ra_comm *comm, const ra_copy_ops *copies, ra_ipc **ipc);
ra_status ra_ipc_grow(ra_comm *comm, ra_pool *pool, int64_t bytes, ra_ipc **ipc);
int64_t ra_ipc_bytes(const ra_ipc *ipc);
ra_status ra_ipc_begin(ra_call *call);
/* The call failed: ends the waits of this rank's queues. */
void ra_ipc_fail(ra_call *call);
/* The link is gone, or has no peers that matter. */
void ra_ipc_close(ra_ipc *ipc);

/* lane_nccl.c. open: all ranks do this together; *nccl is NULL if one of them cannot, which fails if RINGATTN_LANE is nccl on
 * any. close, when the link is gone: in peace, or by force if the link was broken; bounded. False: the device is stuck. */
ra_status ra_nccl_open(ra_comm *comm, ra_pool *pool, ra_nccl **nccl);
bool ra_nccl_close(ra_nccl *nccl);
/* A call begins, and will allocate nothing any more. */
ra_status ra_nccl_muster(ra_call *call);
/* Keeps what a stuck device may use, the lane and its pool, within reach of a leak checker. */
void ra_nccl_keep(ra_nccl *nccl);

/* lane_brake.c. open: *brake is NULL unless the environment asks for one. hold: the lane's queue goes on when `bytes` could
 * have come since it got here. close: waits for the lane's queue. Both are safe for NULL. */
ra_status ra_brake_open(const ra_copy_ops *copies, const ra_queue *lane, ra_brake **brake);
ra_status ra_brake_hold(ra_brake *brake, const ra_queue *lane, int64_t bytes);
void ra_brake_close(ra_brake *brake, const ra_queue *lane);

#endif
