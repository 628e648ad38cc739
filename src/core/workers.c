/* A job is open for as long as it has indices to hand out. Workers that are awake enter it; workers that sleep too long find it
 * closed and sleep on, so a short job never waits for a thread to wake up. All of that is one word, the gate:
 *
 *     [ generation 47 | open 1 | inside 16 ]
 *
 * The caller fills the job, opens the gate and works; when no index is left it closes the gate and waits until nobody is
 * inside. Only then may the job's fields change again. Entering is an acquire, leaving a release: tasks see what the caller
 * wrote before, and the caller sees what they wrote. */
#include "core/workers.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/status.h"
#include "core/thread.h"

#define INSIDE_MASK 0xffffu
#define OPEN_BIT 0x10000u
#define GENERATION_STEP 0x20000u
#define MAX_WORKERS 0x8000

/* Looking at the gate this often costs some ten microseconds: as long as a sleep and a wake-up. */
#define SPINS 1000
/* Looks between which the caller lets other threads run, at the end of a job: some hundred microseconds, a last small task. */
#define YIELDS 200

typedef struct slot {
    ra_workers *workers;
    int worker;
    pthread_t thread;
} slot;

struct ra_workers {
    int count;
    int started; /* threads that run: count - 1 once created */
    pid_t process;
    slot *threads;

    pthread_mutex_t lock;
    pthread_cond_t opened, left;
    atomic_int sleepers; /* workers that wait for `opened`, or are about to */
    atomic_bool caller_waits;
    atomic_bool stop;

    _Alignas(64) atomic_uint_fast64_t gate;
    _Alignas(64) atomic_int_fast64_t next;
    int64_t end;
    bool dropped; /* the caller's alone */
    void (*task)(void *arg, int64_t index, int worker);
    void (*last)(void *arg, int worker);
    void *arg;
};

static int64_t take_index(ra_workers *w) { return atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed); }

/* True if the job was open and this worker is now inside; *seen is the generation that was open or closed. */
static bool enter(ra_workers *w, uint_fast64_t *seen) {
    uint_fast64_t gate = atomic_load_explicit(&w->gate, memory_order_relaxed);
    bool inside = false;
    while (!inside && (gate & OPEN_BIT))
        inside = atomic_compare_exchange_weak_explicit(&w->gate, &gate, gate + 1, memory_order_acquire, memory_order_relaxed);
    *seen = gate / GENERATION_STEP;
    return inside;
}

static void leave(ra_workers *w) {
    uint_fast64_t gate = atomic_fetch_sub(&w->gate, 1) - 1;
    if ((gate & (INSIDE_MASK | OPEN_BIT)) == 0 && atomic_load(&w->caller_waits)) {
        pthread_mutex_lock(&w->lock);
        pthread_cond_signal(&w->left);
        pthread_mutex_unlock(&w->lock);
    }
}

/* Returns when the gate's generation is not `seen` any more, or the pool stops. */
static void wait_for_job(ra_workers *w, uint_fast64_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&w->gate, memory_order_relaxed) / GENERATION_STEP != seen) return;
        ra_relax();
    }
    pthread_mutex_lock(&w->lock);
    atomic_fetch_add(&w->sleepers, 1); /* before the look at the gate: the caller opens it before its look at sleepers */
    while (atomic_load(&w->gate) / GENERATION_STEP == seen && !atomic_load(&w->stop)) pthread_cond_wait(&w->opened, &w->lock);
    atomic_fetch_sub(&w->sleepers, 1);
    pthread_mutex_unlock(&w->lock);
}

static void *thread_main(void *arg) {
    ra_workers *w = ((slot *)arg)->workers;
    int worker = ((slot *)arg)->worker;
    uint_fast64_t seen = 0;
    while (!atomic_load(&w->stop)) {
        wait_for_job(w, seen);
        if (!enter(w, &seen)) continue;
        for (int64_t i = take_index(w); i < w->end; i = take_index(w)) w->task(w->arg, i, worker);
        if (w->last) w->last(w->arg, worker);
        leave(w);
    }
    return NULL;
}

void ra_workers_destroy(ra_workers *w) {
    if (!w) return;
    if (w->process == getpid()) { /* in a forked child the threads do not exist */
        pthread_mutex_lock(&w->lock);
        atomic_store(&w->stop, true);
        pthread_cond_broadcast(&w->opened);
        pthread_mutex_unlock(&w->lock);
        for (int i = 0; i < w->started; i++) pthread_join(w->threads[i].thread, NULL);
        pthread_cond_destroy(&w->left);
        pthread_cond_destroy(&w->opened);
        pthread_mutex_destroy(&w->lock);
    }
    ra_free(w->threads, (int64_t)sizeof(slot) * (w->count - 1));
    ra_free(w, sizeof *w);
}

