/* The watch over the machine: a test that fails on a machine that is in time fails at once; one that fails while it is late is
 * repeated with twice the patience, and fails if it always does. Such tests are played by this program itself, in a process
 * that is late because it is stopped for a while. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support_patience.h"

/* Of the played suite: its timeout, and the patience with which its second test passes. */
#define TIMEOUT "RINGATTN_TEST_TIMEOUT"
#define PASSES "RINGATTN_TEST_PASSES"

/* The state of a process, as the kernel tells it: 'T' if it is stopped. */
static char state_of(pid_t process) {
    char path[64], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    if (!file) return state;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = '?';
    fclose(file);
    return state;
}

/* The time counts from when the process has stopped: it is asked to first, and being continued takes a request back that it
 * had no time to follow. */
static void stop_for(double seconds) {
    const pid_t self = getpid(), child = fork();
    if (child == 0) {
        kill(self, SIGSTOP);
        while (state_of(self) != 'T') nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        const time_t whole = (time_t)seconds;
        nanosleep(&(struct timespec){.tv_sec = whole, .tv_nsec = (long)(1e9 * (seconds - (double)whole))}, NULL);
        kill(self, SIGCONT);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

static void a_test_that_passes(void **state) { (void)state; }

static void a_test_that_wants_patience(void **state) {
    (void)state;
    stop_for(0.05 * test_patience());
    assert_true(test_patience() >= atof(getenv(PASSES)));
}

static int play(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_test_that_passes), cmocka_unit_test(a_test_that_wants_patience)};
    return test_run_patiently("a suite", tests, 2, atof(getenv(TIMEOUT)));
}

typedef struct played {
    bool passed;
    int runs[2]; /* of each test */
} played;

static played play_suite(double timeout, double passes) {
    played result = {0};
    int ends[2], status;
    char line[512];
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        snprintf(line, sizeof line, "%g", timeout);
        setenv(TIMEOUT, line, 1);
        snprintf(line, sizeof line, "%g", passes);
        setenv(PASSES, line, 1);
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "core_patience", (char *)NULL);
        _exit(99);
    }
    assert_true(child > 0);
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r");
    assert_non_null(said);
    while (fgets(line, sizeof line, said)) {
        result.runs[0] += strstr(line, "[ RUN      ] a_test_that_passes") != NULL;
        result.runs[1] += strstr(line, "[ RUN      ] a_test_that_wants_patience") != NULL;
    }
    fclose(said);
    assert_int_equal(waitpid(child, &status, 0), child);
    result.passed = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return result;
}

static void a_test_that_fails_while_the_machine_is_late_is_repeated_with_twice_the_patience(void **state) {
    (void)state;
    const played result = play_suite(0.1, 2 * test_patience());
    assert_true(result.passed);
    assert_int_equal(result.runs[0], 1);
    assert_int_equal(result.runs[1], 2);
}

static void a_test_that_always_fails_fails(void **state) {
    (void)state;
    const played result = play_suite(0.1, INFINITY);
    assert_false(result.passed);
    assert_int_equal(result.runs[0], 1);
    assert_int_equal(result.runs[1], TEST_ATTEMPTS);
}

static void a_test_that_fails_on_a_machine_that_is_in_time_fails_at_once(void **state) {
    (void)state;
    const played result = play_suite(1e6, 2 * test_patience());
    assert_false(result.passed);
    assert_int_equal(result.runs[1], 1);
}

static void the_machine_is_as_late_as_the_process_was_stopped(void **state) {
    (void)state;
    test_watch_machine();
    stop_for(0.1);
    assert_true(test_machine_late() > 0.08);
}

int main(void) {
    if (getenv(TIMEOUT)) return play();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_test_that_fails_while_the_machine_is_late_is_repeated_with_twice_the_patience),
        cmocka_unit_test(a_test_that_always_fails_fails),
        cmocka_unit_test(a_test_that_fails_on_a_machine_that_is_in_time_fails_at_once),
        cmocka_unit_test(the_machine_is_as_late_as_the_process_was_stopped),
    };
    return cmocka_run_group_tests_name("patience", tests, NULL, NULL);
}
