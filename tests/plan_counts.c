/* What the plan says without running: pairs and holes of each rank, bytes against closed formulas, items that do not grow with
 * n. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

static ra_rank_summary summary(const test_case *c, int rank) {
    ra_rank_summary s = {.struct_size = sizeof s};
    ra_status status = ra_plan_summary(&c->desc, rank, c->ranks, &s);
    char text[2048];
    if (status != RA_OK) fail_msg("%s: %s", test_case_text(c, text, sizeof text), ra_last_error());
    return s;
}

static bool holds_row(const ra_shard *shard, int64_t x) {
    for (int part = 0; part < 2; part++) {
        const ra_rows *rows = &shard->rows[part];
        if (rows->count && x >= rows->start && (x - rows->start) % rows->step == 0 &&
            (x - rows->start) / rows->step < rows->count)
            return true;
    }
    return false;
}

static void pairs_and_holes_of_each_rank_are_those_of_its_queries(void **state) {
    (void)state;
    test_rng rng = {test_seed(51)};
    int64_t total_pairs = 0, total_holes = 0;
    for (int64_t n = test_cases(400, 6000); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, n % 10 ? 40 : 120, 12);
        const ra_attention_desc *desc = &c.desc;
        for (int rank = 0; rank < c.ranks; rank++) {
            ra_shard queries, keys;
            assert_int_equal(ra_shard_rows(desc, rank, c.ranks, &queries, &keys), RA_OK);
            int64_t pairs = 0, holes = 0;
            for (int64_t b = 0; b < desc->batch; b++) {
                for (int64_t i = 0; i < desc->seq_q; i++) {
                    if (!holds_row(&queries, i)) continue;
                    for (int64_t head = 0; head < desc->heads; head++) {
                        int64_t mine = 0;
                        for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
                            for (int64_t y = 0; y < desc->seq_k; y++) mine += ref_attended(desc, b, i, y, head, branch);
                        }
                        pairs += mine;
                        holes += mine == 0;
                    }
                }
            }
            ra_rank_summary s = summary(&c, rank);
            char text[2048];
            if (s.pairs != pairs || s.holes != holes) {
                fail_msg("rank %d has %lld pairs and %lld holes, the plan says %lld and %lld\n%s", rank, (long long)pairs,
                         (long long)holes, (long long)s.pairs, (long long)s.holes, test_case_text(&c, text, sizeof text));
            }
            assert_int_equal(s.rank, rank);
            assert_int_equal(s.rows_q, queries.count);
            assert_int_equal(s.rows_k, keys.count);
            int64_t kv_row = desc->kv_heads * desc->head_dim * (int64_t)ra_dtype_size(desc->dtype) * desc->batch;
            int64_t q_row = desc->heads * desc->head_dim * (int64_t)ra_dtype_size(desc->dtype) * desc->batch;
            int64_t lse_row = desc->heads * (desc->dtype == RA_F64 ? 8 : 4) * desc->batch;
            assert_int_equal(s.shard_bytes, queries.count * (2 * q_row + lse_row) + keys.count * 2 * kv_row);
            assert_int_equal(s.shard_bytes_backward, queries.count * 2 * q_row + keys.count * 2 * kv_row);
            total_pairs += pairs;
            total_holes += holes;
        }
    }
    assert_true(total_pairs > 0 && total_holes > 0);
}

/* At sizes that no list could hold: dense causal over n = 10^9 has n (n + 1) / 2 pairs a head, whoever counts. */
static void pairs_of_a_billion_tokens_add_up(void **state) {
    (void)state;
    static const int64_t n = 1000000000;
    for (int layout = 0; layout < 3; layout++) {
        test_case c;
        test_case_init(&c);
        c.ranks = 64;
        c.desc.layout = (ra_layout)layout;
        c.desc.seq_q = c.desc.seq_k = n;
        c.desc.causal = true;
        int64_t pairs = 0, holes = 0, rows = 0;
        for (int rank = 0; rank < 64; rank++) {
            ra_rank_summary s = summary(&c, rank);
            pairs += s.pairs;
            holes += s.holes;
            rows += s.rows_q;
        }
        assert_true(pairs == n * (n + 1) / 2 * c.desc.heads);
        assert_int_equal(holes, 0);
        assert_int_equal(rows, n);

        /* Segments of 2047 at rate 4 with offset 0: 512 lattice points each (511.75 rounded up), the last segment short. */
        c.desc.causal = false;
        c.desc.branches = 1;
        c.segment_lengths[0] = 2047;
        c.dilation_rates[0] = 4;
        test_case_link(&c);
        int64_t segments = n / 2047, rest = n % 2047, points = (rest + 3) / 4;
        pairs = holes = 0;
        for (int rank = 0; rank < 64; rank++) {
            ra_rank_summary s = summary(&c, rank);
            pairs += s.pairs;
            holes += s.holes;
        }
        assert_true(pairs == (segments * 512 * 512 + points * points) * c.desc.heads);
        assert_true(holes == (n - segments * 512 - points) * c.desc.heads);
    }
}

