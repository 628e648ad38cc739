/* Worker threads. Results are written without atomics on purpose: the thread sanitizer then proves that running a job orders
 * them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/status.h"
#include "core/workers.h"

enum { MOST_TASKS = 1000, MOST_WORKERS = 8 };

typedef struct job {
    int workers;
    int runs[MOST_TASKS];         /* times an index was run */
    int64_t latest[MOST_WORKERS]; /* index that a worker ran last */
    atomic_int out_of_order, strange_worker;
    int64_t result[MOST_TASKS];
} job;

static void note_run(void *arg, int64_t index, int worker) {
    job *j = arg;
    if (worker < 0 || worker >= j->workers) {
        atomic_fetch_add(&j->strange_worker, 1);
        return;
    }
    if (j->latest[worker] >= index) atomic_fetch_add(&j->out_of_order, 1);
    j->latest[worker] = index;
    j->runs[index]++;
    j->result[index] = index * index;
}

static void check_job(ra_workers *workers, job *j, int64_t count) {
    memset(j, 0, sizeof *j);
    j->workers = ra_workers_count(workers);
    for (int i = 0; i < MOST_WORKERS; i++) j->latest[i] = -1;
    ra_workers_run(workers, count, note_run, j, NULL, NULL);
    assert_int_equal(j->strange_worker, 0);
    assert_int_equal(j->out_of_order, 0);
    for (int64_t i = 0; i < MOST_TASKS; i++) {
        assert_int_equal(j->runs[i], i < count);
        assert_int_equal(j->result[i], i < count ? i * i : 0);
    }
}

static void every_index_runs_once_for_any_number_of_workers_and_tasks(void **state) {
    (void)state;
    job *j = malloc(sizeof *j);
    for (int workers = 1; workers <= MOST_WORKERS; workers++) {
        ra_workers *w;
        assert_int_equal(ra_workers_create(workers, &w), RA_OK);
        assert_int_equal(ra_workers_count(w), workers);
        const int64_t counts[] = {0, 1, 2, 3, workers - 1, workers, workers + 1, 100, MOST_TASKS};
        for (int i = 0; i < 9; i++) check_job(w, j, counts[i]);
        ra_workers_destroy(w);
    }
    free(j);
}

/* Pauses between jobs let workers fall asleep, and jobs without pause find them spinning: both ways in and out are taken. */
static void jobs_one_after_another_never_mix_asleep_or_awake(void **state) {
    (void)state;
    job *j = malloc(sizeof *j);
    ra_workers *w;
    assert_int_equal(ra_workers_create(4, &w), RA_OK);
    for (int i = 0; i < 300; i++) {
        check_job(w, j, i % 23);
        if (i % 10 == 0) nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
    }
    ra_workers_destroy(w);
    free(j);
}

