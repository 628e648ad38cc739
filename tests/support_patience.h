/* For tests whose verdict depends on the clock: a machine that has other things to do may keep a thread from running for longer
 * than the short timeouts of tests, and then a live rank is silent, and everything comes late. So a thread on each core watches
 * by how much the machine is late. A test that fails while it was late by more than a quarter of the timeout has proved
 * nothing: it is repeated in a fresh process with doubled timeouts, a few times. One that fails on a machine that was in time
 * has failed. */
#ifndef TESTS_SUPPORT_PATIENCE_H
#define TESTS_SUPPORT_PATIENCE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define TEST_ATTEMPTS 5

/* Timeouts, and limits that follow from them, are multiplied by this: 1, or 4 where a sanitizer makes every rank slower; twice
 * as much with each attempt. */
double test_patience(void);

/* Begins to watch, anew. */
void test_watch_machine(void);
/* The most by which a thread that wanted to run came late, in seconds, since the watch began. */
double test_machine_late(void);

/* Runs the tests, whose timeouts are test_patience() times this one or longer, and repeats those that proved nothing. Returns
 * how many failed: main ends with it. */
int test_run_patiently(const char *name, const struct CMUnitTest *tests, size_t count, double timeout);

#endif