/* --------------------------------------------------------------------------------------------------------- bytes */

static void run_and_count(const test_case *c, int64_t *sent, int64_t *sent_backward) {
    test_case counted = *c;
    test_case_link(&counted);
    counted.transport = TEST_CUSTOM;
    test_data data = test_data_create(&counted);
    test_result result = test_run(&counted, &data);
    test_result_holds(&counted, &data, &result); /* plan, ra_stats and the count agree */
    for (int rank = 0; rank < c->ranks; rank++) {
        sent[rank] = result.ranks[rank].bytes_sent;
        sent_backward[rank] = result.ranks[rank].bytes_sent_backward;
    }
    test_result_free(&result);
    test_data_free(&data);
}

static void dense_rings_send_what_the_formula_says(void **state) {
    (void)state;
    static const int64_t buckets[] = {0, 1, 5, 1000};
    for (int ranks = 1; ranks <= 6; ranks++) {
        for (int dtype = 0; dtype < 4; dtype++) {
            test_case c;
            test_case_init(&c);
            c.ranks = ranks;
            c.desc.dtype = (ra_dtype)dtype;
            c.desc.seq_q = c.desc.seq_k = ranks * 7;
            c.desc.heads = 4;
            c.desc.batch = 1 + dtype % 2;
            c.desc.bucket = buckets[dtype];
            int64_t sent[8], backward[8], element = (int64_t)ra_dtype_size(c.desc.dtype), state_size = dtype == RA_F64 ? 8 : 4;
            run_and_count(&c, sent, backward);
            int64_t rows = 2 * (ranks - 1) * 7 * c.desc.kv_heads * c.desc.head_dim * c.desc.batch;
            for (int rank = 0; rank < ranks; rank++) {
                assert_int_equal(sent[rank], rows * element);
                assert_int_equal(backward[rank], rows * (element + state_size));
            }
        }
    }
}

static void segments_inside_a_shard_send_nothing(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 5; ranks++) {
        for (int64_t w = 1; w <= 12; w++) {
            if (12 % w) continue;
            test_case c;
            test_case_init(&c);
            c.ranks = ranks;
            c.desc.seq_q = c.desc.seq_k = 12 * ranks;
            c.desc.branches = 1;
            c.segment_lengths[0] = w;
            c.dilation_rates[0] = 1 + w % 3;
            test_case_link(&c);
            int64_t sent[8], backward[8];
            run_and_count(&c, sent, backward);
            for (int rank = 0; rank < ranks; rank++) {
                assert_int_equal(sent[rank], 0);
                assert_int_equal(backward[rank], 0);
            }
        }
    }
}

