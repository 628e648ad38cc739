/* The reference itself: small patterns written out by hand, the dropout generator against published numbers, and its gradient
 * against finite differences of its own forward. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

/* The pattern of one head and branch as text: a line a query, '#' where the pair is attended. */
static const char *pattern(const test_case *c, int64_t head, int64_t branch, char *text) {
    char *next = text;
    for (int64_t i = 0; i < c->desc.seq_q; i++) {
        for (int64_t y = 0; y < c->desc.seq_k; y++) *next++ = ref_attended(&c->desc, 0, i, y, head, branch) ? '#' : '.';
        *next++ = '\n';
    }
    *next = 0;
    return text;
}

static void branches(test_case *c, int64_t seq, int64_t count, const int64_t *w, const int64_t *r) {
    test_case_init(c);
    c->desc.seq_q = c->desc.seq_k = seq;
    c->desc.branches = count;
    memcpy(c->segment_lengths, w, (size_t)count * sizeof *w);
    memcpy(c->dilation_rates, r, (size_t)count * sizeof *r);
    test_case_link(c);
}

static void a_dilated_segment_is_a_lattice_with_holes(void **state) {
    (void)state;
    test_case c;
    char text[512];
    branches(&c, 7, 1, (int64_t[]){4}, (int64_t[]){2});
    assert_string_equal(pattern(&c, 0, 0, text), "#.#....\n.......\n#.#....\n.......\n....#.#\n.......\n....#.#\n");
    c.desc.dilate_queries = false;
    assert_string_equal(pattern(&c, 0, 0, text), "#.#....\n#.#....\n#.#....\n#.#....\n....#.#\n....#.#\n....#.#\n");
    c.desc.causal = true;
    assert_string_equal(pattern(&c, 0, 0, text), "#......\n#......\n#.#....\n#.#....\n....#..\n....#..\n....#.#\n");
    c.desc.offset = RA_OFFSET_RESIDUE;
    assert_string_equal(pattern(&c, 0, 0, text), "#......\n.#.....\n#.#....\n.#.#...\n....#..\n.....#.\n....#.#\n");
}

static void the_last_query_meets_the_last_key(void **state) {
    (void)state;
    test_case c;
    char text[512];
    branches(&c, 5, 1, (int64_t[]){0}, (int64_t[]){1});
    c.desc.causal = true;
    c.desc.seq_q = 2;
    assert_string_equal(pattern(&c, 0, 0, text), "####.\n#####\n");
    c.desc.seq_q = 7; /* positions -2 .. 4 */
    assert_string_equal(pattern(&c, 0, 0, text), ".....\n.....\n#....\n##...\n###..\n####.\n#####\n");
    c.desc.causal = false;
    c.desc.window_left = c.desc.window_right = 1;
    assert_string_equal(pattern(&c, 0, 0, text), ".....\n#....\n##...\n###..\n.###.\n..###\n...##\n");
    c.segment_lengths[0] = 3; /* a query before the first key has no segment */
    c.desc.window_left = c.desc.window_right = -1;
    assert_string_equal(pattern(&c, 0, 0, text), ".....\n.....\n###..\n###..\n###..\n...##\n...##\n");
}

static void offsets_follow_branch_head_or_head_block(void **state) {
    (void)state;
    test_case c;
    branches(&c, 8, 2, (int64_t[]){8, 8}, (int64_t[]){1, 3});
    c.desc.combine = RA_COMBINE_MIX;
    c.desc.kv_heads = 5;
    c.desc.heads = 10;
    /* The first key that query 0 .. 7 reads on branch 1 is its offset. */
    static const struct {
        ra_offset offset;
        int64_t want[5];
    } table[] = {
        {RA_OFFSET_BRANCH, {1, 1, 1, 1, 1}}, {RA_OFFSET_HEAD, {0, 1, 2, 0, 1}}, {RA_OFFSET_HEAD_BLOCK, {0, 0, 1, 1, 2}}};
    c.desc.dilate_queries = false;
    for (size_t n = 0; n < 3; n++) {
        c.desc.offset = table[n].offset;
        for (int64_t head = 0; head < 10; head++) {
            int64_t first = 0;
            while (!ref_attended(&c.desc, 0, 0, first, head, 1)) first++;
            assert_int_equal(first, table[n].want[head / 2]);
        }
    }
}

static void heads_are_dealt_to_branches_larger_groups_first(void **state) {
    (void)state;
    test_case c;
    branches(&c, 4, 3, (int64_t[]){4, 4, 4}, (int64_t[]){1, 1, 1});
    c.desc.heads = 16;
    c.desc.kv_heads = 8;
    static const int64_t want[8] = {0, 0, 0, 1, 1, 1, 2, 2};
    for (int64_t head = 0; head < 16; head++) {
        for (int64_t branch = 0; branch < 3; branch++) {
            assert_int_equal(ref_attended(&c.desc, 0, 0, 0, head, branch), want[head / 2] == branch);
        }
    }
}

