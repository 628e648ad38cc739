#include "io/path.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/status.h"

#define LINKS_MAX 40 /* as the kernel has it */

static ra_status cannot(const char *path, int error) { return ra_fail(RA_IO, "%s: %s", path, strerror(error)); }

/* Length of the directory in front of the last component, its slash included. */
static size_t directory_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

ra_status ra_path_resolve(const char *path, char target[RA_PATH_MAX]) {
    if (strlen(path) >= RA_PATH_MAX) return cannot(path, ENAMETOOLONG);
    strcpy(target, path);
    for (int links = 0;; links++) {
        struct stat info;
        if (lstat(target, &info) != 0) return errno == ENOENT ? RA_OK : cannot(path, errno);
        if (!S_ISLNK(info.st_mode)) return RA_OK;
        if (links == LINKS_MAX) return cannot(path, ELOOP);
        char link[RA_PATH_MAX];
        ssize_t length = readlink(target, link, sizeof link);
        if (length < 0) return cannot(path, errno);
        size_t directory = length > 0 && link[0] == '/' ? 0 : directory_length(target);
        if (directory + (size_t)length >= RA_PATH_MAX) return cannot(path, ENAMETOOLONG);
        memcpy(target + directory, link, (size_t)length);
        target[directory + (size_t)length] = '\0';
    }
}

const char *ra_path_name(const char *path) { return path + directory_length(path); }

void ra_path_directory(const char *path, char directory[RA_PATH_MAX]) {
    size_t length = directory_length(path);
    snprintf(directory, RA_PATH_MAX, "%.*s", length > 0 ? (int)length : 1, length > 0 ? path : ".");
}

ra_status ra_path_identify(const char *path, ra_path_id *id) {
    char target[RA_PATH_MAX], directory[RA_PATH_MAX];
    struct stat info = {0};
    RA_TRY(ra_path_resolve(path, target));
    id->name[0] = '\0';
    if (stat(target, &info) != 0) {
        ra_path_directory(target, directory);
        if (stat(directory, &info) == 0) strcpy(id->name, ra_path_name(target));
        else strcpy(id->name, target); /* no directory: whoever opens it says so */
    }
    id->device = info.st_dev;
    id->file = info.st_ino;
    return RA_OK;
}

bool ra_path_same(const ra_path_id *a, const ra_path_id *b) {
    return a->device == b->device && a->file == b->file && strcmp(a->name, b->name) == 0;
}