/* n/p | w | n and r | n/p: a segment spans m = w / (n/p) whole shards, each with n/(pr) lattice rows. */
static void segments_of_whole_shards_send_what_the_formula_says(void **state) {
    (void)state;
    for (int causal = 0; causal < 2; causal++) {
        for (int64_t span = 1; span <= 4; span++) {
            for (int64_t r = 1; r <= 6; r++) {
                int64_t shard = 12, ranks = 8;
                if (shard % r || ranks % span) continue;
                test_case c;
                test_case_init(&c);
                c.ranks = (int)ranks;
                c.desc.seq_q = c.desc.seq_k = shard * ranks;
                c.desc.branches = 1;
                c.desc.causal = causal;
                c.desc.bucket = r == 2 ? 1 : r == 3 ? 5 : 0;
                c.segment_lengths[0] = shard * span;
                c.dilation_rates[0] = r;
                test_case_link(&c);
                int64_t sent[8], backward[8], total = 0;
                run_and_count(&c, sent, backward);
                int64_t each = 2 * (shard * span - shard) / r * c.desc.kv_heads * c.desc.head_dim * 4;
                for (int rank = 0; rank < ranks; rank++) {
                    if (!causal) assert_int_equal(sent[rank], each); /* all receive the same, so all send it */
                    total += sent[rank];
                }
                assert_int_equal(total, causal ? each * ranks / 2 : each * ranks);
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------ size */

static void a_plan_at_1000_n_has_as_many_items(void **state) {
    (void)state;
    test_rng rng = {test_seed(52)};
    int64_t items = 0;
    for (int64_t n = test_cases(150, 2000); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, 40, 12);
        ra_attention_desc *desc = &c.desc;
        c.key_range = false;
        desc->bucket = 0;
        /* Large enough that every kind of segment is there already; the same remainders at both sizes. */
        int64_t period = c.ranks * 4;
        for (int64_t b = 0; b < desc->branches; b++) {
            c.segment_lengths[b] = rng_chance(&rng, 20) ? 0 : 1 + rng_below(&rng, 30);
            c.dilation_rates[b] = 1 + rng_below(&rng, 6);
            if (c.segment_lengths[b]) period *= c.segment_lengths[b];
        }
        int64_t base = rng_below(&rng, period);
        desc->seq_k = desc->seq_q = base + 3 * period;
        if (desc->window_left >= 0) desc->window_left = rng_below(&rng, 3);
        if (desc->window_right >= 0) desc->window_right = rng_below(&rng, 3);
        test_case_link(&c);
        test_case large = c;
        test_case_link(&large);
        large.desc.seq_k = large.desc.seq_q = base + 3000 * period;
        for (int rank = 0; rank < c.ranks; rank++) {
            int64_t small_items = summary(&c, rank).items, large_items = summary(&large, rank).items;
            char text[2048];
            if (small_items != large_items) {
                fail_msg("rank %d has %lld items at n = %lld but %lld at %lld\n%s", rank, (long long)small_items,
                         (long long)desc->seq_k, (long long)large_items, (long long)large.desc.seq_k,
                         test_case_text(&c, text, sizeof text));
            }
            items += small_items;
        }
    }
    assert_true(items > 0);
}

static void summaries_of_all_ranks_are_those_of_each(void **state) {
    (void)state;
    test_rng rng = {test_seed(53)};
    for (int n = 0; n < 50; n++) {
        test_case c;
        test_case_random(&c, &rng, 60, 9);
        ra_rank_summary all[9];
        memset(all, 0, sizeof all);
        for (int rank = 0; rank < c.ranks; rank++) all[rank].struct_size = sizeof *all;
        assert_int_equal(ra_plan_summaries(&c.desc, c.ranks, all), RA_OK);
        for (int rank = 0; rank < c.ranks; rank++) {
            ra_rank_summary one = summary(&c, rank);
            assert_true(one.pairs == all[rank].pairs && one.holes == all[rank].holes && one.bytes_sent == all[rank].bytes_sent);
            assert_true(one.bytes_sent_backward == all[rank].bytes_sent_backward && one.hops == all[rank].hops);
            assert_true(one.items == all[rank].items && one.workspace_bytes == all[rank].workspace_bytes);
            assert_true(one.rank == rank && all[rank].rank == rank && one.rows_q == all[rank].rows_q);
        }
    }
}

static void more_than_2_to_the_31_is_counted_and_more_than_2_to_the_63_is_not_negative(void **state) {
    (void)state;
    test_case c;
    test_case_init(&c);
    c.ranks = 2;
    c.desc.head_dim = 1;
    c.desc.heads = c.desc.kv_heads = 1;
    c.desc.seq_q = c.desc.seq_k = (int64_t)1 << 33;
    ra_rank_summary s = summary(&c, 0);
    assert_true(s.bytes_sent == 2 * ((int64_t)1 << 32) * 4);
    c.desc.seq_q = c.desc.seq_k = (int64_t)1 << 40; /* 2^80 pairs */
    s = (ra_rank_summary){.struct_size = sizeof s};
    ra_status status = ra_plan_summary(&c.desc, 0, 2, &s);
    assert_true(status == RA_INVALID || (status == RA_OK && s.pairs == INT64_MAX));
}

static void state_rows_of(const test_case *c, int rank, int64_t expected) {
    assert_int_equal(summary(c, rank).state_rows, c->desc.batch * c->desc.heads * expected);
}

/* On a GPU, rows that meet all of their keys at once have none. */
static void rows_of_segments_that_straddle_two_ranks_have_a_state(void **state) {
    (void)state;
    const int64_t segment = 16, rate = 1;
    test_case c = {.ranks = 2};
    ra_attention_desc_init(&c.desc);
    c.desc.batch = 3;
    c.desc.heads = 2;
    c.desc.head_dim = 8;
    c.desc.seq_q = c.desc.seq_k = 40; /* 20 rows a rank */
    state_rows_of(&c, 0, 20);
    c.desc.segment_lengths = &segment;
    c.desc.dilation_rates = &rate;
    c.desc.branches = 1;
    state_rows_of(&c, 0, 4); /* of segment 16 to 31 */
    state_rows_of(&c, 1, 12);
    c.desc.seq_q = c.desc.seq_k = 64;
    state_rows_of(&c, 0, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_and_holes_of_each_rank_are_those_of_its_queries),
        cmocka_unit_test(pairs_of_a_billion_tokens_add_up),
        cmocka_unit_test(dense_rings_send_what_the_formula_says),
        cmocka_unit_test(segments_inside_a_shard_send_nothing),
        cmocka_unit_test(segments_of_whole_shards_send_what_the_formula_says),
        cmocka_unit_test(a_plan_at_1000_n_has_as_many_items),
        cmocka_unit_test(rows_of_segments_that_straddle_two_ranks_have_a_state),
        cmocka_unit_test(summaries_of_all_ranks_are_those_of_each),
        cmocka_unit_test(more_than_2_to_the_31_is_counted_and_more_than_2_to_the_63_is_not_negative),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
