/* bench --rank: one rank of a ring alone, its peers' rows made by the generator, and sampled rows of its results checked in
 * float64. */
#ifndef CLI_SOLO_H
#define CLI_SOLO_H

#include "measure.h"
#include "verify.h"

typedef struct solo_result {
    measurement m;
    ra_rank_summary plan; /* of the rank */
    verdict verdict;      /* of out and lse, and dq when backward ran */
    int64_t sampled_rows;
} solo_result;

ra_status solo_run(const settings *s, const ra_attention_desc *desc, solo_result *result);

#endif
