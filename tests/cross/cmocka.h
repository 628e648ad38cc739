/* As much of cmocka as the kernel tests use, for builds for another processor, where the library is seldom at hand. */
#ifndef CROSS_CMOCKA_H
#define CROSS_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};
#define cmocka_unit_test(f)                                                                                                    \
    { #f, f }

#define print_error(...) fprintf(stderr, __VA_ARGS__)
#define print_message(...) printf(__VA_ARGS__)
#define fail_msg(...) (fprintf(stderr, __VA_ARGS__), fprintf(stderr, " (%s:%d)\n", __FILE__, __LINE__), exit(1))
#define fail() fail_msg("failed")
#define skip()                                                                                                                 \
    do {                                                                                                                       \
        printf("not with so few cases: ");                                                                                     \
        return;                                                                                                                \
    } while (0)
#define assert_true(x) ((x) ? (void)0 : fail_msg("not true: %s", #x))
#define assert_non_null(x) assert_true((x) != NULL)
#define assert_int_equal(a, b) assert_true((a) == (b))
#define assert_string_equal(a, b) assert_true(strcmp(a, b) == 0)
#define assert_memory_equal(a, b, bytes) assert_true(memcmp(a, b, bytes) == 0)
#define cmocka_run_group_tests_name(name, tests, setup, teardown) run_tests(name, tests, sizeof(tests) / sizeof *(tests))

static inline int run_tests(const char *name, const struct CMUnitTest *tests, size_t count) {
    for (size_t i = 0; i < count; i++) {
        tests[i].run(NULL);
        printf("%s: %s\n", name, tests[i].name);
        fflush(stdout);
    }
    return 0;
}

#endif
