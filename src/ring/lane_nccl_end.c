/* How a group of NCCL's ends: in peace, when what was sent has left; or by force, when the link breaks, so that kernels of the
 * library which wait for a lost rank end, and streams run on. Either may take long, or never return, so a thread does it and
 * is waited for as long as the timeout says, and no longer. */
#include <time.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/status.h"
#include "core/thread.h"
#include "ring/lane_nccl.h"

#define COURTESY 0.5 /* seconds for which an abort waits until the caller has left the library */

void ra_nccl_ask(ra_nccl *nccl, ra_nccl_wish wish) {
    pthread_mutex_lock(&nccl->mutex);
    if (wish > nccl->wish) nccl->wish = wish;
    pthread_cond_broadcast(&nccl->changed);
    pthread_mutex_unlock(&nccl->mutex);
}

bool ra_nccl_enter(ra_nccl *nccl) {
    pthread_mutex_lock(&nccl->mutex);
    const bool there = nccl->group && nccl->wish != RA_NCCL_ABORT && !nccl->taken;
    if (there) nccl->busy = true;
    pthread_mutex_unlock(&nccl->mutex);
    return there;
}

void ra_nccl_exit(ra_nccl *nccl) {
    pthread_mutex_lock(&nccl->mutex);
    nccl->busy = false;
    pthread_cond_broadcast(&nccl->changed);
    pthread_mutex_unlock(&nccl->mutex);
}

/* ------------------------------------------------------------------------------------------------------------ the thread */

/* With the lock held, which is let go while the library works. False: it is not done, and an abort is called for. */
static bool leave_in_peace(ra_nccl *nccl) {
    const double until = ra_seconds() + nccl->patience;
    pthread_mutex_unlock(&nccl->mutex);
    bool done = false;
    ra_status status = nccl->net->leave(nccl->group);
    for (bool waits = true; waits && status == RA_OK && !done;) {
        status = nccl->net->poll(nccl->group, &done);
        if (!done) nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        pthread_mutex_lock(&nccl->mutex);
        waits = nccl->wish == RA_NCCL_LEAVE && ra_seconds() < until;
        pthread_mutex_unlock(&nccl->mutex);
    }
    if (done && status == RA_OK) nccl->net->close(nccl->group);
    pthread_mutex_lock(&nccl->mutex);
    return done && status == RA_OK;
}

static void *end_group(void *arg) {
    ra_nccl *nccl = arg;
    pthread_mutex_lock(&nccl->mutex);
    while (nccl->wish == RA_NCCL_STAY) pthread_cond_wait(&nccl->changed, &nccl->mutex);
    const struct timespec until = ra_seconds_ahead(COURTESY);
    int waited = 0;
    while (nccl->busy && waited == 0) waited = pthread_cond_timedwait(&nccl->changed, &nccl->mutex, &until);
    nccl->taken = true;
    const bool in_peace = nccl->wish == RA_NCCL_LEAVE && nccl->group && leave_in_peace(nccl);
    if (!in_peace && nccl->group) {
        pthread_mutex_unlock(&nccl->mutex);
        nccl->net->abort(nccl->group);
        pthread_mutex_lock(&nccl->mutex);
    }
    nccl->ended = true;
    pthread_cond_broadcast(&nccl->changed);
    pthread_mutex_unlock(&nccl->mutex);
    return NULL;
}

ra_status ra_nccl_start(ra_nccl *nccl) {
    nccl->threaded = ra_thread_start(&nccl->thread, end_group, nccl);
    return nccl->threaded ? RA_OK : ra_fail(RA_NOMEM, "no thread could be started to end NCCL");
}

/* --------------------------------------------------------------------------------------------------------------- closing */

static bool wait_for_end(ra_nccl *nccl, double seconds) {
    const struct timespec until = ra_seconds_ahead(seconds);
    int waited = 0;
    pthread_mutex_lock(&nccl->mutex);
    while (!nccl->ended && waited == 0) waited = pthread_cond_timedwait(&nccl->changed, &nccl->mutex, &until);
    const bool ended = nccl->ended;
    pthread_mutex_unlock(&nccl->mutex);
    return ended;
}

bool ra_nccl_drain(ra_lane *lane, double seconds) {
    const double until = ra_seconds() + seconds;
    bool passed = false;
    if (lane->copies->record(&lane->queue, &lane->in) != RA_OK) return true; /* the device has failed: nothing runs */
    while (lane->copies->passed(lane->in, &passed) == RA_OK && !passed && ra_seconds() < until)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    return passed;
}

bool ra_nccl_close(ra_nccl *nccl) {
    if (!nccl) return true;
    bool ended = !nccl->threaded;
    if (!ended) {
        ra_nccl_ask(nccl, RA_NCCL_LEAVE);
        ended = wait_for_end(nccl, 2 * nccl->patience + COURTESY); /* one for peace, one for force */
    }
    if (!ended || (nccl->group && !ra_nccl_drain(nccl->lane, nccl->patience))) {
        ra_log(RA_LOG_WARN, "rank %d: NCCL did not end within %.3g s; what it may still use is never freed", nccl->comm->rank,
               nccl->patience);
        if (nccl->threaded) pthread_detach(nccl->thread);
        return false;
    }
    if (nccl->threaded) pthread_join(nccl->thread, NULL);
    pthread_cond_destroy(&nccl->changed);
    pthread_mutex_destroy(&nccl->mutex);
    if (nccl->shared) nccl->lane->copies->unshare(nccl->progress.memory);
    ra_shared_close(&nccl->progress);
    ra_council_close(&nccl->council);
    ra_free(nccl, sizeof *nccl);
    return true;
}

void ra_nccl_keep(ra_nccl *nccl) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static ra_nccl *all;
    pthread_mutex_lock(&mutex);
    nccl->next = all;
    all = nccl;
    pthread_mutex_unlock(&mutex);
}
