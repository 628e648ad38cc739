#include "core/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fields.h"
#include "core/status.h"

static ra_status map(int file, int64_t bytes, ra_shared *shared) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return ra_fail(RA_NOMEM, "shared memory of %lld bytes cannot be mapped", (long long)bytes);
    shared->memory = memory;
    shared->bytes = bytes;
    return RA_OK;
}

ra_status ra_shared_create(int64_t bytes, ra_shared *shared) {
    *shared = (ra_shared){.file = memfd_create("ringattn", MFD_CLOEXEC)};
    if (shared->file < 0) return ra_fail(RA_NOT_AVAILABLE, "shared memory cannot be made: %s", strerror(errno));
    ra_status status = ftruncate(shared->file, bytes) == 0
                           ? map(shared->file, bytes, shared)
                           : ra_fail(RA_NOMEM, "no shared memory of %lld bytes: %s", (long long)bytes, strerror(errno));
    if (status != RA_OK) ra_shared_close(shared);
    return status;
}

ra_status ra_shared_open(pid_t process, int file, int64_t bytes, ra_shared *shared) {
    char path[64];
    struct stat about;
    *shared = (ra_shared){.file = -1};
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)process, file);
    const int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return ra_fail(RA_NOT_AVAILABLE, "memory of process %ld cannot be opened: %s", (long)process, strerror(errno));
    const ra_status status = fstat(opened, &about) == 0 && S_ISREG(about.st_mode) && about.st_size >= bytes
                                 ? map(opened, bytes, shared)
                                 : ra_fail(RA_NOT_AVAILABLE, "process %ld does not share this memory", (long)process);
    close(opened);
    return status;
}

void ra_shared_close(ra_shared *shared) {
    if (shared->memory) munmap(shared->memory, (size_t)shared->bytes);
    if (shared->file >= 0) close(shared->file);
    *shared = (ra_shared){.file = -1};
}

uint64_t ra_host_id(void) {
    char boot[64] = "", space[64] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    const bool known = file && fgets(boot, sizeof boot, file);
    if (file) fclose(file);
    if (!known || readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) return 0;
    return ra_fnv(ra_fnv(RA_FNV_START, boot, sizeof boot), space, sizeof space);
}
