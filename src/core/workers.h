/* A rank's worker threads. The caller's thread is worker 0, so `count` 1 starts no thread at all. */
#ifndef RA_CORE_WORKERS_H
#define RA_CORE_WORKERS_H

#include "ringattn.h"

typedef struct ra_workers ra_workers;

/* count >= 1. Threads start here and sleep; RA_NOMEM if they cannot. */
ra_status ra_workers_create(int count, ra_workers **workers);
void ra_workers_destroy(ra_workers *workers);
int ra_workers_count(const ra_workers *workers);

/* Runs task(arg, index, worker) once for each index in [0, count), in ascending hand-out order, on all workers, and returns
 * when all are done. `worker` in [0, ra_workers_count) tells whose scratch to use. Between tasks worker 0 calls poll(poll_arg)
 * if given. */
void ra_workers_run(ra_workers *workers, int64_t count, void (*task)(void *arg, int64_t index, int worker), void *arg,
                    void (*poll)(void *poll_arg), void *poll_arg);
/* The same, and every worker calls last(arg, worker) when no tasks are left for it, before it leaves. */
void ra_workers_run_to(ra_workers *workers, int64_t count, void (*task)(void *arg, int64_t index, int worker),
                       void (*last)(void *arg, int worker), void *arg, void (*poll)(void *poll_arg), void *poll_arg);

/* To be called from poll, or between runs. While `drop` is set, tasks that have not begun are skipped, in this run and in later
 * ones. */
void ra_workers_drop(ra_workers *workers, bool drop);

/* A moment's rest in a loop that waits for another thread. */
static inline void ra_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` is free on most cores; this waits about as long as a pause */
#endif
}

/* Cores this process may use: affinity and cgroup limits. At least 1. */
int ra_usable_cores(void);

#endif
