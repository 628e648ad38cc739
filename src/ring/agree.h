/* Agreement before work: every rank holds the same configuration, or all learn who differs in what. */
#ifndef RA_RING_AGREE_H
#define RA_RING_AGREE_H

#include "plan/plan.h"

/* `mine` tells whether this rank could make its plan; text is its configuration as "field=value" lines. Every rank calls it.
 * Returns mine if this rank failed, RA_DISAGREE or the first failing rank's status if another did, else RA_OK. */
ra_status ra_agree(ra_comm *comm, ra_status mine, const char *text, int64_t bytes);

/* The same, riding on another exchange: what a rank tells its parent in a tree about its configuration. The header's room comes
 * first. */
typedef struct ra_ballot_message {
    char header[RA_LINK_HEADER];
    uint64_t digest[2];
    char text[1008]; /* as much of the configuration as fits */
} ra_ballot_message;
#define RA_BALLOT_PAYLOAD ((int64_t)(sizeof(ra_ballot_message) - RA_LINK_HEADER))

void ra_ballot_fill(const ra_plan *plan, ra_ballot_message *ballot);
/* RA_DISAGREE names both ranks, the field and both values. */
ra_status ra_ballot_check(const ra_plan *plan, const ra_ballot_message *theirs, int rank);

#endif