static bool start_thread(ra_workers *w) {
    slot *s = &w->threads[w->started];
    *s = (slot){.workers = w, .worker = w->started + 1};
    if (!ra_thread_start(&s->thread, thread_main, s)) return false;
    w->started++;
    return true;
}

ra_status ra_workers_create(int count, ra_workers **workers) {
    *workers = NULL;
    if (count < 1 || count > MAX_WORKERS) return ra_fail(RA_INVALID, "threads %d is not in 1..%d", count, MAX_WORKERS);
    ra_workers *w = ra_calloc(sizeof *w);
    if (!w) return ra_fail(RA_NOMEM, "no memory for %d worker threads", count);
    w->count = count;
    w->process = getpid();
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->opened, NULL);
    ra_cond_init(&w->left);
    atomic_init(&w->gate, GENERATION_STEP);

    w->threads = ra_alloc((int64_t)sizeof(slot) * (count - 1));
    while (w->threads && w->started < count - 1 && start_thread(w)) {}
    if (w->started < count - 1 || !w->threads) {
        int started = w->started;
        ra_workers_destroy(w);
        return ra_fail(RA_NOMEM, "only %d of %d worker threads could be started", started, count - 1);
    }
    *workers = w;
    return RA_OK;
}

int ra_workers_count(const ra_workers *w) { return w->count; }

static void open_gate(ra_workers *w) {
    /* Closed and empty: only the caller changes it. */
    uint_fast64_t gate = atomic_load_explicit(&w->gate, memory_order_relaxed);
    atomic_store(&w->gate, gate + GENERATION_STEP + OPEN_BIT);
    if (atomic_load(&w->sleepers) > 0) {
        pthread_mutex_lock(&w->lock);
        pthread_cond_broadcast(&w->opened);
        pthread_mutex_unlock(&w->lock);
    }
}

static bool somebody_inside(ra_workers *w) { return (atomic_load(&w->gate) & INSIDE_MASK) != 0; }

/* Waits for the last tasks; with a poll function it never sleeps longer than transfers may go unpolled. */
static void close_gate(ra_workers *w, void (*poll)(void *poll_arg), void *poll_arg) {
    atomic_fetch_and(&w->gate, ~(uint_fast64_t)OPEN_BIT);
    for (int i = 0; i < SPINS && somebody_inside(w); i++) ra_relax();
    for (int i = 0; !poll && i < YIELDS && somebody_inside(w); i++) {
        for (int j = 0; j < 10; j++) ra_relax();
        sched_yield();
    }
    while (somebody_inside(w)) {
        if (poll) poll(poll_arg);
        pthread_mutex_lock(&w->lock);
        atomic_store(&w->caller_waits, true);
        if (!poll) {
            while (somebody_inside(w)) pthread_cond_wait(&w->left, &w->lock);
        } else if (somebody_inside(w)) {
            const struct timespec until = ra_seconds_ahead(200e-6);
            pthread_cond_timedwait(&w->left, &w->lock, &until);
        }
        atomic_store(&w->caller_waits, false);
        pthread_mutex_unlock(&w->lock);
    }
}

void ra_workers_drop(ra_workers *w, bool drop) { w->dropped = drop; }

void ra_workers_run(ra_workers *w, int64_t count, void (*task)(void *arg, int64_t index, int worker), void *arg,
                    void (*poll)(void *poll_arg), void *poll_arg) {
    ra_workers_run_to(w, count, task, NULL, arg, poll, poll_arg);
}

void ra_workers_run_to(ra_workers *w, int64_t count, void (*task)(void *arg, int64_t index, int worker),
                       void (*last)(void *arg, int worker), void *arg, void (*poll)(void *poll_arg), void *poll_arg) {
    if (count <= 0 || w->dropped) return;
    bool alone = w->count == 1 || count == 1;
    atomic_store_explicit(&w->next, 0, memory_order_relaxed);
    w->end = count;
    w->task = task;
    w->last = last;
    w->arg = arg;
    if (!alone) open_gate(w);
    for (int64_t i = take_index(w); i < count; i = take_index(w)) {
        task(arg, i, 0);
        if (poll) poll(poll_arg);
        if (w->dropped) atomic_store_explicit(&w->next, count, memory_order_relaxed);
    }
    if (last) last(arg, 0);
    if (!alone) close_gate(w, poll, poll_arg);
}
