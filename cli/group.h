/* A group of ranks: threads of this process, or (under a launcher) this process as one rank of many. */
#ifndef CLI_GROUP_H
#define CLI_GROUP_H

#include <stdatomic.h>

#include "options.h"

typedef struct rank_job rank_job;
typedef ra_status (*rank_function)(rank_job *job);

typedef struct group {
    int ranks;
    int first, local;     /* the ranks of this process */
    ra_comm **comms;      /* [local] */
    bool on_gpus;         /* they compute on GPUs, each on another one as far as there are any */
    _Atomic int64_t done; /* for the progress bar: rank bodies add to it, up to total */
    int64_t total;
    double expected; /* or, where nothing can be counted, the seconds that it should take; 0: unknown */
    ra_status (*run)(struct group *g, rank_function body, void *arg); /* in place of threads; NULL: threads */
} group;

/* True if the settings and the environment ask for one process a rank. */
bool group_launched(const settings *s);
/* The rank that the launcher gave this process; 0 without one. */
int group_launcher_rank(void);
/* The number of processes that the launcher says; 0 if it says none. */
int group_launcher_ranks(void);
/* Is this a rank of a job whose rank 0 does what is to be done once? False where each process works alone. */
bool group_follows(const settings *s);

/* How many ranks the settings ask for: --ring-size, or the launcher's number. Under a launcher this joins the other
 * processes; from then on every group is that of all of them, only rank 0 has an output, and the process must end through
 * group_end. */
ra_status group_ranks(const settings *s, int *ranks);
/* The communicator of all processes, NULL where ranks are threads. */
ra_comm *group_world(void);
/* The last thing before exit. After a failure the peers are told, and where they are processes this one ends at once, by
 * `code`; with `quiet` it first leaves another rank time to say what went wrong, since launchers kill the rest when
 * one process ends. */
void group_end(ra_status status, int code, bool quiet);

/* Opens the communicators of `ranks` ranks. */
ra_status group_open(const settings *s, int ranks, group *g);
void group_close(group *g);

/* What a rank's thread works with. */
struct rank_job {
    group *group;
    int rank, ranks;
    ra_comm *comm;
    void *arg;
};

/* Runs body once for each rank of this process, each on a thread of its own, and waits for all. A rank that fails tells the
 * others. Returns the cause: a failure that is not merely the report of another rank's. `what` labels the
 * progress bar. */
ra_status group_run(group *g, const char *what, rank_function body, void *arg);

/* all has an entry of `bytes` bytes for each rank, of which those of this process are filled: fills the others. Returns when
 * every rank has come so far. */
ra_status group_gather(group *g, void *all, int64_t bytes);
/* True in the process that publishes and prints. */
static inline bool group_speaks(const group *g) { return g->first == 0; }

#endif
