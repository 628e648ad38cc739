#include "io/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/status.h"

#define SLOTS 16

/* A slot is taken (1) while its name is being written, and live (2) when a handler may remove the file. */
static struct slot {
    atomic_int state;
    char temporary[4096 + 64];
} slots[SLOTS];

void ra_output_discard_all(void) {
    for (int i = 0; i < SLOTS; i++)
        if (atomic_load(&slots[i].state) == 2) unlink(slots[i].temporary);
}

static ra_status cannot(const char *path, int error) {
    return ra_fail(RA_IO, "%s cannot be written: %s", path, strerror(error));
}

/* Where the file really goes (a link is followed), and whether it may. */
static ra_status check_target(const char *path, char *target, mode_t *mode) {
    struct stat info;
    *mode = 0;
    if (strlen(path) >= 4096) return cannot(path, ENAMETOOLONG);
    strcpy(target, path);
    if (stat(path, &info) != 0) return errno == ENOENT ? RA_OK : cannot(path, errno);
    if (!S_ISREG(info.st_mode)) return ra_fail(RA_IO, "%s is not a regular file and cannot be written", path);
    if (access(path, W_OK) != 0) return cannot(path, errno);
    char *real = realpath(path, NULL);
    if (!real) return cannot(path, errno);
    ra_status status = strlen(real) < 4096 ? RA_OK : cannot(path, ENAMETOOLONG);
    if (status == RA_OK) strcpy(target, real);
    free(real);
    *mode = info.st_mode & 0777;
    return status;
}

/* Puts the name of a temporary file beside the target into the table. */
static void name_temporary(const char *target, int slot, const char *name) {
    const char *slash = strrchr(target, '/');
    int directory = slash ? (int)(slash - target) + 1 : 0;
    atomic_store(&slots[slot].state, 1);
    snprintf(slots[slot].temporary, sizeof slots[slot].temporary, "%.*s%s", directory, target, name);
    atomic_store(&slots[slot].state, 2);
}

/* Opens a new file beside the target; its name is in the table before it exists. */
static int open_temporary(const char *target, int slot) {
    for (int attempt = 0; attempt < 1000; attempt++) {
        char name[64];
        snprintf(name, sizeof name, ".ringattn-%ld-%d-%d.tmp", (long)getpid(), slot, attempt);
        name_temporary(target, slot, name);
        int fd = open(slots[slot].temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

static ra_status map_output(ra_output *output) {
    void *data = mmap(NULL, (size_t)output->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, output->fd, 0);
    if (data == MAP_FAILED) return cannot(output->path, errno);
    output->data = data;
    return RA_OK;
}

static ra_status fill(ra_output *output, const void *header, int64_t header_bytes, mode_t mode) {
    if (mode != 0 && fchmod(output->fd, mode) != 0) return cannot(output->path, errno);
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
    mode_t mode;
    RA_TRY(check_target(path, output->path, &mode));
    RA_TRY(take_slot(output));
    output->fd = open_temporary(output->path, output->slot);
    ra_status status = output->fd < 0 ? cannot(path, errno) : fill(output, header, header_bytes, mode);
    if (status != RA_OK) ra_output_discard(output);
    return status;
}

const char *ra_output_temporary(const ra_output *output) {
    const char *path = slots[output->slot].temporary, *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

ra_status ra_output_join(const char *path, const char *temporary, int64_t bytes, ra_output *output) {
    memset(output, 0, sizeof *output);
    output->fd = output->slot = -1;
    output->bytes = bytes;
    mode_t mode;
    RA_TRY(check_target(path, output->path, &mode));
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
    if (msync(output->data, (size_t)output->bytes, MS_SYNC) != 0 || fsync(output->fd) != 0) return cannot(output->path, errno);
    return RA_OK;
}

ra_status ra_output_publish(ra_output *output) {
    ra_status status = RA_OK;
    if (rename(slots[output->slot].temporary, output->path) != 0) status = cannot(output->path, errno);
    else atomic_store(&slots[output->slot].state, 1); /* the temporary name is gone: nothing to remove */
    ra_output_discard(output);
    return status;
}

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
