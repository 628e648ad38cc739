/* why: does this query attend to this key, by which branch, or which rule forbids it; who brings it, and when. */
#include <stdio.h>

#include "cli.h"
#include "core/status.h"
#include "rule.h"

static ra_status check_indices(const settings *s, const ra_attention_desc *d) {
    if (s->query >= d->seq_q)
        return ra_fail(RA_INVALID, "--query %lld is not one of the %lld queries", (long long)s->query, (long long)d->seq_q);
    if (s->key >= d->seq_k)
        return ra_fail(RA_INVALID, "--key %lld is not one of the %lld keys", (long long)s->key, (long long)d->seq_k);
    if (s->head >= d->heads)
        return ra_fail(RA_INVALID, "--head %lld is not one of the %lld heads", (long long)s->head, (long long)d->heads);
    return RA_OK;
}

/* The rank that holds a row. */
static ra_status holder(const ra_attention_desc *d, int ranks, bool query, int64_t row, int *rank) {
    for (*rank = 0; *rank < ranks; ++*rank) {
        ra_shard q, k;
        RA_TRY(ra_shard_rows(d, *rank, ranks, &q, &k));
        const ra_shard *s = query ? &q : &k;
        for (int run = 0; run < 2; run++) {
            const ra_rows *r = &s->rows[run];
            if (r->count > 0 && row >= r->start && (row - r->start) % r->step == 0 && (row - r->start) / r->step < r->count)
                return RA_OK;
        }
    }
    return ra_fail(RA_INTERNAL, "no rank holds row %lld", (long long)row);
}

static ra_status why(const settings *s, const ra_attention_desc *d) {
    int ranks = (int)s->ring_size, query_rank, key_rank;
    int64_t times = 0;
    RA_TRY(check_indices(s, d));
    RA_TRY(holder(d, ranks, true, s->query, &query_rank));
    RA_TRY(holder(d, ranks, false, s->key, &key_rank));
    json_t *branches = json_array();
    char text[160];
    if (!s->json)
        printf("query %lld (position %lld, rank %d), key %lld (rank %d), head %lld\n", (long long)s->query,
               (long long)(s->query + d->seq_k - d->seq_q), query_rank, (long long)s->key, key_rank, (long long)s->head);
    for (int64_t b = 0; b < rule_branches(d); b++) {
        rule r = rule_of(d, s->query, s->key, s->head, b);
        ra_meeting m = {.struct_size = sizeof m};
        ra_status status = r == RULE_ATTENDED ? ra_plan_meeting(d, ranks, s->query, s->key, s->head, b, &m) : RA_OK;
        if (status != RA_OK) {
            json_decref(branches);
            return status;
        }
        times += r == RULE_ATTENDED;
        rule_sentence(d, s->query, s->key, s->head, b, text, sizeof text);
        json_t *row = json_pack("{s:I, s:I, s:I, s:b, s:s, s:s}", "branch", (json_int_t)b, "segment_length",
                                (json_int_t)rule_segment(d, b), "dilation_rate", (json_int_t)rule_rate(d, b), "attended",
                                r == RULE_ATTENDED, "rule", rule_name(r), "sentence", text);
        if (r == RULE_ATTENDED)
            json_object_update_new(row, json_pack("{s:I, s:I, s:I, s:I}", "round", (json_int_t)m.round, "bucket",
                                                  (json_int_t)m.bucket, "hop", (json_int_t)m.hop, "step", (json_int_t)m.step));
        json_array_append_new(branches, row);
        if (s->json) continue;
        printf("  branch %lld (segment %lld, rate %lld): %s", (long long)b, (long long)rule_segment(d, b),
               (long long)rule_rate(d, b), text);
        if (r == RULE_ATTENDED && m.hop == 0) printf("; rank %d has both", query_rank);
        else if (r == RULE_ATTENDED)
            printf("; rank %d sends it in bucket %lld of round %lld, and after %lld hop%s it is there in step %lld", key_rank,
                   (long long)m.bucket, (long long)m.round, (long long)m.hop, m.hop == 1 ? "" : "s", (long long)m.step);
        printf("\n");
    }
    if (s->json)
        return print_json(s,
                          json_pack("{s:I, s:I, s:I, s:b, s:I, s:i, s:i, s:o}", "query", (json_int_t)s->query, "key",
                                    (json_int_t)s->key, "head", (json_int_t)s->head, "attended", times > 0, "times",
                                    (json_int_t)times, "query_rank", query_rank, "key_rank", key_rank, "branches", branches));
    json_decref(branches);
    printf(times == 0 ? "not attended\n" : times == 1 ? "attended\n" : "attended, and counted %lld times\n", (long long)times);
    return RA_OK;
}

ra_status command_why(const settings *s, bool *check_failed) {
    (void)check_failed;
    description d;
    RA_TRY(describe(s, s->seq.values[0], (int)s->ring_size, &d));
    ra_status status = check_memory_limit(s, &d.desc, (int)s->ring_size, false);
    if (status == RA_OK) status = why(s, &d.desc);
    description_free(&d);
    return status;
}
