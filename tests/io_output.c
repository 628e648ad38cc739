/* Mapped inputs, and outputs that appear whole or not at all. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/map.h"
#include "io/output.h"

static char directory[] = "/tmp/ringattn-io-XXXXXX";

static const char *in_directory(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static int entries(void) {
    DIR *d = opendir(directory);
    assert_non_null(d);
    int count = -2; /* . and .. */
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

static int make_directory(void **state) {
    (void)state;
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state) {
    (void)state;
    return rmdir(directory); /* fails if a test left a file behind */
}

static void an_output_has_its_name_only_when_published(void **state) {
    (void)state;
    ra_output output;
    ra_map map;
    const char *path = in_directory("a");
    assert_int_equal(ra_output_create(path, "head", 4, 10000, &output), RA_OK);
    assert_int_equal(access(path, F_OK), -1);
    memset(output.data + 4, 7, 9996);
    assert_int_equal(ra_output_sync(&output), RA_OK);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(ra_output_publish(&output), RA_OK);
    ra_output_discard(&output); /* safe afterwards */
    assert_int_equal(entries(), 1);
    assert_int_equal(ra_map_open(path, &map), RA_OK);
    assert_int_equal(map.bytes, 10000);
    assert_memory_equal(map.data, "head\7\7", 6);
    assert_int_equal(map.data[9999], 7);
    ra_map_close(&map);
    unlink(path);
}

static void a_discarded_output_leaves_the_old_file(void **state) {
    (void)state;
    ra_output output;
    const char *path = in_directory("a");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("old", f);
    fclose(f);
    assert_int_equal(ra_output_create(path, "new", 3, 3, &output), RA_OK);
    assert_int_equal(entries(), 2);
    ra_output_discard(&output);
    assert_int_equal(entries(), 1);
    assert_int_equal(ra_output_create(path, "new", 3, 3, &output), RA_OK);
    ra_output_discard_all(); /* as a signal handler would */
    assert_int_equal(entries(), 1);
    ra_output_discard(&output);
    ra_map map;
    assert_int_equal(ra_map_open(path, &map), RA_OK);
    assert_memory_equal(map.data, "old", 3);
    ra_map_close(&map);
    unlink(path);
}

static void a_replaced_file_keeps_its_mode_and_a_link_its_target(void **state) {
    (void)state;
    char target[256];
    strcpy(target, in_directory("target"));
    FILE *f = fopen(target, "w");
    assert_non_null(f);
    fclose(f);
    chmod(target, 0640);
    const char *link = in_directory("link");
    assert_int_equal(symlink(target, link), 0);
    ra_output output;
    assert_int_equal(ra_output_create(link, "new", 3, 3, &output), RA_OK);
    assert_int_equal(ra_output_sync(&output), RA_OK);
    assert_int_equal(ra_output_publish(&output), RA_OK);
    struct stat info;
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(target, &info), 0);
    assert_int_equal(info.st_size, 3);
    assert_int_equal(info.st_mode & 0777, 0640);
    unlink(link);
    unlink(target);
}

static void targets_that_cannot_be_written_are_named(void **state) {
    (void)state;
    ra_output output;
    assert_int_equal(ra_output_create(directory, "", 0, 1, &output), RA_IO);
    assert_non_null(strstr(ra_last_error(), "not a regular file"));
    assert_int_equal(ra_output_create("/dev/null", "", 0, 1, &output), RA_IO);
    assert_int_equal(ra_output_create(in_directory("none/a"), "", 0, 1, &output), RA_IO);
    assert_non_null(strstr(ra_last_error(), "none/a cannot be written"));
    char name[291], path[600];
    memset(name, 'x', 290);
    name[290] = '\0';
    snprintf(path, sizeof path, "%s%s", in_directory(""), name);
    assert_int_equal(ra_output_create(path, "", 0, 1, &output), RA_IO);
    assert_int_equal(entries(), 0);
}

static void a_file_size_limit_is_an_error_before_anything_is_written(void **state) {
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){1000, 1000});
        ra_output output;
        ra_status status = ra_output_create(in_directory("a"), "", 0, 100000, &output);
        _exit(status == RA_IO && strstr(ra_last_error(), "cannot be written") && entries() == 0 ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(entries(), 0);
}

