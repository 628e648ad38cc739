/* What a call of ra_forward or ra_backward carries from step to step. */
#ifndef RA_RING_CALL_H
#define RA_RING_CALL_H

#include "core/clock.h"
#include "device/device.h"
#include "ring/cache.h"

typedef struct ra_parcel ra_parcel; /* lane.h */

typedef struct ra_call {
    ra_entry *entry;
    const ra_plan *plan; /* of the entry */
    ra_comm *comm;
    const ra_device_ops *device;
    const char *phase; /* "forward", "backward" */
    ra_queue queue;
    ra_pool *pool;
    char *workspace; /* from the pool */
    int64_t carved;  /* bytes of it */
    ra_lane *lane;   /* NULL: the link reaches the workspace */
    char *frames;    /* the messages, in the workspace unless a lane holds them */
    char *staging;   /* lanes: twins of the messages (lane_staged.c), or notes on them (lane_notices.c) */
    int64_t step;
    int64_t transfer_count; /* posted in this step, */
    double posted;          /* the first of them at this time */
    bool packed;            /* rows for a message, since the lane was told to follow (ra_lane_follow) */
    int64_t receipt_count;  /* posted, and not yet waited for (lane_notices.c) */
    bool late;              /* the step before received late messages, which the call has not yet waited for */
    int64_t item_count;     /* of this step */
    bool dropped;           /* the link broke while something was computed: the rest of it was left out */
    ra_link_counts counts;  /* of the link, at the start */
} ra_call;

/* Allocates what the plan's calls on a device need, so that calls on the first stream allocate nothing. While ranks have not
 * decided how payload travels, only ra_call_prepare does. */
ra_status ra_call_reserve(ra_entry *entry);
/* All ranks do this together: what they must settle before a call of this pass. */
ra_status ra_call_prepare(ra_entry *entry, bool backward);
/* Checks the communicator, takes the workspace and the workers. */
ra_status ra_call_begin(ra_call *call, ra_entry *entry, const char *phase, const ra_workspace *workspace, void *stream);
/* Gives everything back, whatever happened, and tells the peers about a failure. Returns status. */
ra_status ra_call_end(ra_call *call, ra_status status);

/* The next `bytes` of the workspace, or NULL for 0 bytes. */
char *ra_call_carve(ra_call *call, int64_t bytes);

/* Start a message of this step. What was sent may be overwritten only after the next step's ra_call_wait, except by what is
 * received in that step. */
ra_status ra_call_recv(ra_call *call, int peer, char *frame, int64_t payload);
/* The same for pieces of K and V, which are made where there is no peer to send them. */
ra_status ra_call_recv_kv(ra_call *call, int peer, char *frame, int64_t payload, const ra_piece *pieces, int64_t count);
ra_status ra_call_send(ra_call *call, int peer, char *frame, int64_t payload);
/* The same for K and V that came in the step before and go on: what the call computes meanwhile may still be under way. */
ra_status ra_call_pass_on(ra_call *call, int peer, char *frame, int64_t payload);
/* The same for messages that may take longer: what comes may be read only after the next step's ra_call_wait, and until then
 * nothing at all may overwrite what was sent. */
ra_status ra_call_recv_late(ra_call *call, int peer, char *frame, int64_t payload);
ra_status ra_call_send_late(ra_call *call, int peer, char *frame, int64_t payload);
/* Waits for all that comes in this step, late messages of the step before, and until what that step sent is free again. */
ra_status ra_call_wait(ra_call *call);

/* The step's items are computed: they took from `start` until now. */
void ra_call_computed(ra_call *call, double start);

#endif
