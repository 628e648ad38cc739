/* Memory that processes of one host share. It has no name, so that nothing is left behind however they end: a process opens it
 * through the one that made it, while that has it open. */
#ifndef RA_CORE_SHARED_H
#define RA_CORE_SHARED_H

#include <sys/types.h>

#include "ringattn.h"

enum { RA_HANDLE_BYTES = 64 }; /* of what names memory of a device to another process */

typedef struct ra_shared {
    void *memory; /* NULL: closed */
    int64_t bytes;
    int file; /* of the process that made it; -1: opened */
} ra_shared;

/* Zeros, at the start of a page. */
ra_status ra_shared_create(int64_t bytes, ra_shared *shared);
/* What `process` has created as its `file`. */
ra_status ra_shared_open(pid_t process, int file, int64_t bytes, ra_shared *shared);
void ra_shared_close(ra_shared *shared);

/* Equal for processes that can open each other's memory: those of one host that see each other. 0: not known. */
uint64_t ra_host_id(void);

#endif
