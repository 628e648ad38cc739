/* The stand-in ends a process whose streams use memory in no order (stand_in/orders.h), and no other. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stand_in/orders.c"
#include "support.h"

static char a, b, c; /* streams */
static order_uses block;

static void others_read_what_is_written(void) {
    order_use(&a, &block, 0, 64, true);
    order_use(&b, &block, 63, 64, false);
}
static void others_write_what_is_read(void) {
    order_use(&a, &block, 0, 64, false);
    order_use(&b, &block, 0, 64, false);
    order *mark = NULL;
    order_mark(&b, &mark);
    order_wait(&a, mark);
    order_use(&b, &block, 0, 64, true); /* behind its own reading, not behind a's */
}
static void a_mark_is_too_early(void) {
    order *mark = NULL;
    order_mark(&a, &mark);
    order_use(&a, &block, 0, 64, true);
    order_wait(&b, mark);
    order_use(&b, &block, 0, 64, false);
}
static void *wait_for_a(void *arg) {
    order_host_wait_all(&a);
    return arg;
}
static void another_thread_has_waited(void) {
    pthread_t thread;
    order_use(&a, &block, 0, 64, true);
    if (pthread_create(&thread, NULL, wait_for_a, NULL) == 0) pthread_join(thread, NULL);
    order_use(&b, &block, 0, 64, false);
}

static void all_read(void) {
    order_use(&a, &block, 0, 64, false);
    order_use(&b, &block, 0, 64, false);
}
static void bytes_differ(void) {
    order_use(&a, &block, 0, 64, true);
    order_use(&b, &block, 64, 128, true);
}
static void one_waits_for_another_that_waited(void) {
    order *first = NULL, *second = NULL;
    order_use(&a, &block, 0, 64, true);
    order_mark(&a, &first);
    order_wait(&b, first);
    order_mark(&b, &second);
    order_wait(&c, second);
    order_use(&c, &block, 0, 64, true);
}
static void the_host_waits_in_between(void) {
    order *mark = NULL;
    order_use(&a, &block, 0, 64, true);
    order_mark(&a, &mark);
    order_host_wait(mark);
    order_use(&b, &block, 0, 64, true);
    order_host_wait_all(&b);
    order_use(&c, &block, 0, 64, true);
}

/* Each waits for the one before it. */
static void there_are_more_streams_than_are_known_apart(void) {
    static char many[3 * MOST_STREAMS];
    order *mark = NULL;
    for (size_t i = 0; i < sizeof many; i++) {
        order_wait(&many[i], mark);
        order_use(&many[i], &block, 0, 64, true);
        order_mark(&many[i], &mark);
    }
    order_wait(&many[0], mark);
    order_use(&many[0], &block, 0, 64, true);
}

static bool aborts(void (*run)(void)) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        run();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) ? WTERMSIG(status) == SIGABRT : WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
}

static void uses_in_no_order_end_the_process(void **state) {
    (void)state;
    assert_true(aborts(others_read_what_is_written));
    assert_true(aborts(others_write_what_is_read));
    assert_true(aborts(a_mark_is_too_early));
    assert_true(aborts(another_thread_has_waited));
}

static void uses_in_order_do_not(void **state) {
    (void)state;
    assert_false(aborts(all_read));
    assert_false(aborts(bytes_differ));
    assert_false(aborts(one_waits_for_another_that_waited));
    assert_false(aborts(the_host_waits_in_between));
    assert_false(aborts(there_are_more_streams_than_are_known_apart));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(uses_in_no_order_end_the_process),
        cmocka_unit_test(uses_in_order_do_not),
    };
    return cmocka_run_group_tests_name("orders of the stand-in GPU", tests, NULL, NULL);
}