/* Counter 0, key 0 of Philox4x32-10, as its authors publish it: 6627e8d5 e169c58d bc57ac4c 9b00dbd8. */
static void dropout_draws_are_philox(void **state) {
    (void)state;
    static const uint32_t words[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    test_case c;
    test_case_init(&c);
    for (int64_t y = 0; y < 4; y++) {
        c.desc.dropout = (double)words[y] / 4294967296.0;
        assert_true(ref_kept(&c.desc, 0, 0, y, 0, 0));
        c.desc.dropout = (double)(words[y] + 1.0) / 4294967296.0;
        assert_false(ref_kept(&c.desc, 0, 0, y, 0, 0));
    }
}

static void hulls_hold_every_pair(void **state) {
    (void)state;
    test_rng rng = {test_seed(11)};
    for (int n = 0; n < 200; n++) {
        test_case c;
        test_case_random(&c, &rng, 24, 1);
        for (int64_t i = 0; i < c.desc.seq_q && c.desc.batch; i++) {
            for (int64_t y = 0; y < c.desc.seq_k; y++) {
                for (int64_t branch = 0; branch < ref_branches(&c.desc); branch++) {
                    if (!ref_attended(&c.desc, 0, i, y, 0, branch)) continue;
                    int64_t lo, hi;
                    ref_key_hull(&c.desc, i, branch, &lo, &hi);
                    assert_true(lo <= y && y < hi);
                    ref_query_hull(&c.desc, y, branch, &lo, &hi);
                    assert_true(lo <= i && i < hi);
                }
            }
        }
    }
}

/* loss = sum(out * dout) + sum(lse * dlse), rows without keys left out */
static double loss(const test_case *c, const test_data *data) {
    ref_inputs inputs = test_inputs(c, data);
    ref_outputs outputs;
    assert_true(ref_outputs_alloc(&c->desc, c->desc.seq_q, c->desc.seq_k, false, &outputs));
    assert_true(ref_forward(&c->desc, &inputs, &outputs));
    int64_t rows = c->desc.batch * c->desc.seq_q * c->desc.heads;
    double sum = 0;
    for (int64_t n = 0; n < rows * c->desc.head_dim; n++) sum += outputs.out[n] * data->dout[n];
    for (int64_t n = 0; n < rows && c->dlse; n++) sum += isfinite(outputs.lse[n]) ? outputs.lse[n] * data->dlse[n] : 0;
    ref_outputs_free(&outputs);
    return sum;
}

static void slopes_match(const test_case *c, const test_data *data, double *array, const double *gradient, int64_t count) {
    for (int64_t n = 0; n < count; n += 1 + count / 7) {
        double kept = array[n], step = 1e-5;
        array[n] = kept + step;
        double up = loss(c, data);
        array[n] = kept - step;
        double down = loss(c, data);
        array[n] = kept;
        double slope = (up - down) / (2 * step);
        if (fabs(slope - gradient[n]) > 1e-7 * (1 + fabs(slope))) fail_msg("slope %g, gradient %g", slope, gradient[n]);
    }
}

static void gradients_are_the_slopes_of_forward(void **state) {
    (void)state;
    test_rng rng = {test_seed(12)};
    for (int n = 0; n < 40; n++) {
        test_case c;
        test_case_random(&c, &rng, 12, 1);
        c.desc.dtype = RA_F64;
        c.amplitude = 1;
        test_data data = test_data_create(&c);
        ref_inputs inputs = test_inputs(&c, &data);
        ref_outputs outputs;
        assert_true(ref_outputs_alloc(&c.desc, c.desc.seq_q, c.desc.seq_k, true, &outputs));
        assert_true(ref_backward(&c.desc, &inputs, &outputs));
        int64_t queries = c.desc.batch * c.desc.seq_q * c.desc.heads * c.desc.head_dim;
        int64_t keys = c.desc.batch * c.desc.seq_k * c.desc.kv_heads * c.desc.head_dim;
        slopes_match(&c, &data, data.q, outputs.dq, queries);
        slopes_match(&c, &data, data.k, outputs.dk, keys);
        slopes_match(&c, &data, data.v, outputs.dv, keys);
        ref_outputs_free(&outputs);
        test_data_free(&data);
    }
}

static void sampled_rows_equal_the_whole(void **state) {
    (void)state;
    test_rng rng = {test_seed(13)};
    for (int n = 0; n < 40; n++) {
        test_case c;
        test_case_random(&c, &rng, 20, 1);
        if (c.desc.seq_q == 0 || c.desc.seq_k == 0) continue;
        test_data data = test_data_create(&c);
        ref_inputs inputs = test_inputs(&c, &data);
        ref_outputs whole, sample;
        int64_t queries[2] = {c.desc.seq_q - 1, rng_below(&rng, c.desc.seq_q)}, hq = c.desc.heads, dim = c.desc.head_dim;
        int64_t keys[2] = {c.desc.seq_k - 1, rng_below(&rng, c.desc.seq_k)}, hk = c.desc.kv_heads;
        assert_true(ref_outputs_alloc(&c.desc, c.desc.seq_q, c.desc.seq_k, true, &whole));
        assert_true(ref_outputs_alloc(&c.desc, 2, 2, true, &sample));
        assert_true(ref_backward(&c.desc, &inputs, &whole));
        assert_true(ref_query_rows(&c.desc, &inputs, queries, 2, true, &sample));
        assert_true(ref_key_rows(&c.desc, &inputs, keys, 2, &sample));
        for (int64_t b = 0; b < c.desc.batch; b++) {
            for (int64_t s = 0; s < 2; s++) {
                size_t q_bytes = (size_t)(hq * dim) * sizeof(double);
                assert_memory_equal(sample.out + (b * 2 + s) * hq * dim, whole.out + (b * c.desc.seq_q + queries[s]) * hq * dim,
                                    q_bytes);
                assert_memory_equal(sample.dq + (b * 2 + s) * hq * dim, whole.dq + (b * c.desc.seq_q + queries[s]) * hq * dim,
                                    q_bytes);
                for (int64_t head = 0; head < hq; head++) {
                    assert_true(sample.lse[(b * hq + head) * 2 + s] == whole.lse[(b * hq + head) * c.desc.seq_q + queries[s]]);
                }
                size_t k_bytes = (size_t)(hk * dim) * sizeof(double);
                assert_memory_equal(sample.dk + (b * 2 + s) * hk * dim, whole.dk + (b * c.desc.seq_k + keys[s]) * hk * dim,
                                    k_bytes);
                assert_memory_equal(sample.dv + (b * 2 + s) * hk * dim, whole.dv + (b * c.desc.seq_k + keys[s]) * hk * dim,
                                    k_bytes);
            }
        }
        ref_outputs_free(&whole);
        ref_outputs_free(&sample);
        test_data_free(&data);
    }
}

static void rounding_is_to_nearest_even(void **state) {
    (void)state;
    assert_true(test_round(RA_F16, 65519) == 65504);
    assert_true(isinf(test_round(RA_F16, 65520)));
    assert_true(test_round(RA_F16, 1 + 0x1p-11) == 1);
    assert_true(test_round(RA_F16, 1 + 3 * 0x1p-11) == 1 + 0x1p-9);
    assert_true(test_round(RA_F16, 0x1p-25) == 0);
    assert_true(test_round(RA_F16, 3 * 0x1p-25) == 0x1p-23);
    assert_true(test_round(RA_BF16, 1 + 0x1p-8) == 1);
    assert_true(test_round(RA_BF16, 1 + 3 * 0x1p-8) == 1 + 0x1p-6);
    uint16_t half;
    for (unsigned bits = 0; bits < 0x7c00; bits++) {
        half = (uint16_t)bits;
        double value = test_load(RA_F16, &half, 0);
        assert_true(test_round(RA_F16, value) == value);
        uint16_t again = 0;
        test_store(RA_F16, &again, 0, value);
        assert_int_equal(again, half);
    }
}

static void errors_are_seen(void **state) {
    (void)state;
    double want[3] = {1, 0, -2}, m[3] = {4, 0, 2};
    double near[3] = {1 + 4e-6, 0, -2}, not_zero[3] = {1, 1e-30, -2}, nan[3] = {1, 0, NAN};
    assert_true(fabs(ref_compare(near, want, m, 3, RA_F32).ratio - 1e-6) < 1e-9);
    assert_true(isinf(ref_compare(not_zero, want, m, 3, RA_F32).ratio));
    assert_true(isinf(ref_compare(nan, want, m, 3, RA_F32).ratio));
    assert_true(ref_compare(want, want, m, 3, RA_F32).ratio == 0);
    double hole[1] = {-INFINITY}, low[1] = {-1e30}, none[1] = {0};
    assert_true(ref_compare_lse(hole, hole, none, 1).ratio == 0);
    assert_true(isinf(ref_compare_lse(low, hole, none, 1).ratio));
    assert_true(isinf(ref_compare_lse(hole, low, m, 1).ratio));
    double large[1] = {70000}, infinite[1] = {INFINITY}, most[1] = {65504};
    assert_true(ref_compare(infinite, large, m, 1, RA_F16).ratio == 0);
    assert_true(isinf(ref_compare(most, large, m, 1, RA_F16).ratio));
    assert_true(isinf(ref_compare(infinite, large, m, 1, RA_BF16).ratio));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_dilated_segment_is_a_lattice_with_holes),
        cmocka_unit_test(the_last_query_meets_the_last_key),
        cmocka_unit_test(offsets_follow_branch_head_or_head_block),
        cmocka_unit_test(heads_are_dealt_to_branches_larger_groups_first),
        cmocka_unit_test(dropout_draws_are_philox),
        cmocka_unit_test(hulls_hold_every_pair),
        cmocka_unit_test(gradients_are_the_slopes_of_forward),
        cmocka_unit_test(sampled_rows_equal_the_whole),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(errors_are_seen),
    };
    return cmocka_run_group_tests_name("reference", tests, NULL, NULL);
}
