/* Inputs with exact answers, holes, and poison: mistakes of an index show as wrong keys, not as small errors. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

/* How often query i and head meet key y, over all branches. */
static int64_t multiplicity(const ra_attention_desc *desc, int64_t b, int64_t i, int64_t y, int64_t head) {
    int64_t count = 0;
    for (int64_t branch = 0; branch < ref_branches(desc); branch++) count += ref_attended(desc, b, i, y, head, branch);
    return count;
}

/* q = 0 and v[y] = the unit vector y: out[i][y] is the share of key y among the keys of i, so out is the list of what was
 * read. */
static void q_zero_and_unit_v_name_every_key_that_is_read(void **state) {
    (void)state;
    test_rng rng = {test_seed(21)};
    for (int64_t n = test_cases(250, 4000); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, 40, 8);
        ra_attention_desc *desc = &c.desc;
        if (desc->seq_k == 0) continue;
        desc->head_dim = desc->seq_k;
        desc->dropout = 0;
        c.backward = false;
        test_data data = test_data_create(&c);
        memset(data.q, 0, (size_t)(desc->batch * desc->seq_q * desc->heads * desc->head_dim) * sizeof *data.q);
        for (int64_t b = 0; b < desc->batch; b++) {
            for (int64_t y = 0; y < desc->seq_k; y++) {
                for (int64_t e = 0; e < desc->kv_heads * desc->head_dim; e++) {
                    data.v[(b * desc->seq_k + y) * desc->kv_heads * desc->head_dim + e] = e % desc->head_dim == y;
                }
            }
        }
        test_result result = test_run(&c, &data);
        char text[2048];
        if (result.status != RA_OK) fail_msg("%s: %s", test_case_text(&c, text, sizeof text), result.error);
        const double bound = ref_bound(desc->dtype, true, 0); /* AMX's exponential of 0 is not quite 1 for 16-bit types */
        for (int64_t b = 0; b < desc->batch; b++) {
            for (int64_t i = 0; i < desc->seq_q; i++) {
                for (int64_t head = 0; head < desc->heads; head++) {
                    int64_t total = 0;
                    for (int64_t y = 0; y < desc->seq_k; y++) total += multiplicity(desc, b, i, y, head);
                    double lse = result.lse[(b * desc->heads + head) * desc->seq_q + i];
                    if (total ? !(fabs(lse - log((double)total)) <= bound) : !(lse == -INFINITY)) {
                        fail_msg("%s\nquery %lld of head %lld has %lld keys, but lse %.9g",
                                 test_case_text(&c, text, sizeof text), (long long)i, (long long)head, (long long)total, lse);
                    }
                    for (int64_t y = 0; y < desc->seq_k; y++) {
                        double out = result.out[((b * desc->seq_q + i) * desc->heads + head) * desc->head_dim + y];
                        int64_t times = multiplicity(desc, b, i, y, head);
                        double share = times ? (double)times / (double)total : 0;
                        if (times ? fabs(out - test_round(desc->dtype, share)) > share * 4e-3 : out != 0) {
                            fail_msg("%s\nquery %lld of head %lld meets key %lld %lld times, but its share is %.9g of 1/%lld",
                                     test_case_text(&c, text, sizeof text), (long long)i, (long long)head, (long long)y,
                                     (long long)times, out, (long long)total);
                        }
                    }
                }
            }
        }
        test_result_free(&result);
        test_data_free(&data);
    }
}

static void rows_without_keys_are_zero_and_minus_infinity(void **state) {
    (void)state;
    int64_t holes = 0;
    for (int ranks = 1; ranks <= 5; ranks++) {
        for (int layout = 0; layout < 3; layout++) {
            test_case c;
            test_case_init(&c);
            c.ranks = ranks;
            c.desc.layout = (ra_layout)layout;
            c.desc.seq_q = c.desc.seq_k = 29;
            c.desc.branches = 1;
            c.segment_lengths[0] = 7;
            c.dilation_rates[0] = 3;
            test_case_link(&c);
            test_data data = test_data_create(&c);
            test_result result = test_run(&c, &data);
            assert_int_equal(result.status, RA_OK);
            for (int64_t i = 0; i < 29; i++) {
                bool hole = i % 7 % 3 != 0;
                for (int64_t head = 0; head < 2; head++) {
                    double lse = result.lse[head * 29 + i];
                    assert_true(hole ? lse == -INFINITY : isfinite(lse));
                    for (int64_t d = 0; hole && d < 8; d++) {
                        assert_true(result.out[(i * 2 + head) * 8 + d] == 0);
                        assert_true(result.dq[(i * 2 + head) * 8 + d] == 0);
                        assert_true(result.dk[(i * 2 + head) * 8 + d] == 0); /* off the lattice: nobody's key either */
                        assert_true(result.dv[(i * 2 + head) * 8 + d] == 0);
                    }
                    holes += hole;
                }
            }
            test_result_free(&result);
            test_data_free(&data);
        }
    }
    assert_true(holes > 0);
}

