#include "group.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "core/status.h"
#include "progress.h"
#include "ringattn_cuda.h"
#include "ringattn_mpi.h"
#include "trace.h"

/* The communicator of all processes, once they have met. */
static ra_comm *world;
static bool uses_mpi;

bool group_launched(const settings *s) {
    return s->transport == TRANSPORT_MPI || s->transport == TRANSPORT_NCCL ||
           (s->transport == TRANSPORT_AUTO && ra_mpi_is_launched());
}

/* The number in the first of three variables that is there; 0 if none is. */
static int number_in(const char *const names[3]) {
    for (int i = 0; i < 3; i++)
        if (getenv(names[i])) return (int)strtol(getenv(names[i]), NULL, 10);
    return 0;
}

int group_launcher_rank(void) {
    return number_in((const char *const[]){"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"});
}

int group_launcher_ranks(void) {
    return number_in((const char *const[]){"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"});
}

bool group_follows(const settings *s) {
    if (world) return ra_comm_rank(world) > 0;
    const bool job = group_launcher_ranks() > 1 || getenv("PMIX_RANK"); /* a lone PMI_RANK has no other rank */
    return group_launched(s) && job && group_launcher_rank() > 0;
}

/* Among the ranks of this host. */
static int launcher_local_rank(void) {
    return number_in((const char *const[]){"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"});
}

/* Of a host's GPUs each rank takes another; if there are fewer, some share one. Where there is none, who needs it says so. */
static ra_status take_gpu(int local_rank) {
    int gpus;
    return ra_cuda_count(&gpus) == RA_OK && gpus > 1 ? ra_cuda_use(local_rank % gpus) : RA_OK;
}

static ra_status set_timeouts(const settings *s, ra_comm *comm) {
    RA_TRY(ra_comm_set_timeout(comm, s->timeout, s->start_timeout));
    return ra_comm_set_call_timeout(comm, s->call_timeout);
}

/* Descriptors are compared by the library. The command and these options say which calls a rank makes, and how many: where
 * they differ, ranks would wait for a call that no other makes, or take each other's messages for something else. */
static ra_status agree_on_calls(const settings *s) {
    static const option_id ids[] = {OPT_CASES, OPT_PASS, OPT_REPEAT, OPT_TRACE};
    enum { OPTIONS = sizeof ids / sizeof *ids, COUNT = OPTIONS + 1 };
    const int64_t mine[COUNT] = {s->cases, s->pass, s->repeat, s->trace != NULL, s->command};
    int64_t(*all)[COUNT] = calloc((size_t)ra_comm_size(world), sizeof *all);
    if (!all) return ra_fail(RA_NOMEM, "no memory for %d ranks", ra_comm_size(world));
    ra_status status = ra_comm_allgather(world, mine, all, (int64_t)sizeof mine);
    for (int rank = 1; rank < ra_comm_size(world) && status == RA_OK; rank++) {
        const int64_t here = all[0][OPTIONS], there = all[rank][OPTIONS];
        if (here != there)
            status = ra_fail(RA_DISAGREE, "ranks disagree: the command is %s on rank 0 and %s on rank %d", commands[here].name,
                             commands[there].name, rank);
        for (int i = 0; i < OPTIONS && status == RA_OK; i++)
            if (all[rank][i] != all[0][i])
                status = ra_fail(RA_DISAGREE, "ranks disagree: --%s is %lld on rank 0 and %lld on rank %d%s",
                                 options[ids[i]].name, (long long)all[0][i], (long long)all[rank][i], rank,
                                 ids[i] == OPT_PASS ? " (0 is fwd, 1 bwd, 2 both)" : "");
    }
    free(all);
    return status;
}

ra_status group_ranks(const settings *s, int *ranks) {
    *ranks = (int)s->ring_size;
    if (!group_launched(s)) return RA_OK;
    const bool first = !world;
    if (first) {
        uses_mpi = true;
        if (s->transport == TRANSPORT_NCCL && setenv("RINGATTN_LANE", "nccl", 1) != 0)
            return ra_fail(RA_NOMEM, "no memory for a variable of the environment");
        /* MPICH's launcher tells the survivors of a dead rank by this signal, and MPICH 4.0's handler of it, which MPI_Init
         * installs, crashes them. The library finds the dead by itself. */
        signal(SIGUSR1, SIG_IGN);
        RA_TRY(ra_comm_mpi_world(s->start_timeout, &world));
        signal(SIGUSR1, SIG_IGN);
    }
    RA_TRY(set_timeouts(s, world));
    if (first) RA_TRY(agree_on_calls(s));
    if (s->device == DEVICE_CUDA) RA_TRY(take_gpu(launcher_local_rank()));
    *ranks = ra_comm_size(world);
    if (ra_comm_rank(world) != 0 && !freopen("/dev/null", "w", stdout)) return ra_fail(RA_IO, "/dev/null cannot be written");
    if (s->given[OPT_RING_SIZE] && s->ring_size != *ranks)
        return ra_fail(RA_INVALID, "--ring-size %lld contradicts the launcher's %d ranks", (long long)s->ring_size, *ranks);
    return RA_OK;
}

ra_comm *group_world(void) { return world; }

