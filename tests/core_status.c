/* Status codes, error sentences, log lines, version and CPU features. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/cpu.h"
#include "core/log.h"
#include "core/status.h"

static void status_values_and_names_are_pinned(void **state) {
    (void)state;
    static const char *const names[] = {
        "RA_OK",       "RA_INVALID",  "RA_NOMEM",         "RA_IO",      "RA_PEER_LOST", "RA_TIMEOUT",
        "RA_DISAGREE", "RA_PROTOCOL", "RA_NOT_AVAILABLE", "RA_ABORTED", "RA_DEVICE",    "RA_INTERNAL"};
    for (int i = 0; i < 12; i++) assert_string_equal(ra_status_name((ra_status)i), names[i]);
    assert_int_equal(RA_OK, 0);
    assert_int_equal(RA_INTERNAL, 11);
    assert_string_equal(ra_status_name((ra_status)12), "unknown status");
    assert_string_equal(ra_status_name((ra_status)-1), "unknown status");
}

static ra_status fail_through(bool fail) {
    RA_TRY(fail ? ra_fail(RA_TIMEOUT, "rank %d is silent", 3) : RA_OK);
    return RA_OK;
}

static void a_failure_returns_its_status_and_leaves_its_sentence(void **state) {
    (void)state;
    assert_int_equal(ra_fail(RA_INVALID, "head_dim %d is not in 1..256", 300), RA_INVALID);
    assert_string_equal(ra_last_error(), "head_dim 300 is not in 1..256");
    assert_int_equal(fail_through(false), RA_OK);
    assert_string_equal(ra_last_error(), "head_dim 300 is not in 1..256");
    assert_int_equal(fail_through(true), RA_TIMEOUT);
    assert_string_equal(ra_last_error(), "rank 3 is silent");
}

static void context_goes_before_the_sentence(void **state) {
    (void)state;
    ra_status status = ra_fail(RA_PROTOCOL, "message too short");
    assert_int_equal(ra_fail_context(status, "rank %d: ", 7), RA_PROTOCOL);
    assert_string_equal(ra_last_error(), "rank 7: message too short");
    ra_fail(RA_IO, "again: %s", ra_last_error());
    assert_string_equal(ra_last_error(), "again: rank 7: message too short");
}

static void a_sentence_too_long_is_cut_and_terminated(void **state) {
    (void)state;
    char longer[5000];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    ra_fail(RA_IO, "%s", longer);
    size_t length = strlen(ra_last_error());
    assert_true(length > 500 && length < sizeof longer - 1);
    ra_fail_context(RA_IO, "%s", "front: ");
    assert_memory_equal(ra_last_error(), "front: xxx", 10);
    assert_int_equal(strlen(ra_last_error()), length);
    ra_fail_context(RA_IO, "%s", longer);
    assert_int_equal(strlen(ra_last_error()), length);
}

static void *fail_elsewhere(void *arg) {
    (void)arg;
    bool empty_at_first = ra_last_error()[0] == '\0';
    ra_fail(RA_IO, "other thread");
    return empty_at_first ? NULL : (void *)1;
}

static void every_thread_has_its_own_sentence(void **state) {
    (void)state;
    pthread_t thread;
    void *wrong;
    ra_fail(RA_IO, "this thread");
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    assert_int_equal(pthread_join(thread, &wrong), 0);
    assert_null(wrong);
    assert_string_equal(ra_last_error(), "this thread");
}

typedef struct lines {
    int count;
    ra_log_level level;
    char text[128];
} lines;

static void keep_line(void *ctx, ra_log_level level, const char *line) {
    lines *l = ctx;
    l->count++;
    l->level = level;
    snprintf(l->text, sizeof l->text, "%s", line);
}

static int evaluated;
static int evaluate(void) { return ++evaluated; }

static void the_logger_gets_lines_up_to_its_level_only(void **state) {
    (void)state;
    lines l = {0};
    ra_set_logger(keep_line, &l, RA_LOG_INFO);
    ra_log(RA_LOG_INFO, "plan of %d items", evaluate());
    assert_int_equal(l.count, 1);
    assert_int_equal(l.level, RA_LOG_INFO);
    assert_string_equal(l.text, "plan of 1 items");
    ra_log(RA_LOG_TRACE, "%d", evaluate());
    assert_int_equal(l.count, 1);
    assert_int_equal(evaluated, 1);
    ra_log(RA_LOG_WARN, "careful");
    assert_int_equal(l.count, 2);
    ra_set_logger(keep_line, &l, RA_LOG_NONE);
    ra_log(RA_LOG_WARN, "careful");
    ra_log(RA_LOG_NONE, "never");
    assert_int_equal(l.count, 2);
    ra_set_logger(NULL, NULL, RA_LOG_NONE);
}

/* What a fresh process with this RINGATTN_DEBUG writes to stderr when it logs at all three levels. */
static void check_stderr(const char *self, const char *value, const char *expected) {
    int ends[2];
    char text[1024] = "";
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* takes seconds a process on some machines */
        if (value) setenv("RINGATTN_DEBUG", value, 1);
        else unsetenv("RINGATTN_DEBUG");
        execl(self, self, "log", (char *)NULL);
        _exit(99);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used<sizeof text - 1; used += got> 0 ? (size_t)got : 0)
        got = read(ends[0], text + used, sizeof text - 1 - used);
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_string_equal(text, expected);
}

