/* Any bytes as a descriptor: refused with a sentence, or planned; and then the ranks of the plan hold each row once and the
 * pairs of all ranks are those of one. */
#include <stdlib.h>

#include "make_desc.h"

static void check_plan(const ra_attention_desc *desc, int ranks) {
    ra_rank_summary one = {.struct_size = sizeof one}, all[16];
    for (int i = 0; i < ranks; i++) all[i].struct_size = sizeof all[i];
    ra_status alone = ra_plan_summary(desc, 0, 1, &one), together = ra_plan_summaries(desc, ranks, all);
    if (alone != RA_OK || together != RA_OK) {
        if (ra_last_error()[0] == '\0') abort();
        return;
    }
    int64_t rows_q = 0, rows_k = 0, pairs = 0, holes = 0;
    bool saturated = one.pairs == INT64_MAX || one.holes < 0;
    for (int i = 0; i < ranks; i++) {
        if (all[i].bytes_sent < 0 || all[i].workspace_bytes < 0 || all[i].hops < 0) abort();
        rows_q += all[i].rows_q;
        rows_k += all[i].rows_k;
        saturated = saturated || all[i].pairs > INT64_MAX / 32 || all[i].holes < 0 || all[i].holes > INT64_MAX / 32;
        pairs += saturated ? 0 : all[i].pairs;
        holes += saturated ? 0 : all[i].holes;
    }
    if (desc->query_placement == RA_SHARDED && (rows_q != desc->seq_q || rows_k != desc->seq_k)) abort();
    if (desc->query_placement == RA_SHARDED && !saturated && (pairs != one.pairs || holes != one.holes)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, size};
    made_desc made;
    make_desc(&b, true, 300, &made);
    made.desc.memory_limit = take(&b, 1) % 8 == 7 ? take(&b, 4) : 0;
    if (ra_attention_desc_check(&made.desc) != RA_OK) {
        if (ra_last_error()[0] == '\0') abort();
        return 0;
    }
    check_plan(&made.desc, 1 + (int)(take(&b, 1) % 16));
    return 0;
}
