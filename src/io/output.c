#include "io/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fields.h"
#include "core/status.h"

#define SLOTS 16

/* A slot is taken (1) while its name is being written, and live (2) when a handler may remove the file. */
static struct slot {
    atomic_int state;
    char temporary[RA_PATH_MAX + 64];
} slots[SLOTS];

void ra_output_discard_all(void) {
    for (int i = 0; i < SLOTS; i++)
        if (atomic_load(&slots[i].state) == 2) unlink(slots[i].temporary);
}

static ra_status cannot(const char *path, int error) {
    return ra_fail(RA_IO, "%s cannot be written: %s", path, strerror(error));
}

/* Where the file really goes (links are followed), whether it may, and the mode that it will have. */
static ra_status check_target(const char *path, char *target, int *mode) {
    struct stat info;
    ra_status status = ra_path_resolve(path, target);
    if (status != RA_OK) return ra_fail_context(status, "an output cannot be written: ");
    if (stat(target, &info) != 0) {
        if (errno != ENOENT) return cannot(path, errno);
        mode_t mask = umask(077); /* there is no call that only asks */
        umask(mask);
        *mode = (int)(0666 & ~mask);
        return RA_OK;
    }
    if (!S_ISREG(info.st_mode)) return ra_fail(RA_IO, "%s is not a regular file and cannot be written", path);
    if (access(target, W_OK) != 0) return cannot(path, errno);
    *mode = (int)(info.st_mode & 0777);
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------- temporary files */

#define PREFIX_BYTES 32 /* ".ringattn-", 16 digits, "-" and the end */

/* What the temporary names of a target begin with: FNV-1a of its last component. */
static void prefix_of(const char *target, char prefix[PREFIX_BYTES]) {
    const char *name = ra_path_name(target);
    snprintf(prefix, PREFIX_BYTES, ".ringattn-%016" PRIx64 "-", ra_fnv(RA_FNV_START, name, (int64_t)strlen(name)));
}

/* Removes the file if it is ours and no living process has it locked. */
static void remove_if_left(int directory, const char *name) {
    struct stat info;
    int fd = openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    bool ours = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid();
    if (ours && flock(fd, LOCK_EX | LOCK_NB) == 0) unlinkat(directory, name, 0);
    close(fd);
}

/* Removes what killed runs left of this target. If that fails, it harms nobody. */
static void remove_left(const char *target) {
    char directory[RA_PATH_MAX], prefix[PREFIX_BYTES];
    ra_path_directory(target, directory);
    prefix_of(target, prefix);
    DIR *d = opendir(directory);
    if (!d) return;
    for (const struct dirent *entry; (entry = readdir(d));)
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0) remove_if_left(dirfd(d), entry->d_name);
    closedir(d);
}

/* Puts the name of a temporary file beside the target into the table. */
static void name_temporary(const char *target, int slot, const char *name) {
    const int directory = (int)(ra_path_name(target) - target);
    atomic_store(&slots[slot].state, 1);
    snprintf(slots[slot].temporary, sizeof slots[slot].temporary, "%.*s%s", directory, target, name);
    atomic_store(&slots[slot].state, 2);
}

/* A file that another run took for left, in the moment before it was locked, has no name any more. Where there are no locks,
 * nobody removes what is left. */
static bool lock(int fd) {
    struct stat info;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    return fstat(fd, &info) != 0 || info.st_nlink > 0;
}

/* Opens a new file beside the target; its name is in the table before it exists. */
static int open_temporary(const char *target, int slot) {
    char prefix[PREFIX_BYTES], name[64];
    uint64_t number;
    prefix_of(target, prefix);
    for (int attempt = 0; attempt < 100; attempt++) {
        if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) return -1;
        snprintf(name, sizeof name, "%s%016" PRIx64 ".tmp", prefix, number);
        name_temporary(target, slot, name);
        int fd = open(slots[slot].temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0 && errno != EEXIST) return -1;
        if (fd >= 0 && lock(fd)) return fd;
        if (fd >= 0) close(fd);
    }
    errno = EEXIST;
    return -1;
}

/* ------------------------------------------------------------------------------------------------------------ outputs */

static ra_status map_output(ra_output *output) {
    void *data = mmap(NULL, (size_t)output->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, output->fd, 0);
    if (data == MAP_FAILED) return cannot(output->path, errno);
    output->data = data;
    return RA_OK;
}

