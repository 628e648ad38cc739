/* One forward or backward pass of a rank, as every schedule walks it. */
#ifndef RA_RING_PASS_H
#define RA_RING_PASS_H

#include "core/frame.h"
#include "ring/call.h"

/* Where the keys and values of items lie, and where their gradients go (forward: nowhere): sums, and results if single. */
typedef struct ra_item_views {
    ra_tensor k, v, dk, dv, dk_result, dv_result;
    int64_t sums_size; /* of an element of dk and dv */
} ra_item_views;

typedef struct ra_pass {
    ra_call call;
    ra_forward_pass *forward;   /* this, */
    ra_backward_pass *backward; /* or that */
    ra_item_views home;         /* this rank's own */
    bool home_waits;            /* a parted pass (ra_pass_shape) that has not computed its rows at home, */
    int64_t home_items;         /* whose items are so many at the front of the first step's */
    char *kv[2];                /* frames of K and V. ring: of this hop, of the next; gather: in, out */
    char *grads[3], *grads_in;  /* frames of dK and dV: computed in this step, in those before (ring); arriving, */
    char *grads_home[2];        /* coming home at even and odd hops but 0; NULL: behind grads_in */
    char *travelling[2];        /* replicated queries: frames of the state (dq), this rank's and a peer's */
} ra_pass;

/* Computes the items gathered so far, as one step; `last`: no other comes after it. */
ra_status ra_pass_compute(ra_pass *pass, bool last);

/* Bytes of the pieces of a message: of K and V (or dK and dV) together, as rows or as sums. */
int64_t ra_rows_bytes(const ra_call *call, const ra_piece *piece);
int64_t ra_sums_bytes(const ra_call *call, const ra_piece *piece);

/* Gives items the views of their heads; size: bytes of an element of k. */
void ra_items_look(const ra_item_views *views, int64_t size, ra_item *items, int64_t count);
/* Add the items of a piece to the step: of what is at home, or packed at `packed` (K, then V), with their gradients at `sums`
 * (NULL in forward). True: they write all sums of the piece, whatever these hold; if not, the sums must be zeroed before. */
void ra_items_home(ra_pass *pass, const ra_piece *piece);
bool ra_items_packed(ra_pass *pass, const ra_piece *piece, char *packed, char *sums);
/* Adds the items of all rings that this rank has for itself. */
void ra_items_local(ra_pass *pass);

/* K and V of a piece between this rank's tensors and a message, and its gradients on their way home. */
ra_status ra_pack_piece(ra_pass *pass, const ra_piece *piece, char *packed);
ra_status ra_add_piece_home(ra_pass *pass, const ra_piece *piece, const char *sums);

/* The schedules. */
ra_status ra_walk_rounds(ra_pass *pass);
ra_status ra_gather(ra_pass *pass);
ra_status ra_merge(ra_pass *pass);

/* Arguments have been checked. */
ra_status ra_ring_forward(ra_plan *plan, const ra_forward_args *args);
ra_status ra_ring_backward(ra_plan *plan, const ra_backward_args *args);

#endif
