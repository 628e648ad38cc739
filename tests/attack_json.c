/* Commands that explain, with one allocation inside jansson failing, for every such allocation: either the whole object is
 * printed, or the command fails and says that there was no memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli.h"

/* The linker sends calls of malloc in the command line here (--wrap in tests/CMakeLists.txt). Memory for JSON is taken by one
 * function of it; everything else that it allocates fails as well, which does no harm. */
static int countdown, refused;
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) {
    if (countdown > 0 && --countdown == 0) {
        refused++;
        return NULL;
    }
    return __real_malloc(bytes);
}

/* Runs a command with its stdout in a file; the text is to be freed. */
static ra_status run(command_function function, const char *const *words, int fail_at, char **text) {
    static settings s;
    bool check_failed = false;
    int count = 0;
    while (words[count]) count++;
    assert_int_equal(options_parse(count, (char *const *)(uintptr_t)words, &s), RA_OK);
    assert_int_equal(settings_check(&s), RA_OK);
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stdout);
    int before = dup(STDOUT_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    countdown = fail_at;
    refused = 0;
    ra_status status = function(&s, &check_failed);
    countdown = 0;
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    *text = calloc(1, (size_t)bytes + 1);
    assert_non_null(*text);
    assert_int_equal(fread(*text, 1, (size_t)bytes, file), bytes);
    fclose(file);
    return status;
}

/* The first and every stride-th allocation after it fails, once each. */
static void check_some(command_function function, const char *const *words, int stride) {
    char *whole, *text;
    const char *share = getenv("RA_TEST_SHARE"); /* sanitizers make a run slow: 5 takes every fifth allocation */
    if (share && atoi(share) > 1) stride *= atoi(share);
    assert_int_equal(run(function, words, 0, &whole), RA_OK);
    assert_true(strlen(whole) > 20);
    for (int n = 1;; n += stride) {
        ra_status status = run(function, words, n, &text);
        if (status == RA_OK) assert_string_equal(text, whole);
        else {
            assert_int_equal(status, RA_NOMEM);
            assert_string_equal(text, "");
            assert_non_null(strstr(ra_last_error(), "no memory"));
        }
        free(text);
        if (refused == 0) {
            assert_true(n > 20);
            break;
        }
        assert_int_equal(status, RA_NOMEM);
    }
    free(whole);
}

static void check(command_function function, const char *const *words) { check_some(function, words, 1); }

static void a_plan_is_whole_or_an_error(void **state) {
    (void)state;
    check(command_plan, (const char *const[]){"plan", "--json", "--seq", "64", "--ring-size", "3", NULL});
}

/* Its tables reach to 1024 ranks, which takes a fifth of a second. */
static void a_prediction_is_whole_or_an_error(void **state) {
    (void)state;
    const char *const words[] = {"plan", "--json", "--seq", "64", "--ring-size", "3", "--machine", "laptop", NULL};
    check_some(command_plan, words, 11);
}

static void a_reason_is_whole_or_an_error(void **state) {
    (void)state;
    check(command_why, (const char *const[]){"why", "--json", "--seq", "16", "--query", "10", "--key", "3", "--ring-size", "4",
                                             "--segment-lengths", "8,16", "--dilation-rates", "1,2", NULL});
}

static void a_picture_is_whole_or_an_error(void **state) {
    (void)state;
    check(command_draw, (const char *const[]){"draw", "--json", "--seq", "5", "--ring-size", "2", NULL});
}

static void what_this_machine_has_is_whole_or_an_error(void **state) {
    (void)state;
    check(command_info, (const char *const[]){"info", "--json", NULL});
}

int main(void) {
    json_watch();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_is_whole_or_an_error),
        cmocka_unit_test(a_prediction_is_whole_or_an_error),
        cmocka_unit_test(a_reason_is_whole_or_an_error),
        cmocka_unit_test(a_picture_is_whole_or_an_error),
        cmocka_unit_test(what_this_machine_has_is_whole_or_an_error),
    };
    return cmocka_run_group_tests_name("attack_json", tests, NULL, NULL);
}
