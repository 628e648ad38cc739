/* Sampled rows of what a rank computed from generated data, computed again in float64. */
#ifndef CLI_SAMPLE_H
#define CLI_SAMPLE_H

#include "shard.h"
#include "verify.h"

/* Judges out and lse (backward: dq, too) of rows spread over the rank's queries: 1000 if they are not too long, of `pairs` in
 * all the rank's rows. *rows: how many. */
ra_status sample_check(const shard *rank, uint64_t seed, int64_t pairs, bool backward, verdict *v, int64_t *rows);

#endif
