/* Agreement before work: every rank holds the same configuration, or all learn who differs in what. */
#ifndef RA_RING_AGREE_H
#define RA_RING_AGREE_H

#include "ring/comm.h"

/* `mine` tells whether this rank could make its plan; text is its configuration as "field=value" lines. Every rank calls it.
 * Returns mine if this rank failed, RA_DISAGREE or the first failing rank's status if another did, else RA_OK; then `frames`,
 * the bytes of this rank's frames in both passes, have become those of the rank that has most. */
ra_status ra_agree(ra_comm *comm, ra_status mine, const char *text, int64_t bytes, int64_t frames[2]);

#endif
