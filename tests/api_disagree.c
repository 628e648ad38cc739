/* Ranks that hold different configurations: every field, on every rank, is found before anything is computed, and all ranks
 * name the same field and both values. What may differ (kernel, threads) does not matter. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

#define RANKS 3

#define CHANGE(name, statement)                                                                                                \
    static void change_##name(test_case *c) { statement; }

CHANGE(dtype, c->desc.dtype = RA_BF16)
CHANGE(batch, c->desc.batch = 2)
CHANGE(seq_q, c->desc.seq_q = 15)
CHANGE(seq_k, c->desc.seq_k = 17)
CHANGE(heads, c->desc.heads = 8)
CHANGE(kv_heads, c->desc.kv_heads = 2)
CHANGE(head_dim, c->desc.head_dim = 4)
CHANGE(segments, c->segment_lengths[1] = 7)
CHANGE(rates, c->dilation_rates[0] = 3)
CHANGE(branches, c->desc.branches = 1)
CHANGE(combine, c->desc.combine = RA_COMBINE_MIX)
CHANGE(offset, c->desc.offset = RA_OFFSET_HEAD)
CHANGE(dilate, c->desc.dilate_queries = false)
CHANGE(causal, c->desc.causal = true)
CHANGE(left, c->desc.window_left = 3)
CHANGE(right, c->desc.window_right = 3)
CHANGE(key_begin, c->key_begin[0] = 2)
CHANGE(key_end, c->key_end[0] = 15)
CHANGE(key_range, c->key_range = false)
CHANGE(scale, c->desc.scale = 0.5000001)
CHANGE(dropout, c->desc.dropout = 0.1)
CHANGE(seed, c->desc.seed = 5)
CHANGE(layout, c->desc.layout = RA_LAYOUT_STRIPED)
CHANGE(placement, c->desc.query_placement = RA_REPLICATED)
CHANGE(schedule, c->desc.schedule = RA_SCHEDULE_GATHER)
CHANGE(bucket, c->desc.bucket = 3)
CHANGE(limit, c->desc.memory_limit = 1 << 30)
CHANGE(checksum, c->desc.checksum = true)

static const struct change {
    const char *field;
    void (*change)(test_case *c);
} changes[] = {
    {"dtype", change_dtype},           {"batch", change_batch},
    {"seq_q", change_seq_q},           {"seq_k", change_seq_k},
    {"heads", change_heads},           {"kv_heads", change_kv_heads},
    {"head_dim", change_head_dim},     {"segment_lengths", change_segments},
    {"dilation_rates", change_rates},  {"segment_lengths", change_branches},
    {"combine", change_combine},       {"offset", change_offset},
    {"dilate_queries", change_dilate}, {"window_right", change_causal},
    {"window_left", change_left},      {"window_right", change_right},
    {"key_begin", change_key_begin},   {"key_end", change_key_end},
    {"key_begin", change_key_range},   {"scale", change_scale},
    {"dropout", change_dropout},       {"seed", change_seed},
    {"layout", change_layout},         {"schedule", change_schedule},
    {"bucket", change_bucket},         {"memory_limit", change_limit},
    {"checksum", change_checksum},
};

static void common_case(test_case *c) {
    test_case_init(c);
    c->desc.heads = c->desc.kv_heads = 4;
    c->desc.branches = 2;
    c->segment_lengths[0] = 8;
    c->segment_lengths[1] = 6;
    c->dilation_rates[0] = 1;
    c->dilation_rates[1] = 2;
    c->key_range = true;
    for (int64_t b = 0; b < TEST_MAX_BATCH; b++) c->key_end[b] = 16;
    c->desc.scale = 0.5;
    c->ranks = RANKS;
    test_case_link(c);
}

typedef struct vote {
    test_ring ring;
    bool forward;
    test_case rank[RANKS];
    ra_status status[RANKS];
    char error[RANKS][512];
} vote;

static void vote_work(void *arg, int rank) {
    vote *v = arg;
    ra_plan *plan = NULL;
    v->status[rank] = ra_plan_create(v->ring.comms[rank], &v->rank[rank].desc, &plan);
    if (v->status[rank] == RA_OK && v->forward) { /* with replicated queries ranks agree when they merge */
        const ra_attention_desc *desc = &v->rank[rank].desc;
        ra_shard q, k;
        v->status[rank] = ra_shard_rows(desc, rank, RANKS, &q, &k);
        float *memory = calloc(4 * 16 * 8 * 16, sizeof *memory), *next = memory;
        ra_forward_args args = {.q = ra_tensor_bnhd(next, q.count, desc->heads, desc->head_dim)};
        args.out = ra_tensor_bnhd(next += 16 * 8 * 16, q.count, desc->heads, desc->head_dim);
        args.k = ra_tensor_bnhd(next += 16 * 8 * 16, k.count, desc->kv_heads, desc->head_dim);
        args.v = ra_tensor_bnhd(next + 16 * 8 * 16, k.count, desc->kv_heads, desc->head_dim);
        if (v->status[rank] == RA_OK) v->status[rank] = memory ? ra_forward(plan, &args) : RA_NOMEM;
        free(memory);
    }
    strncpy(v->error[rank], v->status[rank] == RA_OK ? "" : ra_last_error(), sizeof v->error[rank] - 1);
    ra_plan_destroy(plan);
}