static ra_status fill(ra_output *output, const void *header, int64_t header_bytes) {
    if (ftruncate(output->fd, (off_t)output->bytes) != 0) return cannot(output->path, errno);
    int error;
    do error = posix_fallocate(output->fd, 0, (off_t)output->bytes);
    while (error == EINTR);
    if (error != 0) return cannot(output->path, error);
    RA_TRY(map_output(output));
    memcpy(output->data, header, (size_t)header_bytes);
    return RA_OK;
}

static ra_status take_slot(ra_output *output) {
    for (int i = 0, unused = 0; i < SLOTS && output->slot < 0; i++, unused = 0)
        if (atomic_compare_exchange_strong(&slots[i].state, &unused, 1)) output->slot = i;
    return output->slot >= 0 ? RA_OK : ra_fail(RA_IO, "more than %d output files at once", SLOTS);
}

ra_status ra_output_create(const char *path, const void *header, int64_t header_bytes, int64_t bytes, ra_output *output) {
    memset(output, 0, sizeof *output);
    output->fd = -1;
    output->slot = -1;
    output->bytes = bytes;
    RA_TRY(check_target(path, output->path, &output->mode));
    RA_TRY(take_slot(output));
    remove_left(output->path);
    output->fd = open_temporary(output->path, output->slot);
    ra_status status = output->fd < 0 ? cannot(path, errno) : fill(output, header, header_bytes);
    if (status != RA_OK) ra_output_discard(output);
    return status;
}

const char *ra_output_temporary(const ra_output *output) {
    return ra_path_name(slots[output->slot].temporary);
}

ra_status ra_output_join(const char *path, const char *temporary, int64_t bytes, ra_output *output) {
    memset(output, 0, sizeof *output);
    output->fd = output->slot = -1;
    output->bytes = bytes;
    RA_TRY(check_target(path, output->path, &output->mode));
    output->mode = -1;
    RA_TRY(take_slot(output));
    name_temporary(output->path, output->slot, temporary);
    output->fd = open(slots[output->slot].temporary, O_RDWR | O_CLOEXEC);
    ra_status status = output->fd < 0 ? cannot(slots[output->slot].temporary, errno) : map_output(output);
    if (status != RA_OK) ra_output_discard(output);
    return status;
}

void ra_output_leave(ra_output *output) {
    if (output->path[0] != '\0' && output->slot >= 0)
        atomic_store(&slots[output->slot].state, 1); /* the file is somebody else's to publish */
    ra_output_discard(output);
}

ra_status ra_output_sync(ra_output *output) {
    if (msync(output->data, (size_t)output->bytes, MS_SYNC) != 0) return cannot(output->path, errno);
    if (output->mode >= 0 && fchmod(output->fd, (mode_t)output->mode) != 0) return cannot(output->path, errno);
    return fsync(output->fd) == 0 ? RA_OK : cannot(output->path, errno);
}

/* After this the new name survives a power failure. Some file systems cannot sync a directory: nothing to be had there. */
static ra_status sync_directory(const char *path) {
    char directory[RA_PATH_MAX];
    ra_path_directory(path, directory);
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && errno == EACCES) return RA_OK; /* one may write into a directory that one may not read */
    int error = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) close(fd);
    if (error == 0 || error == EINVAL || error == ENOTSUP) return RA_OK;
    return ra_fail(RA_IO, "%s is written whole, but might not survive a power failure: its directory cannot be synced: %s",
                   path, strerror(error));
}

static ra_status give_name(ra_output *output) {
    if (rename(slots[output->slot].temporary, output->path) != 0) return cannot(output->path, errno);
    atomic_store(&slots[output->slot].state, 1); /* the temporary name is gone: nothing to remove */
    return RA_OK;
}

ra_status ra_outputs_publish(ra_output *outputs, int count) {
    ra_status status = RA_OK;
    for (int i = 0; i < count && status == RA_OK; i++) status = give_name(&outputs[i]);
    const bool named = status == RA_OK;
    for (int i = 0; i < count && named; i++) /* one that fails keeps no other from it */
        if (sync_directory(outputs[i].path) != RA_OK) status = RA_IO;
    for (int i = 0; i < count; i++) ra_output_discard(&outputs[i]);
    return status;
}

ra_status ra_output_publish(ra_output *output) { return ra_outputs_publish(output, 1); }

void ra_output_discard(ra_output *output) {
    if (output->path[0] == '\0') return;
    if (output->data) munmap(output->data, (size_t)output->bytes);
    if (output->slot >= 0) {
        if (output->fd >= 0 && atomic_load(&slots[output->slot].state) == 2) unlink(slots[output->slot].temporary);
        atomic_store(&slots[output->slot].state, 0);
    }
    if (output->fd >= 0) close(output->fd);
    memset(output, 0, sizeof *output);
    output->slot = output->fd = -1;
}
