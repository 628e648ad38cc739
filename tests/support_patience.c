#include "support_patience.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "support_sanitized.h"

/* Which attempt this is, and which tests it repeats ("3 17 "): how a program tells itself when it starts anew. */
#define ATTEMPT "RINGATTN_TEST_ATTEMPT"
#define REPEATED "RINGATTN_TEST_REPEATED"

static int attempt(void) {
    const char *text = getenv(ATTEMPT);
    return text ? atoi(text) : 1;
}

double test_patience(void) { return (TEST_SANITIZED ? 4 : 1) * (double)(1 << (attempt() - 1)); }

/* ------------------------------------------------------------------------------------------------------------- the watch */

#define MOST_CORES 64
#define NAP 5000000 /* nanoseconds */

#if defined(__SANITIZE_THREAD__)
/* The watches make every process a threaded one, and the thread sanitizer ends the child of such a process once it starts a
 * thread, unless it is told not to. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }
#endif

static struct watch {
    size_t core;
    atomic_llong due, late; /* when this thread wants to run next, and the most by which it came late */
} watches[MOST_CORES];
static int watch_count;

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *watch_main(void *arg) {
    struct watch *watch = arg;
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(watch->core, &core);
    (void)sched_setaffinity(0, sizeof core, &core); /* where that is not allowed it watches wherever it runs */
    for (;;) { /* each look begins where the one before ended, the first when the thread was asked for: no time goes unseen */
        const long long at = now(), due = at + NAP, late = at - atomic_exchange(&watch->due, due);
        if (late > atomic_load(&watch->late)) atomic_store(&watch->late, late);
        const struct timespec until = {.tv_sec = (time_t)(due / 1000000000), .tv_nsec = (long)(due % 1000000000)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
    return NULL;
}

static void start_watches(void) {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
    for (size_t core = 0; core < CPU_SETSIZE && watch_count < MOST_CORES; core++) {
        pthread_t thread;
        if (!CPU_ISSET(core, &cores)) continue;
        struct watch *watch = &watches[watch_count];
        watch->core = core;
        atomic_store(&watch->due, now() + NAP);
        if (pthread_create(&thread, NULL, watch_main, watch) != 0) return;
        pthread_detach(thread);
        watch_count++;
    }
}

void test_watch_machine(void) {
    if (watch_count == 0) start_watches();
    for (int i = 0; i < watch_count; i++) atomic_store(&watches[i].late, 0);
}

double test_machine_late(void) {
    long long most = 0, at = now();
    for (int i = 0; i < watch_count; i++) {
        long long late = atomic_load(&watches[i].late), waits = at - atomic_load(&watches[i].due);
        if (late > most) most = late;
        if (waits > most) most = waits; /* it still does */
    }
    return 1e-9 * (double)most;
}

/* ---------------------------------------------------------------------------------------------------------------- attempts */

/* A test of the suite; the state of the test that cmocka runs in its place. */
typedef struct watched_test {
    const struct CMUnitTest *test;
    int number;
    bool begun, passed;
    double late;
} watched_test;

static int begin_watched(void **state) {
    watched_test *t = *state;
    t->begun = true;
    return 0;
}

static void run_watched(void **state) {
    watched_test *t = *state;
    void *own = t->test->initial_state;
    test_watch_machine();
    t->test->test_func(&own);
    t->passed = true; /* a failing assertion does not come back */
}

static int end_watched(void **state) {
    watched_test *t = *state;
    t->late = test_machine_late();
    return 0;
}

static bool is_repeated(int number) {
    char word[16];
    const char *all = getenv(REPEATED);
    snprintf(word, sizeof word, " %d ", number);
    return !all || strstr(all, word);
}

/* Starts this program anew, with the tests that failed; whatever they left behind is gone. Returns only if that fails. */
static void start_anew(const watched_test *tests, size_t count) {
    char numbers[4096] = " ", next[16];
    size_t used = 1;
    for (size_t i = 0; i < count && used + 16 < sizeof numbers; i++)
        if (tests[i].begun && !tests[i].passed)
            used += (size_t)snprintf(numbers + used, sizeof numbers - used, "%d ", tests[i].number);
    snprintf(next, sizeof next, "%d", attempt() + 1);
    setenv(ATTEMPT, next, 1);
    setenv(REPEATED, numbers, 1);
    fflush(NULL);
    execl("/proc/self/exe", program_invocation_name, (char *)NULL);
    fprintf(stderr, "the tests cannot be repeated: %s\n", strerror(errno));
}

int test_run_patiently(const char *name, const struct CMUnitTest *tests, size_t count, double timeout) {
    struct CMUnitTest *run = calloc(count, sizeof *run);
    watched_test *watched = calloc(count, sizeof *watched);
    size_t chosen = 0;
    if (!run || !watched) return 1;
    for (size_t i = 0; i < count; i++) {
        if (!tests[i].test_func || !is_repeated((int)i)) continue;
        watched[chosen] = (watched_test){.test = &tests[i], .number = (int)i};
        run[chosen] = (struct CMUnitTest){.name = tests[i].name,
                                          .test_func = run_watched,
                                          .setup_func = begin_watched,
                                          .teardown_func = end_watched,
                                          .initial_state = &watched[chosen]};
        chosen++;
    }
    int failed = _cmocka_run_group_tests(name, run, chosen, NULL, NULL);
    bool proved = failed == 0;
    for (size_t i = 0; i < chosen; i++) {
        const watched_test *t = &watched[i];
        if (!t->begun || t->passed) continue;
        bool disturbed = t->late > timeout * test_patience() / 4;
        proved |= !disturbed;
        fprintf(stderr, "%s: the machine was up to %.3f s late%s\n", t->test->name, t->late,
                disturbed && attempt() < TEST_ATTEMPTS ? ", which proves nothing: again, with twice the patience" : "");
    }
    if (!proved && attempt() < TEST_ATTEMPTS) start_anew(watched, chosen);
    free(run);
    free(watched);
    return failed;
}