/* Waits until `wanted` tasks run at the same time, at most 20 seconds. */
static void meet(atomic_int *arrived, int wanted) {
    atomic_fetch_add(arrived, 1);
    for (int i = 0; i < 20000 && atomic_load(arrived) < wanted; i++) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

typedef struct meeting {
    atomic_int arrived;
    int ran[4], left[4];
} meeting;

static void meet_three_others(void *arg, int64_t index, int worker) {
    meeting *m = arg;
    (void)index;
    meet(&m->arrived, 4);
    m->ran[worker]++;
}

static void slow_tasks_are_shared_by_all_workers(void **state) {
    (void)state;
    meeting m = {0};
    ra_workers *w;
    assert_int_equal(ra_workers_create(4, &w), RA_OK);
    ra_workers_run(w, 4, meet_three_others, &m, NULL, NULL);
    ra_workers_destroy(w);
    for (int i = 0; i < 4; i++) assert_int_equal(m.ran[i], 1);
}

static void leave_meeting(void *arg, int worker) {
    meeting *m = arg;
    m->left[worker] = m->ran[worker];
}

static void every_worker_says_when_it_has_no_more_tasks(void **state) {
    (void)state;
    for (int rounds = 0; rounds < 20; rounds++) {
        meeting m = {0};
        ra_workers *w;
        assert_int_equal(ra_workers_create(4, &w), RA_OK);
        ra_workers_run_to(w, 4, meet_three_others, leave_meeting, &m, NULL, NULL);
        for (int i = 0; i < 4; i++) assert_int_equal(m.left[i], 1);
        m = (meeting){0};
        ra_workers_run(w, 4, meet_three_others, &m, NULL, NULL); /* the next job has none of it */
        for (int i = 0; i < 4; i++) assert_int_equal(m.left[i], 0);
        ra_workers_destroy(w);
    }
}

static void do_nothing(void *arg, int64_t index, int worker) {
    (void)arg;
    (void)index;
    (void)worker;
}

static void meet_and_stay_behind(void *arg, int64_t index, int worker) {
    (void)index;
    meet(arg, 2);
    if (worker != 0) nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
}

static void count_poll(void *arg) { ++*(int *)arg; }

static void the_caller_polls_between_tasks_and_while_it_waits(void **state) {
    (void)state;
    ra_workers *w;
    int polls = 0;
    assert_int_equal(ra_workers_create(1, &w), RA_OK);
    ra_workers_run(w, 10, do_nothing, NULL, count_poll, &polls);
    assert_int_equal(polls, 10);
    ra_workers_destroy(w);

    polls = 0;
    assert_int_equal(ra_workers_create(2, &w), RA_OK);
    atomic_int arrived = 0;
    ra_workers_run(w, 2, meet_and_stay_behind, &arrived, count_poll, &polls); /* the caller waits for some 100 ms */
    assert_true(polls > 5);
    ra_workers_destroy(w);
}

static void note_signal_mask(void *arg, int64_t index, int worker) {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    if (worker > 0 && !sigismember(&mask, SIGINT)) atomic_fetch_add((atomic_int *)arg, 1);
    if (worker == 0 && sigismember(&mask, SIGINT)) atomic_fetch_add((atomic_int *)arg, 1);
    nanosleep(&(struct timespec){.tv_nsec = 1000000 * (index + 1)}, NULL);
}

static void signals_stay_with_the_programs_own_threads(void **state) {
    (void)state;
    atomic_int wrong = 0;
    ra_workers *w;
    assert_int_equal(ra_workers_create(3, &w), RA_OK);
    ra_workers_run(w, 9, note_signal_mask, &wrong, NULL, NULL);
    assert_int_equal(wrong, 0);
    ra_workers_destroy(w);
}

static void a_forked_child_can_still_run_and_destroy(void **state) {
    (void)state;
#if defined(__SANITIZE_THREAD__)
    print_message("skipped: the thread sanitizer does not follow a fork of a threaded process\n");
    skip();
#else
    job *j = malloc(sizeof *j);
    ra_workers *w;
    assert_int_equal(ra_workers_create(3, &w), RA_OK);
    check_job(w, j, 50);
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        memset(j, 0, sizeof *j);
        j->workers = 3;
        for (int i = 0; i < MOST_WORKERS; i++) j->latest[i] = -1;
        ra_workers_run(w, 50, note_run, j, NULL, NULL);
        int wrong = 0;
        for (int i = 0; i < 50; i++) wrong += j->runs[i] != 1;
        ra_workers_destroy(w);
        _exit(wrong);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    ra_workers_destroy(w);
    free(j);
#endif
}

typedef struct failing {
    int calls, fail_at, live;
} failing;

static void *failing_alloc(void *ctx, size_t bytes, size_t align) {
    failing *f = ctx;
    if (++f->calls == f->fail_at) return NULL;
    f->live++;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void failing_free(void *ctx, void *ptr, size_t bytes) {
    (void)bytes;
    ((failing *)ctx)->live--;
    free(ptr);
}

static void creation_without_memory_fails_cleanly_at_every_allocation(void **state) {
    (void)state;
    ra_status status = RA_NOMEM;
    int n = 0;
    while (status != RA_OK) {
        failing f = {.fail_at = ++n};
        ra_set_allocator(&(ra_allocator){failing_alloc, failing_free, &f});
        ra_workers *w;
        status = ra_workers_create(3, &w);
        if (status != RA_OK) {
            assert_int_equal(status, RA_NOMEM);
            assert_null(w);
        }
        ra_workers_destroy(w);
        ra_set_allocator(NULL);
        assert_int_equal(f.live, 0);
    }
    assert_true(n > 1);
}

static void a_count_below_one_or_absurd_is_invalid(void **state) {
    (void)state;
    ra_workers *w;
    assert_int_equal(ra_workers_create(0, &w), RA_INVALID);
    assert_null(w);
    assert_int_equal(ra_workers_create(-3, &w), RA_INVALID);
    assert_int_equal(ra_workers_create(1 << 20, &w), RA_INVALID);
    assert_string_equal(ra_last_error(), "threads 1048576 is not in 1..32768");
}

static void usable_cores_follow_the_affinity_mask(void **state) {
    (void)state;
    int cores = ra_usable_cores();
    assert_true(cores >= 1 && cores <= sysconf(_SC_NPROCESSORS_CONF));
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    for (size_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &before)) {
            CPU_SET(i, &one);
            break;
        }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(ra_usable_cores(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_int_equal(ra_usable_cores(), cores);
}

typedef struct dropping {
    ra_workers *workers;
    atomic_int tasks;
} dropping;

static void count_task(void *arg, int64_t index, int worker) {
    (void)index, (void)worker;
    atomic_fetch_add(&((dropping *)arg)->tasks, 1);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void drop_the_rest(void *arg) { ra_workers_drop(((dropping *)arg)->workers, true); }

static void dropped_work_leaves_out_the_tasks_that_have_not_begun_until_it_is_wanted_again(void **state) {
    (void)state;
    for (int count = 1; count <= 4; count++) {
        dropping d = {0};
        assert_int_equal(ra_workers_create(count, &d.workers), RA_OK);
        ra_workers_run(d.workers, 10000, count_task, &d, drop_the_rest, &d);
        int begun = atomic_load(&d.tasks);
        assert_true(begun >= 1 && begun < 1000);
        ra_workers_run(d.workers, 10, count_task, &d, NULL, NULL);
        assert_int_equal(atomic_load(&d.tasks), begun);
        ra_workers_drop(d.workers, false);
        ra_workers_run(d.workers, 10, count_task, &d, NULL, NULL);
        assert_int_equal(atomic_load(&d.tasks), begun + 10);
        ra_workers_destroy(d.workers);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_runs_once_for_any_number_of_workers_and_tasks),
        cmocka_unit_test(jobs_one_after_another_never_mix_asleep_or_awake),
        cmocka_unit_test(slow_tasks_are_shared_by_all_workers),
        cmocka_unit_test(every_worker_says_when_it_has_no_more_tasks),
        cmocka_unit_test(the_caller_polls_between_tasks_and_while_it_waits),
        cmocka_unit_test(signals_stay_with_the_programs_own_threads),
        cmocka_unit_test(a_forked_child_can_still_run_and_destroy),
        cmocka_unit_test(creation_without_memory_fails_cleanly_at_every_allocation),
        cmocka_unit_test(a_count_below_one_or_absurd_is_invalid),
        cmocka_unit_test(usable_cores_follow_the_affinity_mask),
        cmocka_unit_test(dropped_work_leaves_out_the_tasks_that_have_not_begun_until_it_is_wanted_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
