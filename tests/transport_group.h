/* A group of links over any transport, one thread a rank, for tests/transport_*.c. */
#ifndef TESTS_TRANSPORT_GROUP_H
#define TESTS_TRANSPORT_GROUP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "support_fault.h"
#include "support_patience.h"
#include "transport/link.h"
#include "transport_sockets.h"

#define MOST_RANKS 8

typedef enum group_kind { OVER_THREADS, OVER_SOCKETS, OVER_CALLER_THREAD, GROUP_KINDS } group_kind;

static const char *const group_names[GROUP_KINDS] = {"threads", "sockets", "threads without a thread of its own"};

typedef struct group {
    int ranks;
    ra_link *links[MOST_RANKS];
    void *faults[MOST_RANKS]; /* every rank has one: it counts */
} group;

static inline double seconds_now(void) { return socket_now(); }

static inline void sleep_for(double seconds) {
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) continue;
}

static inline void group_open(group *g, group_kind kind, int ranks, double timeout) {
    ra_comm_ops ops, faulty;
    void *ctxs[MOST_RANKS];
    assert_true(ranks <= MOST_RANKS);
    *g = (group){.ranks = ranks};
    if (kind == OVER_SOCKETS) assert_int_equal(sockets_create(ranks, &ops, ctxs), RA_OK);
    else assert_int_equal(ra_transport_threads(ranks, &ops, ctxs), RA_OK);
    if (kind == OVER_CALLER_THREAD) ops.flags = RA_COMM_CALLER_THREAD;
    for (int rank = 0; rank < ranks; rank++) {
        assert_int_equal(ra_transport_fault(&ops, ctxs[rank], NULL, &faulty, &g->faults[rank]), RA_OK);
        assert_int_equal(ra_link_create(&faulty, g->faults[rank], rank, ranks, group_names[kind], &g->links[rank]), RA_OK);
        assert_int_equal(ra_link_set_timeout(g->links[rank], timeout, timeout), RA_OK);
    }
}

static inline void group_close(group *g) {
    for (int rank = 0; rank < g->ranks; rank++) ra_link_destroy(g->links[rank]);
}

/* ----------------------------------------------------------------------------------------------------------- rank threads */

/* What a rank's thread saw. cmocka's assertions belong to the main thread, so ranks note their first complaint. */
typedef struct rank_run {
    group *g;
    int rank;
    ra_link *link;
    void *arg;
    ra_status status;
    char sentence[512], complaint[256];
    double seconds, ended; /* how long the body took, and when it ended */
    pthread_t thread;
    void (*body)(struct rank_run *run);
} rank_run;

#define EXPECT(run, condition)                                                                                                 \
    do {                                                                                                                       \
        if (!(condition) && !(run)->complaint[0])                                                                              \
            snprintf((run)->complaint, sizeof(run)->complaint, "rank %d, line %d: %s (%.100s)", (run)->rank, __LINE__,         \
                     #condition, ra_last_error());                                                                             \
    } while (0)

static inline void *rank_main(void *arg) {
    rank_run *run = arg;
    double begin = seconds_now();
    run->body(run);
    run->ended = seconds_now();
    run->seconds = run->ended - begin;
    return NULL;
}

static inline void start_ranks(group *g, rank_run *runs, void (*body)(rank_run *run), void *arg) {
    for (int rank = 0; rank < g->ranks; rank++) {
        runs[rank] = (rank_run){.g = g, .rank = rank, .link = g->links[rank], .arg = arg, .body = body};
        assert_int_equal(pthread_create(&runs[rank].thread, NULL, rank_main, &runs[rank]), 0);
    }
}

static inline void join_ranks(group *g, rank_run *runs) {
    for (int rank = 0; rank < g->ranks; rank++) pthread_join(runs[rank].thread, NULL);
}

/* Runs body on every rank and fails the test with the first complaint. */
static inline void run_ranks(group *g, void (*body)(rank_run *run), void *arg) {
    rank_run runs[MOST_RANKS];
    start_ranks(g, runs, body, arg);
    join_ranks(g, runs);
    for (int rank = 0; rank < g->ranks; rank++)
        if (runs[rank].complaint[0]) fail_msg("%s", runs[rank].complaint);
}

static inline void note_failure(rank_run *run, ra_status status) {
    run->status = status;
    if (status != RA_OK) snprintf(run->sentence, sizeof run->sentence, "%s", ra_last_error());
}

/* ------------------------------------------------------------------------------------------------------------------ a ring */

typedef struct ring_job {
    int64_t steps, payload;
    double compute; /* seconds between posting and waiting */
    int slow;       /* the rank that computes for slow_seconds at step 1; -1: none */
    double slow_seconds;
} ring_job;

/* A buffer that the transport would not let go of; within reach of a leak checker. */
static char *kept_for_ever[256];
static inline void keep_for_ever(char *buffer) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    int slot = 0;
    while (slot < 255 && kept_for_ever[slot]) slot++;
    kept_for_ever[slot] = buffer;
    pthread_mutex_unlock(&mutex);
}

/* Passes a buffer around, step by step: the traffic of a ring without its attention. Returns the first failure. */
static inline ra_status pass_around(ra_link *link, const ring_job *job) {
    int rank = ra_link_rank(link), ranks = ra_link_size(link);
    int64_t bytes = RA_LINK_HEADER + job->payload;
    char *buffers[2] = {calloc(1, (size_t)bytes), calloc(1, (size_t)bytes)};
    memset(buffers[0] + RA_LINK_HEADER, rank + 1, (size_t)job->payload);
    ra_status status = RA_OK;
    bool keep = false;
    for (int64_t step = 0; step < job->steps && status == RA_OK; step++) {
        ra_transfer transfers[2] = {{0}};
        status = ra_link_recv(link, (rank + ranks - 1) % ranks, (uint64_t)step, step, buffers[1], job->payload, &transfers[0]);
        if (status == RA_OK)
            status = ra_link_send(link, (rank + 1) % ranks, (uint64_t)step, step, buffers[0], job->payload, &transfers[1]);
        if (rank == job->slow && step == 1) sleep_for(job->slow_seconds);
        else if (job->compute > 0) sleep_for(job->compute);
        ra_link_poll(link);
        if (status == RA_OK) status = ra_link_wait(link, transfers, 2, "forward");
        if (status == RA_OK && job->payload > 0) {
            int64_t source = (rank + (step + 1) * (ranks - 1)) % ranks;
            if (buffers[1][RA_LINK_HEADER] != (char)(source + 1) || buffers[1][bytes - 1] != (char)(source + 1))
                status = RA_INTERNAL;
        }
        if (status != RA_OK && !ra_link_cancel(link, transfers, 2)) keep = true;
        char *swap = buffers[0];
        buffers[0] = buffers[1];
        buffers[1] = swap;
    }
    for (int i = 0; i < 2; i++) {
        if (keep) keep_for_ever(buffers[i]);
        else free(buffers[i]);
    }
    return status;
}

static inline void ring_body(rank_run *run) { note_failure(run, pass_around(run->link, run->arg)); }

#endif