void group_end(ra_status status, int code, bool quiet) {
    if (world && status == RA_OK) {
        ra_comm_destroy(world);
        world = NULL;
        return;
    }
    if (world) {
        ra_comm_abort(world, status, ra_last_error());
        ra_comm_destroy(world); /* sends its last word */
    }
    if (quiet) {
        nanosleep(&(struct timespec){5, 0}, NULL); /* the launcher ends this as soon as the other rank has left */
        /* Open MPI's has not, so the mistake is this rank's own. (MPICH's does not while no rank has begun with MPI; and if
         * they have met, the others were told.) */
        if (!world && getenv("OMPI_COMM_WORLD_RANK"))
            fprintf(stderr, "ringattn: rank %d: %s\n", group_launcher_rank(), ra_last_error());
    }
    if (uses_mpi) _exit(code); /* MPI is not finalized now: that could wait for a rank that is gone, or never came */
}

ra_status group_open(const settings *s, int ranks, group *g) {
    memset(g, 0, sizeof *g);
    g->ranks = ranks;
    g->local = world ? 1 : ranks;
    g->on_gpus = s->device == DEVICE_CUDA;
    g->comms = calloc((size_t)g->local, sizeof(ra_comm *));
    if (!g->comms) return ra_fail(RA_NOMEM, "no memory for %d ranks", ranks);
    ra_status status = RA_OK;
    if (world) {
        g->comms[0] = world;
        g->first = ra_comm_rank(world);
        return trace_attach(s, world);
    }
    status = ranks == 1 && s->transport != TRANSPORT_THREADS ? ra_comm_self(g->comms) : ra_comm_threads(ranks, g->comms);
    if (status == RA_INVALID) /* too many for one process */
        ra_fail_context(status, s->command == CMD_MEMORY ? "--ring-sizes: " : "--ring-size: ");
    for (int i = 0; i < g->local && status == RA_OK; i++)
        status = set_timeouts(s, g->comms[i]);
    for (int i = 0; i < g->local && status == RA_OK; i++) status = trace_attach(s, g->comms[i]);
    if (status != RA_OK) group_close(g);
    return status;
}

void group_close(group *g) {
    for (int i = 0; i < g->local && g->comms; i++)
        if (g->comms[i] != world) ra_comm_destroy(g->comms[i]);
    free(g->comms);
    memset(g, 0, sizeof *g);
}

ra_status group_gather(group *g, void *all, int64_t bytes) {
    if (g->local == g->ranks) return RA_OK;
    return ra_comm_allgather(g->comms[0], (char *)all + g->first * bytes, all, bytes);
}

/* ----------------------------------------------------------------------------------------------------------- threads */

typedef struct rank_thread {
    rank_job job;
    rank_function body;
    ra_status status;
    char sentence[1024];
    pthread_t thread;
    bool started;
    _Atomic int *running;
} rank_thread;

static void *rank_main(void *arg) {
    rank_thread *t = arg;
    t->status = t->job.group->on_gpus ? take_gpu(t->job.rank) : RA_OK;
    if (t->status == RA_OK) t->status = t->body(&t->job);
    if (t->status != RA_OK) {
        snprintf(t->sentence, sizeof t->sentence, "%s", ra_last_error());
        ra_comm_abort(t->job.comm, t->status, t->sentence);
    }
    atomic_fetch_sub(t->running, 1);
    return NULL;
}

/* How likely a failure is the cause: those that only report another rank's failure weigh less. */
static int weight(ra_status status) {
    switch (status) {
    case RA_OK: return 0;
    case RA_ABORTED: return 1;
    case RA_PEER_LOST: return 2;
    case RA_TIMEOUT: return 3;
    default: return 4;
    }
}

/* Progress after a share of the expected time: in proportion at first, then ever slower, so that it never claims the end. */
static double guess(double share) { return share < 0.8 ? share : 1 - 0.2 * exp(-(share - 0.8) / 0.2); }

static void watch(const group *g, const char *what, _Atomic int *running) {
    double start = now();
    progress_start(what);
    for (long nanoseconds = 50000; atomic_load(running) > 0;) {
        nanosleep(&(struct timespec){0, nanoseconds}, NULL);
        if (nanoseconds < 50000000) nanoseconds *= 2;
        if (g->total > 0) progress_set((double)atomic_load(&g->done) / (double)g->total);
        else if (g->expected > 0) progress_set(guess((now() - start) / g->expected));
    }
    progress_end();
}

ra_status group_run(group *g, const char *what, rank_function body, void *arg) {
    if (g->run) return g->run(g, body, arg);
    if (g->comms[0] == world) return body(&(rank_job){g, g->first, g->ranks, world, arg});
    rank_thread *threads = calloc((size_t)g->local, sizeof *threads);
    if (!threads) return ra_fail(RA_NOMEM, "no memory for %d ranks", g->local);
    _Atomic int running = g->local;
    for (int i = 0; i < g->local; i++) {
        threads[i] = (rank_thread){.job = {g, g->first + i, g->ranks, g->comms[i], arg}, .body = body, .running = &running};
        threads[i].started = pthread_create(&threads[i].thread, NULL, rank_main, &threads[i]) == 0;
        if (threads[i].started) continue;
        threads[i].status = RA_NOMEM;
        snprintf(threads[i].sentence, sizeof threads[i].sentence, "the thread of rank %d could not be started", g->first + i);
        ra_comm_abort(g->comms[i], RA_NOMEM, threads[i].sentence);
        atomic_fetch_sub(&running, 1);
    }
    watch(g, what, &running);
    int worst = 0;
    for (int i = 0; i < g->local; i++) {
        if (threads[i].started) pthread_join(threads[i].thread, NULL);
        if (weight(threads[i].status) > weight(threads[worst].status)) worst = i;
    }
    ra_status status = threads[worst].status;
    if (status != RA_OK) ra_fail(status, "%s", threads[worst].sentence);
    free(threads);
    return status;
}
