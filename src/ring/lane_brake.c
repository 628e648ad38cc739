/* The brake: what a lane brings arrives as slowly as over a network of RINGATTN_LANE_RATE gigabytes a second, for tests and to
 * measure on one GPU how much of such a network's time a ring hides.
 *
 *     lane     ... | here = bytes so far | wait until released is as much | copy ...
 *     thread          sees it, lets so much time pass,  released = here
 *
 * Both counters are in memory that the device knows, so no kernel and no copy runs while a message is held back. What is held
 * back when a lane closes comes in its time: other ranks may wait for it. */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "core/alloc.h"
#include "core/log.h"
#include "core/shared.h"
#include "core/status.h"
#include "core/thread.h"
#include "ring/lane.h"

struct ra_brake {
    const ra_copy_ops *copies;
    double rate;  /* bytes a second */
    int64_t held; /* bytes that the lane was told to hold back, in all */
    void *end;    /* moment of the lane: all of it has come. Made in time, for whoever closes may be on another device */
    ra_shared counters;
    bool shared; /* the device knows them */
    pthread_t thread;
    bool runs;
    atomic_bool over; /* the thread ends */
};

enum { HERE, RELEASED }; /* counters */

static _Atomic uint64_t *counter(const ra_brake *brake, int which) {
    return (_Atomic uint64_t *)brake->counters.memory + which;
}

/* In bytes a second; 0: nobody wants a brake. */
static double wanted_rate(void) {
    const char *text = getenv("RINGATTN_LANE_RATE");
    if (!text || !*text) return 0;
    char *end;
    const double rate = strtod(text, &end);
    if (*end == 0 && rate > 0 && isfinite(rate)) return 1e9 * rate;
    ra_log(RA_LOG_WARN, "RINGATTN_LANE_RATE is %s: ignored, since it is no number of gigabytes a second", text);
    return 0;
}

static void *let_pass(void *arg) {
    ra_brake *brake = arg;
    double since = 0; /* when the bytes came that are held back now; 0: none are */
    while (!atomic_load(&brake->over)) {
        const uint64_t here = atomic_load(counter(brake, HERE)), released = atomic_load(counter(brake, RELEASED));
        const double now = ra_seconds();
        if (here == released) since = 0;
        else if (since == 0) since = now;
        if (since > 0 && now - since >= (double)(here - released) / brake->rate) {
            atomic_store(counter(brake, RELEASED), here);
            since = 0;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000}, NULL);
    }
    return NULL;
}

ra_status ra_brake_open(const ra_copy_ops *copies, const ra_queue *lane, ra_brake **result) {
    *result = NULL;
    const double rate = wanted_rate();
    if (rate == 0) return RA_OK;
    ra_brake *brake = ra_calloc(sizeof *brake);
    if (!brake) return ra_fail(RA_NOMEM, "no memory for a slow lane");
    brake->copies = copies;
    brake->rate = rate;
    brake->counters.file = -1;
    ra_status status = ra_shared_create(4096, &brake->counters);
    if (status == RA_OK) status = copies->share(brake->counters.memory, brake->counters.bytes);
    brake->shared = status == RA_OK;
    if (status == RA_OK) status = copies->record(lane, &brake->end);
    if (status == RA_OK) brake->runs = ra_thread_start(&brake->thread, let_pass, brake);
    if (status == RA_OK && !brake->runs) status = ra_fail(RA_NOMEM, "no thread for a slow lane");
    if (status != RA_OK) ra_brake_close(brake, lane);
    else *result = brake;
    return status;
}

ra_status ra_brake_hold(ra_brake *brake, const ra_queue *lane, int64_t bytes) {
    if (!brake || bytes == 0) return RA_OK;
    uint64_t *counters = brake->counters.memory;
    brake->held += bytes;
    RA_TRY(brake->copies->raise(lane, &counters[HERE], (uint64_t)brake->held));
    return brake->copies->await(lane, &counters[RELEASED], (uint64_t)brake->held);
}

void ra_brake_close(ra_brake *brake, const ra_queue *lane) {
    if (!brake) return;
    bool passed = !brake->end || brake->copies->record(lane, &brake->end) != RA_OK;
    while (!passed && brake->copies->passed(brake->end, &passed) == RA_OK) sched_yield();
    if (brake->end) brake->copies->forget(brake->end);
    atomic_store(&brake->over, true);
    if (brake->runs) pthread_join(brake->thread, NULL);
    if (brake->shared) brake->copies->unshare(brake->counters.memory);
    ra_shared_close(&brake->counters);
    ra_free(brake, sizeof *brake);
}
