/* What the walk over rounds and the gradients that follow it share. */
#ifndef RA_RING_ROUNDS_H
#define RA_RING_ROUNDS_H

#include "ring/pass.h"

/* A round, and the channels of it that this rank is a member of. */
typedef struct ra_round_of {
    const ra_round *round;
    const ra_own_channel *own;
    int64_t own_count;
} ra_round_of;

/* dK and dV on their way, one hop behind K and V. */
typedef struct ra_gradients {
    char *local, *out;     /* frames: computed in this step, in the step before, */
    char *resting;         /* and before that: it may still be read by others. NULL: nothing is late */
    int32_t out_hop;       /* at which hop `out` was computed; 0: it holds nothing */
    int32_t finished_hops; /* gradients of own buckets that went so far come home in this step; 0: none do */
    char *home;            /* frames: they */
    int32_t late_hops;     /* the same of the step before, if they are added in this one */
    char *late_home;
    bool late;             /* messages of this step are */
} ra_gradients;

ra_gradients *ra_gradients_open(ra_pass *pass, ra_gradients *gradients);
/* Post what arrives at this hop, and what the step before computed. */
ra_status ra_gradients_receive(ra_pass *pass, ra_gradients *gradients, const ra_round_of *round, int64_t bucket, int32_t hop);
ra_status ra_gradients_send(ra_pass *pass, ra_gradients *gradients);
/* Adds the items of what is held, with their gradients. */
ra_status ra_gradients_items(ra_pass *pass, ra_gradients *gradients, int32_t hop);
/* After the exchange: adds what arrived. What was computed here goes out in the next step. */
ra_status ra_gradients_add(ra_pass *pass, ra_gradients *gradients, int32_t hop);

#endif
