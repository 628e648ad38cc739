/* One forward or backward pass of a rank: what every schedule needs, and the schedules. */
#ifndef RA_RING_PASS_H
#define RA_RING_PASS_H

#include "ring/call.h"

typedef struct ra_forward_pass {
    ra_call call;
    const ra_forward_args *args;
    ra_forward_step step;
    ra_item_views home;
    char *buffer[2]; /* of messages of K and V */
    char *state[2];  /* replicated queries: messages of (acc, m, l), this rank's and a peer's */
    bool last;       /* no step comes after the next */
} ra_forward_pass;

/* Computes the items gathered so far, as one step. */
ra_status ra_forward_compute(ra_forward_pass *pass);

typedef struct ra_backward_pass {
    ra_call call;
    const ra_backward_args *args;
    ra_backward_step step;
    ra_item_views home;
    char *buffer[2];
    char *grads[2]; /* messages of dK and dV that are computed here */
    char *grads_in;
    char *state[2];           /* replicated queries: messages of dq, this rank's and a peer's */
    int64_t size, state_size; /* bytes of an element of k, of dk */
} ra_backward_pass;

ra_status ra_backward_compute(ra_backward_pass *pass);

/* Bytes of a message in a buffer, 0 for one without payload. */
static inline int64_t ra_framed(int64_t payload) { return payload ? ra_round_up(RA_LINK_HEADER + payload, 64) : 0; }

/* Adds the items of packed pieces that lie one after the other at `packed` (K and V), with their gradients at `sums` (NULL in
 * forward). */
void ra_add_packed(ra_call *call, const ra_piece *pieces, int64_t count, char *packed, char *sums);

/* The schedules. */
ra_status ra_ring_rounds_forward(ra_forward_pass *pass);
ra_status ra_ring_rounds_backward(ra_backward_pass *pass);
ra_status ra_gather_forward(ra_forward_pass *pass);
ra_status ra_gather_backward(ra_backward_pass *pass);
ra_status ra_merge_forward(ra_forward_pass *pass);
ra_status ra_merge_backward(ra_backward_pass *pass);
/* Bytes that a rank sends in a merge of states of this size. */
int64_t ra_merge_bytes(ra_schedule schedule, int rank, int ranks, int64_t state_bytes);

#endif
