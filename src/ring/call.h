/* What a call of ra_forward or ra_backward carries from step to step. */
#ifndef RA_RING_CALL_H
#define RA_RING_CALL_H

#include "plan/plan.h"

typedef struct ra_call {
    ra_plan *plan;
    const char *phase; /* "forward", "backward" */
    ra_pool *pool;
    char *workspace; /* from the pool */
    void *stream;
    int64_t step;
    int64_t transfer_count; /* posted in this step, */
    double posted;          /* the first of them at this time */
    int64_t item_count;     /* of this step */
    double started;
    bool dropped;          /* the link broke while something was computed: the rest of it was left out */
    ra_link_counts counts; /* of the link, at the start */
} ra_call;

/* Allocates what the plan's calls on a device need, so that they themselves allocate nothing on the first stream they are made
 * on. */
ra_status ra_call_reserve(ra_comm *comm, const ra_plan *plan);
/* Checks the communicator, takes the workspace and the workers. */
ra_status ra_call_begin(ra_call *call, ra_plan *plan, const char *phase, int64_t workspace_bytes, void *stream);
/* Gives everything back, whatever happened, and tells the peers about a failure. Returns status. */
ra_status ra_call_end(ra_call *call, ra_status status);

/* The next `bytes` of the workspace, or NULL for 0 bytes; *cursor starts at 0. */
char *ra_call_carve(const ra_call *call, int64_t *cursor, int64_t bytes);

/* Start a message of this step. buffer has room for the header. */
ra_status ra_call_recv(ra_call *call, int peer, char *buffer, int64_t payload);
/* The same for pieces of K and V, which a rank played alone makes for itself. */
ra_status ra_call_recv_kv(ra_call *call, int peer, char *buffer, int64_t payload, const ra_piece *pieces, int64_t count);
ra_status ra_call_send(ra_call *call, int peer, char *buffer, int64_t payload);
/* Waits for all messages of this step. */
ra_status ra_call_wait(ra_call *call);
/* Lets messages progress; a kernel's poll. */
void ra_call_poll(void *call);

/* Where the keys and values of items lie, and where their gradients go (forward: nowhere): sums, and results if single. */
typedef struct ra_item_views {
    ra_tensor k, v, dk, dv, dk_result, dv_result;
} ra_item_views;
/* Adds the items of a piece to the step: of what is at home, in this rank's tensors, or of a packed piece. */
void ra_call_items_home(ra_call *call, const ra_piece *piece, const ra_item_views *home);
void ra_call_items_packed(ra_call *call, const ra_piece *piece, const ra_item_views *packed);
/* Adds the items of all rings that this rank has for itself. */
void ra_call_items_local(ra_call *call, const ra_item_views *home);

double ra_seconds(void);
/* Tells the tracer, if there is one, about a stretch that ends now, and the log about a step. */
void ra_call_trace(const ra_call *call, ra_activity activity, int peer, int64_t bytes, double begin);

#endif
