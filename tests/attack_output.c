/* A disk that fails at any call: under io/output.c every system call that writes, syncs or names goes through a layer that can
 * refuse it. Whatever is refused, the old file is intact and nothing is left beside it. And: what a killed run left is gone
 * after the next one, and nobody reads or guesses an unfinished file. */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "io/map.h"
#include "io/output.h"

/* ------------------------------------------------------------------------------------------------------------ faults */

/* The linker sends these calls here (--wrap in tests/CMakeLists.txt). */
static struct {
    int countdown; /* the call that fails; 0: none */
    int error;
    int refused; /* calls */
    bool harmless, late; /* the one refused does not matter, or came after the file had its name */
} fault;

static bool refuse(void) {
    if (fault.countdown == 0 || --fault.countdown > 0) return false;
    fault.refused++;
    errno = fault.error;
    return true;
}

static bool is_directory(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}

#define WRAP(type, name, parameters, arguments, failure)                                                                       \
    type __real_##name parameters;                                                                                             \
    type __wrap_##name parameters;                                                                                             \
    type __wrap_##name parameters { return refuse() ? failure : __real_##name arguments; }

WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), -1)
WRAP(int, ftruncate, (int fd, off_t bytes), (fd, bytes), -1)
WRAP(int, posix_fallocate, (int fd, off_t at, off_t bytes), (fd, at, bytes), fault.error)
WRAP(int, msync, (void *data, size_t bytes, int flags), (data, bytes, flags), -1)
WRAP(int, rename, (const char *from, const char *to), (from, to), -1)
WRAP(ssize_t, getrandom, (void *to, size_t bytes, unsigned flags), (to, bytes, flags), -1)

int __real_flock(int fd, int operation);
int __wrap_flock(int fd, int operation);
int __wrap_flock(int fd, int operation) {
    if (!refuse()) return __real_flock(fd, operation);
    fault.harmless = true; /* there are file systems without locks */
    return -1;
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
    if (!refuse()) return __real_fsync(fd);
    fault.late = is_directory(fd);
    return -1;
}

/* ----------------------------------------------------------------------------------------------------------- helpers */

static char directory[] = "/tmp/ringattn-attack-XXXXXX";

