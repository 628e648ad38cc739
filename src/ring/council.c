#include "ring/council.h"

#include <stdio.h>

#include "core/alloc.h"
#include "core/status.h"

static int64_t ballots_bytes(const ra_comm *comm) { return (int64_t)sizeof(ra_ballot) * comm->ranks; }

/* Without memory this rank cannot even hear the others: they are told instead of left waiting. */
ra_status ra_council_open(ra_council *council, ra_comm *comm) {
    *council = (ra_council){.comm = comm, .all = ra_calloc(ballots_bytes(comm)), .objector = -1};
    if (council->all) return RA_OK;
    ra_fail(RA_NOMEM, "no memory to agree with %d ranks", comm->ranks);
    ra_link_abort(comm->link, RA_NOMEM, ra_last_error());
    return RA_NOMEM;
}

void ra_council_close(ra_council *council) {
    if (council->all) ra_free(council->all, ballots_bytes(council->comm));
    council->all = NULL;
}

ra_status ra_council_vote(ra_council *council, ra_status status) {
    const ra_comm *comm = council->comm;
    council->mine.status = status;
    if (status != RA_OK) snprintf(council->mine.reason, sizeof council->mine.reason, "%s", ra_last_error());
    RA_TRY(ra_link_allgather(comm->link, &council->mine, council->all, (int64_t)sizeof council->mine, "plan"));
    council->objector = -1;
    for (int rank = comm->ranks - 1; rank >= 0; rank--)
        if (council->all[rank].status != RA_OK) council->objector = rank;
    return RA_OK;
}

const char *ra_council_objection(const ra_council *council) {
    ra_ballot *said = &council->all[council->objector];
    said->reason[sizeof said->reason - 1] = 0;
    return said->reason;
}