static void the_environment_sets_the_level_and_warnings_are_the_default(void **state) {
    (void)state;
    char self[4096] = "";
    assert_true(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    check_stderr(self, NULL, "ringattn: warn: a\n");
    check_stderr(self, "", "ringattn: warn: a\n");
    check_stderr(self, "none", "");
    check_stderr(self, "warn", "ringattn: warn: a\n");
    check_stderr(self, "info", "ringattn: warn: a\nringattn: info: b\n");
    check_stderr(self, "trace", "ringattn: warn: a\nringattn: info: b\nringattn: trace: c\n");
    check_stderr(self, "loud",
                 "ringattn: warn: RINGATTN_DEBUG must be none, warn, info or trace; it is taken as warn\nringattn: warn: a\n");
}

static void the_version_is_the_headers(void **state) {
    (void)state;
    char numbers[64];
    snprintf(numbers, sizeof numbers, "%d.%d.%d", RA_VERSION_MAJOR, RA_VERSION_MINOR, RA_VERSION_PATCH);
    assert_string_equal(ra_version(), numbers);
    assert_string_equal(ra_version(), RA_VERSION_STRING);
}

/* The kernel lists what the CPU has; a feature that we report must be among it. (AMX may be withheld from a process.) */
static void cpu_features_are_those_that_the_system_lists(void **state) {
    (void)state;
    static const struct {
        const char *ours, *systems;
    } names[] = {{"avx512-bf16", "avx512_bf16"},
                 {"amx-tile", "amx_tile"},
                 {"amx-bf16", "amx_bf16"},
                 {"neon", "asimd"},
                 {"fp16", "asimdhp"},
                 {"dotprod", "asimddp"}};
    FILE *file = fopen("/proc/cpuinfo", "r");
    assert_non_null(file);
    static char line[8192], listed[8200];
    while (!*listed && fgets(line, sizeof line, file))
        if (strncmp(line, "flags", 5) == 0 || strncmp(line, "Features", 8) == 0) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(listed, sizeof listed, "%s ", strchr(line, ':') + 1);
        }
    fclose(file);
    char features[256], *rest = NULL;
    snprintf(features, sizeof features, "%s", ra_cpu_features());
    assert_string_equal(features, ra_cpu_features());
    for (char *feature = strtok_r(features, " ", &rest); feature; feature = strtok_r(NULL, " ", &rest)) {
        char word[64];
        const char *system_name = feature;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strcmp(names[i].ours, feature) == 0) system_name = names[i].systems;
        snprintf(word, sizeof word, " %s ", system_name);
        if (*listed && !strstr(listed, word)) fail_msg("the system does not list %s", system_name);
    }
#if defined(__aarch64__)
    assert_true(ra_cpu_get()->neon);
#elif defined(__x86_64__)
    assert_int_equal(ra_cpu_get()->avx2, strstr(listed, " avx2 ") != NULL);
    assert_int_equal(ra_cpu_get()->avx512f, strstr(listed, " avx512f ") != NULL);
#endif
    assert_true(!ra_cpu_get()->amx_bf16 || ra_cpu_get()->amx_tile);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "log") == 0) {
        ra_log(RA_LOG_WARN, "a");
        ra_log(RA_LOG_INFO, "b");
        ra_log(RA_LOG_TRACE, "c");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_values_and_names_are_pinned),
        cmocka_unit_test(a_failure_returns_its_status_and_leaves_its_sentence),
        cmocka_unit_test(context_goes_before_the_sentence),
        cmocka_unit_test(a_sentence_too_long_is_cut_and_terminated),
        cmocka_unit_test(every_thread_has_its_own_sentence),
        cmocka_unit_test(the_logger_gets_lines_up_to_its_level_only),
        cmocka_unit_test(the_environment_sets_the_level_and_warnings_are_the_default),
        cmocka_unit_test(the_version_is_the_headers),
        cmocka_unit_test(cpu_features_are_those_that_the_system_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