static void draw_any(test_case *c, test_rng *rng, int64_t n) { test_case_random(c, rng, n % 8 ? 40 : 140, 8); }

static void a_nan_in_an_unread_row_never_reaches_a_result(void **state) {
    (void)state;
    int64_t poisoned = test_poisoned_cases_hold(22, 300, 5000, draw_any);
    assert_true(poisoned > 1000);
    print_message("%lld rows poisoned\n", (long long)poisoned);
}

/* A NaN in a row that some queries read and others are masked from: exactly the readers get it. */
static void a_nan_reaches_exactly_those_who_read_it(void **state) {
    (void)state;
    test_rng rng = {test_seed(23)};
    for (int64_t n = test_cases(200, 3000); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, n % 8 ? 40 : 140, 6);
        ra_attention_desc *desc = &c.desc;
        if (desc->seq_k == 0 || desc->batch == 0) continue;
        desc->dropout = 0; /* a dropped NaN is nobody's business */
        desc->causal = rng_chance(&rng, 70);
        test_data data = test_data_create(&c);
        for (int64_t times = 1 + rng_below(&rng, 2); times > 0; times--) {
            int64_t row = rng_below(&rng, desc->batch * desc->seq_k * desc->kv_heads);
            double *array = rng_chance(&rng, 50) ? data.k : data.v;
            array[row * desc->head_dim + rng_below(&rng, desc->head_dim)] = NAN;
        }
        test_data_holds(&c, &data);
        test_data_free(&data);
    }
}

static void a_row_whose_every_score_is_minus_infinity_is_a_hole(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int causal = 0; causal < 2; causal++) {
            test_case c;
            test_case_init(&c);
            c.ranks = ranks;
            c.desc.causal = causal;
            c.desc.heads = c.desc.kv_heads = 1;
            test_case_link(&c);
            test_data data = test_data_create(&c);
            /* Keys 0 .. 4 score -inf against everyone. With causal, queries 0 .. 4 see nothing else. */
            for (int64_t i = 0; i < 16; i++) data.q[i * 8] = 1;
            for (int64_t y = 0; y < (causal ? 5 : 16); y++) data.k[y * 8] = -INFINITY;
            test_result result = test_run(&c, &data);
            assert_int_equal(result.status, RA_OK);
            for (int64_t i = 0; i < (causal ? 5 : 16); i++) {
                assert_true(result.lse[i] == -INFINITY);
                for (int64_t d = 0; d < 8; d++) {
                    assert_true(result.out[i * 8 + d] == 0);
                    assert_true(result.dq[i * 8 + d] == 0);
                }
            }
            for (int64_t y = 0; y < 5; y++) {
                for (int64_t d = 0; d < 8; d++) {
                    assert_true(result.dv[y * 8 + d] == 0);
                    assert_true(result.dk[y * 8 + d] == 0);
                }
            }
            for (int64_t i = 5; causal && i < 16; i++) assert_true(isfinite(result.lse[i]));
            test_result_free(&result);
            test_data_free(&data);
        }
    }
}

static void scores_of_thousands_neither_overflow_nor_vanish(void **state) {
    (void)state;
    test_rng rng = {test_seed(24)};
    for (int64_t n = 0; n < 20; n++) {
        test_case c;
        test_case_random(&c, &rng, 40, 4);
        c.desc.dtype = n % 2 ? RA_F64 : RA_F32;
        c.desc.dropout = 0;
        c.desc.scale = 1000;
        c.backward = false;
        test_data data = test_data_create(&c);
        test_result result = test_run(&c, &data);
        assert_int_equal(result.status, RA_OK);
        ref_inputs inputs = test_inputs(&c, &data);
        ref_outputs want;
        assert_true(ref_outputs_alloc(&c.desc, c.desc.seq_q, c.desc.seq_k, false, &want));
        assert_true(ref_forward(&c.desc, &inputs, &want));
        int64_t rows = c.desc.batch * c.desc.seq_q * c.desc.heads;
        assert_true(ref_compare_lse(result.lse, want.lse, want.m_lse, rows).ratio < 1e-6);
        /* A score of thousands in f32 is known to 1e-4 at best, and so is P. */
        assert_true(ref_compare(result.out, want.out, want.m_out, rows * c.desc.head_dim, c.desc.dtype).ratio < 5e-3);
        ref_outputs_free(&want);
        test_result_free(&result);
        test_data_free(&data);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(q_zero_and_unit_v_name_every_key_that_is_read),
        cmocka_unit_test(rows_without_keys_are_zero_and_minus_infinity),
        cmocka_unit_test(a_nan_in_an_unread_row_never_reaches_a_result),
        cmocka_unit_test(a_nan_reaches_exactly_those_who_read_it),
        cmocka_unit_test(a_row_whose_every_score_is_minus_infinity_is_a_hole),
        cmocka_unit_test(scores_of_thousands_neither_overflow_nor_vanish),
    };
    return cmocka_run_group_tests_name("exact answers", tests, NULL, NULL);
}
