/* A communicator: the link to the peers, and what a rank keeps between calls. */
#ifndef RA_RING_COMM_H
#define RA_RING_COMM_H

#include <sys/types.h>

#include "core/pool.h"
#include "core/workers.h"
#include "ringattn_cuda.h"
#include "transport/link.h"

#define RA_CACHE_ENTRIES 32
#define RA_RESTING 3

typedef struct ra_lane ra_lane;         /* lane.h */
typedef struct ra_together ra_together; /* together.c */
typedef struct ra_offload ra_offload;   /* offload.h */

struct ra_comm {
    ra_link *link;
    pid_t process; /* that made it: a forked child lacks its threads */
    int rank, ranks;
    ra_together *together; /* all ranks are of this process (lane.h); NULL: not known to be */
    ra_solo_ops solo; /* of a rank played alone, */
    ra_cuda_maker device_maker; /* and where its device has memory of its own; NULL: there is none */
    void *device_maker_ctx;
    void (*trace)(void *ctx, const ra_trace_event *event); /* NULL: nobody looks */
    void *trace_ctx;
    ra_pool *pool, *device_pool;     /* the second is made by the first plan on a device */
    bool placed;    /* there was a plan on a device with memory of its own, */
    int place;      /* which is this one of its kind */
    ra_lane *lane;                   /* made by the first plan of several ranks on a device with memory of its own */
    ra_offload *offload;             /* made by the first plan with offload */
    ra_workers *workers;             /* of the latest call */
    ra_workers *resting[RA_RESTING]; /* of other counts, latest used first: calls that alternate start no threads */
    uint64_t *sent, *received;       /* messages to and from each rank so far: the next tags */
    bool merging;   /* the latest plan that all ranks agreed on has replicated queries: the next may agree while merging */
    struct ra_entry *plans; /* cached, latest used first */
    int64_t plan_count;
    int64_t cache_hits, cache_misses;
};

/* Takes the link over, also on failure. */
ra_status ra_comm_from_link(ra_link *link, ra_comm **comm);
/* RA_OK, or why the communicator cannot be used: it is broken, or this is a forked child of its process. */
ra_status ra_comm_usable(const ra_comm *comm);
/* Makes comm->workers have `count` workers. */
ra_status ra_comm_workers(ra_comm *comm, int count);

#endif