static void more_outputs_than_slots_is_an_error(void **state) {
    (void)state;
    ra_output outputs[17];
    char name[8];
    for (int i = 0; i < 16; i++) {
        snprintf(name, sizeof name, "%d", i);
        assert_int_equal(ra_output_create(in_directory(name), "", 0, 1, &outputs[i]), RA_OK);
    }
    assert_int_equal(ra_output_create(in_directory("16"), "", 0, 1, &outputs[16]), RA_IO);
    for (int i = 0; i < 16; i++) ra_output_discard(&outputs[i]);
    assert_int_equal(entries(), 0);
}

static void processes_that_join_an_output_write_one_file(void **state) {
    (void)state;
    ra_output first, second;
    const char *path = in_directory("a");
    assert_int_equal(ra_output_create(path, "head", 4, 8, &first), RA_OK);
    assert_int_equal(ra_output_join(path, ra_output_temporary(&first), 8, &second), RA_OK);
    memcpy(first.data + 4, "ab", 2);
    memcpy(second.data + 6, "cd", 2);
    assert_int_equal(ra_output_sync(&second), RA_OK);
    ra_output_leave(&second);
    ra_output_leave(&second); /* safe twice */
    assert_int_equal(entries(), 1);
    assert_int_equal(ra_output_publish(&first), RA_OK);
    ra_map map;
    assert_int_equal(ra_map_open(path, &map), RA_OK);
    assert_memory_equal(map.data, "headabcd", 8);
    ra_map_close(&map);
    unlink(path);
    assert_int_equal(ra_output_join(path, ".none.tmp", 8, &second), RA_IO);
    /* any of them may clear up after a failure */
    assert_int_equal(ra_output_create(path, "head", 4, 8, &first), RA_OK);
    assert_int_equal(ra_output_join(path, ra_output_temporary(&first), 8, &second), RA_OK);
    ra_output_discard(&second);
    assert_int_equal(entries(), 0);
    assert_int_equal(ra_output_publish(&first), RA_IO);
    assert_int_equal(entries(), 0);
}

static void inputs_that_are_not_files_are_named(void **state) {
    (void)state;
    ra_map map;
    assert_int_equal(ra_map_open(in_directory("none"), &map), RA_IO);
    assert_non_null(strstr(ra_last_error(), "No such file"));
    assert_int_equal(ra_map_open(directory, &map), RA_IO);
    assert_non_null(strstr(ra_last_error(), "not a regular file"));
    const char *path = in_directory("empty");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(ra_map_open(path, &map), RA_OK);
    assert_int_equal(map.bytes, 0);
    ra_file_name file;
    ra_array array;
    assert_int_equal(ra_file_name_parse(path, &file), RA_OK);
    assert_int_equal(ra_map_array(&file, &map, &array), RA_IO);
    assert_non_null(strstr(ra_last_error(), "empty: it is empty"));
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not block */
    assert_int_equal(ra_map_open(path, &map), RA_IO);
    unlink(path);
}

static void file_arguments_split_at_the_tensor_name(void **state) {
    (void)state;
    ra_file_name file;
    assert_int_equal(ra_file_name_parse("a/b.npy", &file), RA_OK);
    assert_string_equal(file.path, "a/b.npy");
    assert_string_equal(file.name, "");
    assert_int_equal(ra_file_name_parse("c:d.safetensors:x.y:z", &file), RA_OK);
    assert_string_equal(file.path, "c:d.safetensors");
    assert_string_equal(file.name, "x.y:z");
    assert_int_equal(ra_file_name_parse("a.safetensors", &file), RA_INVALID);
    assert_int_equal(ra_file_name_parse("a.safetensors:", &file), RA_INVALID);
    assert_int_equal(ra_file_name_parse("", &file), RA_INVALID);
    static char longest[9000];
    memset(longest, 'x', sizeof longest - 1);
    assert_int_equal(ra_file_name_parse(longest, &file), RA_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_output_has_its_name_only_when_published),
        cmocka_unit_test(a_discarded_output_leaves_the_old_file),
        cmocka_unit_test(a_replaced_file_keeps_its_mode_and_a_link_its_target),
        cmocka_unit_test(targets_that_cannot_be_written_are_named),
        cmocka_unit_test(a_file_size_limit_is_an_error_before_anything_is_written),
        cmocka_unit_test(more_outputs_than_slots_is_an_error),
        cmocka_unit_test(processes_that_join_an_output_write_one_file),
        cmocka_unit_test(inputs_that_are_not_files_are_named),
        cmocka_unit_test(file_arguments_split_at_the_tensor_name),
    };
    return cmocka_run_group_tests_name("io_output", tests, make_directory, remove_directory);
}
