/* The plans of a communicator, kept by configuration, and what the calls of a plan reuse. */
#ifndef RA_RING_CACHE_H
#define RA_RING_CACHE_H

#include "plan/plan.h"
#include "ring/comm.h"

/* The handle that users hold points to `plan`, which comes first. */
typedef struct ra_entry {
    ra_plan plan;
    ra_comm *comm;
    struct ra_entry *next; /* latest used first */
    bool taken;
    ra_arena arena;                  /* of all that follows */
    char *key;                       /* the configuration as text */
    int64_t key_bytes, shared_bytes; /* the first shared_bytes are what all ranks agree on */
    uint64_t digest;                 /* of those, and of what was chosen */
    /* What steps reuse: messages that are here now, that come next, that were here before, that come home now and that did in
     * the step before. */
    ra_messages held, coming, previous, home, late_home;
    ra_item *items;         /* of a step */
    ra_transfer *transfers; /* posted in a step */
    int64_t transfers_most;
    int64_t frames_most[2]; /* bytes of the frames of the rank that has most of them, forward and backward */
    struct ra_parcel *parcels, *before; /* the same, where there is a lane (lane.h), and those of the step before, */
    ra_transfer *receipts;              /* with their receipts (lane_notices.c) */
    struct ra_net_message *exchange;    /* what one exchange of parcels is made of (lane_nccl.c) */
    int32_t *met;           /* offload, backward: blocks of queries that the keys of each block have met so far */
    ra_stats_data stats;    /* of the latest call */
} ra_entry;

static inline ra_entry *ra_entry_of(ra_plan *plan) { return (ra_entry *)(void *)plan; }

void ra_cache_clear(ra_comm *comm);

#endif
