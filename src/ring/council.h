/* How ranks decide on a lane together: each says whether it can, and all hear the same. */
#ifndef RA_RING_COUNCIL_H
#define RA_RING_COUNCIL_H

#include "core/shared.h"
#include "device/device.h"
#include "ring/comm.h"

/* What a rank says. */
typedef struct ra_ballot {
    int64_t status; /* not RA_OK: it cannot, for this reason */
    char reason[160];
    uint64_t host; /* ipc */
    int64_t process, file;
    char handle[RA_HANDLE_BYTES];
    int64_t insists, version; /* nccl */
    char name[RA_NET_NAME_BYTES];
} ra_ballot;

typedef struct ra_council {
    ra_comm *comm;
    ra_ballot mine, *all; /* by rank, of the latest vote */
    int objector;         /* the first rank that could not; -1: all could */
} ra_council;

ra_status ra_council_open(ra_council *council, ra_comm *comm);
void ra_council_close(ra_council *council);
/* Every rank does this together. `status`: can this one? Fails only if ranks cannot be heard; whoever can then looks at
 * `objector`. */
ra_status ra_council_vote(ra_council *council, ra_status status);
/* What the objector said. */
const char *ra_council_objection(const ra_council *council);

#endif