static const char *in_directory(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

/* Files in the directory; the name of a temporary one, if any, in `temporary`. */
static int entries(char temporary[256]) {
    DIR *d = opendir(directory);
    assert_non_null(d);
    int count = 0;
    for (const struct dirent *e; (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        count++;
        if (temporary && strncmp(e->d_name, ".ringattn-", 10) == 0) snprintf(temporary, 256, "%s", e->d_name);
    }
    closedir(d);
    return count;
}

static void put(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void holds(const char *path, const char *text) {
    char read[64] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fread(read, 1, sizeof read - 1, f), strlen(text));
    fclose(f);
    assert_string_equal(read, text);
}

static ra_status write_whole(const char *path) {
    ra_output output;
    ra_status status = ra_output_create(path, "new!", 4, 8, &output);
    if (status != RA_OK) return status;
    memcpy(output.data + 4, "rest", 4);
    status = ra_output_sync(&output);
    if (status == RA_OK) return ra_output_publish(&output);
    ra_output_discard(&output);
    return status;
}

/* A run that is killed in the middle of its work. */
static void killed_run(const char *path) {
    pid_t child = fork();
    if (child == 0) {
        ra_output output;
        if (ra_output_create(path, "half", 4, 8, &output) != RA_OK) _exit(1);
        raise(SIGKILL);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static int make_directory(void **state) {
    (void)state;
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state) {
    (void)state;
    return rmdir(directory); /* fails if a test left a file behind */
}

/* ------------------------------------------------------------------------------------------------------------- tests */

static void whatever_the_disk_refuses_the_old_file_is_intact(void **state) {
    (void)state;
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EROFS};
    char path[256];
    strcpy(path, in_directory("a"));
    for (size_t e = 0; e < sizeof errors / sizeof *errors; e++)
        for (int call = 1;; call++) {
            put(path, "old");
            memset(&fault, 0, sizeof fault);
            fault.countdown = call;
            fault.error = errors[e];
            ra_status status = write_whole(path);
            fault.countdown = 0;
            assert_int_equal(entries(NULL), 1);
            if (fault.refused == 0) {
                assert_int_equal(status, RA_OK);
                assert_true(call > 9); /* getrandom, flock, ftruncate, fallocate, msync, fchmod, fsync, rename, fsync */
                break;
            }
            if (fault.harmless) {
                assert_int_equal(status, RA_OK);
                continue;
            }
            assert_int_equal(status, RA_IO);
            assert_non_null(strstr(ra_last_error(), path));
            assert_non_null(strstr(ra_last_error(), strerror(errors[e])));
            holds(path, fault.late ? "new!rest" : "old");
        }
    unlink(path);
}

static void what_a_killed_run_left_is_gone_after_the_next_of_its_target(void **state) {
    (void)state;
    char a[256], b[256], left[256] = "";
    strcpy(a, in_directory("a"));
    strcpy(b, in_directory("b"));
    killed_run(a);
    killed_run(a); /* removes what the first left, and leaves its own */
    assert_int_equal(entries(left), 1);
    assert_int_equal(write_whole(b), RA_OK); /* another target: not its business */
    assert_int_equal(entries(NULL), 2);
    assert_int_equal(write_whole(a), RA_OK);
    assert_int_equal(entries(NULL), 2);
    assert_int_equal(access(in_directory(left), F_OK), -1);
    holds(a, "new!rest");
    holds(b, "new!rest");
    unlink(a);
    unlink(b);
}

static void a_run_that_still_lives_keeps_its_file(void **state) {
    (void)state;
    char a[256];
    ra_output output;
    strcpy(a, in_directory("a"));
    assert_int_equal(ra_output_create(a, "slow", 4, 4, &output), RA_OK);
    assert_int_equal(write_whole(a), RA_OK);
    assert_int_equal(entries(NULL), 2);
    assert_int_equal(ra_output_sync(&output), RA_OK);
    assert_int_equal(ra_output_publish(&output), RA_OK);
    assert_int_equal(entries(NULL), 1);
    holds(a, "slow");
    unlink(a);
}

static void an_unfinished_file_is_its_owner_s_alone_and_has_a_name_that_nobody_guesses(void **state) {
    (void)state;
    char a[256], first[64], second[64];
    ra_output output;
    struct stat info;
    strcpy(a, in_directory("a"));
    mode_t mask = umask(022);
    assert_int_equal(ra_output_create(a, "new", 3, 3, &output), RA_OK);
    assert_int_equal(stat(in_directory(ra_output_temporary(&output)), &info), 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    snprintf(first, sizeof first, "%s", ra_output_temporary(&output));
    assert_int_equal(ra_output_sync(&output), RA_OK);
    assert_int_equal(ra_output_publish(&output), RA_OK);
    assert_int_equal(stat(a, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0644); /* as any new file */
    assert_int_equal(ra_output_create(a, "new", 3, 3, &output), RA_OK);
    snprintf(second, sizeof second, "%s", ra_output_temporary(&output));
    ra_output_discard(&output);
    int differ = 0;
    for (int i = 0; first[i]; i++) differ += first[i] != second[i];
    assert_true(differ >= 8); /* of 16 random digits: fewer once in a hundred million */
    umask(mask);
    unlink(a);
}

static void a_dangling_link_leads_to_the_file_that_it_names(void **state) {
    (void)state;
    char link[256], target[256];
    struct stat info;
    strcpy(link, in_directory("link"));
    strcpy(target, in_directory("target"));
    assert_int_equal(symlink("target", link), 0);
    assert_int_equal(write_whole(link), RA_OK);
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    holds(target, "new!rest");
    unlink(target);
    unlink(link);
    assert_int_equal(symlink("link", link), 0); /* round and round */
    assert_int_equal(write_whole(link), RA_IO);
    assert_non_null(strstr(ra_last_error(), link));
    unlink(link);
}

static void paths_are_one_file_by_links_and_hard_links_there_or_not(void **state) {
    (void)state;
    ra_path_id a, b;
    char file[256], other[256];
    strcpy(file, in_directory("file"));
    strcpy(other, in_directory("other"));
    assert_int_equal(ra_path_identify(file, &a), RA_OK);
    assert_int_equal(ra_path_identify(in_directory("./file"), &b), RA_OK);
    assert_true(ra_path_same(&a, &b)); /* neither is there */
    assert_int_equal(ra_path_identify(other, &b), RA_OK);
    assert_false(ra_path_same(&a, &b));
    assert_int_equal(symlink("file", other), 0);
    assert_int_equal(ra_path_identify(other, &b), RA_OK);
    assert_true(ra_path_same(&a, &b)); /* a link to what is not there yet */
    unlink(other);
    put(file, "x");
    assert_int_equal(link(file, other), 0);
    assert_int_equal(ra_path_identify(file, &a), RA_OK);
    assert_int_equal(ra_path_identify(other, &b), RA_OK);
    assert_true(ra_path_same(&a, &b));
    unlink(file);
    unlink(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_the_disk_refuses_the_old_file_is_intact),
        cmocka_unit_test(what_a_killed_run_left_is_gone_after_the_next_of_its_target),
        cmocka_unit_test(a_run_that_still_lives_keeps_its_file),
        cmocka_unit_test(an_unfinished_file_is_its_owner_s_alone_and_has_a_name_that_nobody_guesses),
        cmocka_unit_test(a_dangling_link_leads_to_the_file_that_it_names),
        cmocka_unit_test(paths_are_one_file_by_links_and_hard_links_there_or_not),
    };
    return cmocka_run_group_tests_name("attack_output", tests, make_directory, remove_directory);
}
