/* The inside of an NCCL lane, shared by lane_nccl.c (deciding, messages) and lane_nccl_end.c (how it ends). */
#ifndef RA_RING_LANE_NCCL_H
#define RA_RING_LANE_NCCL_H

#include <pthread.h>

#include "ring/council.h"
#include "ring/lane.h"

/* What is to become of the group; a later one is never taken back. */
typedef enum ra_nccl_wish { RA_NCCL_STAY, RA_NCCL_LEAVE, RA_NCCL_ABORT } ra_nccl_wish;

struct ra_nccl {
    const ra_net_ops *net;
    ra_comm *comm;
    ra_lane *lane;
    ra_council council;
    ra_pool *pool;   /* of the device's memory, */
    void *trial;     /* and what it gave for the first exchange */
    void *group;     /* the library's; NULL: none yet */
    double patience; /* seconds that its end may take: the timeout of the latest call */

    ra_shared progress; /* counters that the lane's queue raises: exchanges that it has begun, and done */
    bool shared;        /* the device knows them */
    uint64_t exchanges; /* so far */
    double allowance;   /* seconds that the largest of the call may take */
    uint64_t seen;      /* the sum of both counters, */
    double seen_at;     /* and since when */
    double told;        /* what the link was told of that */

    /* Its end is made by a thread of its own, for the library may not return from that. */
    pthread_t thread;
    bool threaded;
    pthread_mutex_t mutex; /* around what follows */
    pthread_cond_t changed;
    ra_nccl_wish wish;
    bool busy;  /* the caller is in the library, */
    bool taken; /* the thread has the group from now on, */
    bool ended; /* and is done with it */

    ra_nccl *next; /* of those that are kept for ever, with what the device may use */
};

/* Starts the thread. */
ra_status ra_nccl_start(ra_nccl *nccl);
/* Asks for the end of the group, from any thread, and returns at once. */
void ra_nccl_ask(ra_nccl *nccl, ra_nccl_wish wish);
/* Around every use of the group by the caller; false: it is gone. */
bool ra_nccl_enter(ra_nccl *nccl);
void ra_nccl_exit(ra_nccl *nccl);

/* Is the lane's queue through with all that it was given, by then? */
bool ra_nccl_drain(ra_lane *lane, double seconds);

#endif