static void vote_run(vote *v) {
    memset(v->error, 0, sizeof v->error);
    test_ring_open(&v->ring, RANKS, TEST_THREADS);
    test_watch(&v->rank[0]);
    test_ring_each(&v->ring, vote_work, v);
    test_unwatch();
    test_ring_close(&v->ring);
}

static void every_field_on_every_rank_is_found_and_named_by_all(void **state) {
    (void)state;
    static vote v;
    for (size_t n = 0; n < sizeof changes / sizeof *changes; n++) {
        for (int odd = 0; odd < RANKS; odd++) {
            for (int rank = 0; rank < RANKS; rank++) common_case(&v.rank[rank]);
            changes[n].change(&v.rank[odd]);
            test_case_link(&v.rank[odd]);
            vote_run(&v);
            for (int rank = 0; rank < RANKS; rank++) {
                if (v.status[rank] != RA_DISAGREE || !strstr(v.error[rank], changes[n].field)) {
                    fail_msg("%s differs on rank %d, but rank %d says %s: %s", changes[n].field, odd, rank,
                             ra_status_name(v.status[rank]), v.error[rank]);
                }
                assert_string_equal(v.error[rank], v.error[0]);
                char name[16];
                snprintf(name, sizeof name, "rank %d", odd == 0 ? 1 : odd);
                assert_non_null(strstr(v.error[rank], "rank 0"));
                assert_non_null(strstr(v.error[rank], name));
            }
        }
    }
    print_message("%zu fields on %d ranks\n", sizeof changes / sizeof *changes, RANKS);
}

static void ranks_that_differ_in_query_placement_do_not_wait_for_ever(void **state) {
    (void)state;
    static vote v;
    v.forward = true;
    for (int odd = 0; odd < RANKS; odd++) {
        for (int rank = 0; rank < RANKS; rank++) common_case(&v.rank[rank]);
        change_placement(&v.rank[odd]);
        vote_run(&v);
        bool named = false;
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_not_equal(v.status[rank], RA_OK);
            named |= v.status[rank] == RA_DISAGREE && strstr(v.error[rank], "query_placement");
        }
        assert_true(named);
    }
}

static void replicated_ranks_that_disagree_are_found_when_they_merge(void **state) {
    (void)state;
    static vote v;
    v.forward = true;
    for (int odd = 0; odd < RANKS; odd++) {
        for (int rank = 0; rank < RANKS; rank++) {
            common_case(&v.rank[rank]);
            change_placement(&v.rank[rank]);
        }
        change_seed(&v.rank[odd]);
        vote_run(&v);
        bool named = false;
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_not_equal(v.status[rank], RA_OK);
            named |= v.status[rank] == RA_DISAGREE && strstr(v.error[rank], "seed");
        }
        assert_true(named);
    }
}

static void kernel_and_threads_are_each_rank_s_own(void **state) {
    (void)state;
    static vote v;
    for (int rank = 0; rank < RANKS; rank++) common_case(&v.rank[rank]);
    v.rank[0].desc.threads = 2;
    v.rank[1].desc.kernel = "scalar";
    vote_run(&v);
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(v.status[rank], RA_OK);
}

/* One rank's descriptor is bad: it says what is wrong, and the others are told instead of left waiting. */
static void a_bad_descriptor_on_one_rank_ends_the_call_on_all(void **state) {
    (void)state;
    static vote v;
    for (int odd = 0; odd < RANKS; odd++) {
        for (int rank = 0; rank < RANKS; rank++) common_case(&v.rank[rank]);
        v.rank[odd].desc.head_dim = 1000;
        vote_run(&v);
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_equal(v.status[rank], RA_INVALID);
            assert_non_null(strstr(v.error[rank], "head_dim"));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_field_on_every_rank_is_found_and_named_by_all),
        cmocka_unit_test(replicated_ranks_that_disagree_are_found_when_they_merge),
        cmocka_unit_test(kernel_and_threads_are_each_rank_s_own),
        cmocka_unit_test(a_bad_descriptor_on_one_rank_ends_the_call_on_all),
        cmocka_unit_test(ranks_that_differ_in_query_placement_do_not_wait_for_ever),
    };
    return cmocka_run_group_tests_name("disagreement", tests, NULL, NULL);
}
