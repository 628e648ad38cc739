/* Agreement before work: every rank holds the same configuration, or all learn who differs in what. */
#ifndef RA_RING_AGREE_H
#define RA_RING_AGREE_H

#include "ring/comm.h"

/* `mine` tells whether this rank could make its plan; text is its configuration as "field=value" lines. Every rank calls it.
 * Returns mine if this rank failed, RA_DISAGREE or the first failing rank's status if another did, else RA_OK. */
ra_status ra_agree(ra_comm *comm, ra_status mine, const char *text, int64_t bytes);

#endif
