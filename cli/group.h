/* A group of ranks: threads of this process, or (under a launcher) this process as one rank of many. */
#ifndef CLI_GROUP_H
#define CLI_GROUP_H

#include <stdatomic.h>

#include "options.h"

typedef struct group {
    int ranks;
    int first, local;     /* the ranks of this process */
    ra_comm **comms;      /* [local] */
    _Atomic int64_t done; /* for the progress bar: rank bodies add to it, up to total */
    int64_t total;
} group;

/* How many ranks the settings ask for: --ring-size, or the launcher's number. */
ra_status group_ranks(const settings *s, int *ranks);
/* Opens the communicators of `ranks` ranks. */
ra_status group_open(const settings *s, int ranks, group *g);
void group_close(group *g);

/* What a rank's thread works with. */
typedef struct rank_job {
    group *group;
    int rank, ranks;
    ra_comm *comm;
    void *arg;
} rank_job;

/* Runs body once for each rank of this process, each on a thread of its own, and waits for all. A rank that fails tells the
 * others. Returns the failure that came first in meaning: one that is not merely the echo of another's. `what` labels the
 * progress bar. */
ra_status group_run(group *g, const char *what, ra_status (*body)(rank_job *job), void *arg);

/* True on the rank that speaks. */
static inline bool group_speaks(const group *g) { return g->first == 0; }

#endif
