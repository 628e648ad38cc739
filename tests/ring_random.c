/* Random cases of every kind against the reference, forward and backward: all dtypes, transports, strides, kernels. A failure
 * prints its case; RINGATTN_SEED changes the draw and RINGATTN_EFFORT its length. */
#include <stdlib.h>

#include "support.h"

static void draw_any(test_case *c, test_rng *rng, int64_t n) { test_case_random(c, rng, n % 10 ? 40 : 150, 8); }

static void random_cases_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(1, 600, 12000, draw_any);
}

static void random_cases_match_on_each_kernel_of_this_machine(void **state) {
    (void)state;
    ra_kernel_info info;
    int64_t kernels = 0;
    for (int index = 0; ra_kernel_list(index, &info); index++) {
        test_rng rng = {test_seed(2)};
        test_case c;
        test_case_init(&c);
        c.desc.kernel = info.name;
        ra_plan *plan = NULL;
        ra_comm *comm;
        assert_int_equal(ra_comm_self(&comm), RA_OK);
        ra_status status = ra_plan_create(comm, &c.desc, &plan);
        ra_plan_destroy(plan);
        ra_comm_destroy(comm);
        if (!info.available || status == RA_NOT_AVAILABLE) {
            print_message("kernel %s is not available here: %s\n", info.name, info.available ? ra_last_error() : info.reason);
            continue;
        }
        for (int64_t n = test_cases(120, 1500); n > 0; n--) {
            test_case_random(&c, &rng, n % 4 ? 60 : 200, 5);
            c.desc.kernel = info.name;
            if (rng_chance(&rng, 40)) c.desc.head_dim = 8 * (1 + rng_below(&rng, 16));
            if (c.desc.dtype == RA_F64 && rng_chance(&rng, 80)) c.desc.dtype = RA_F32;
            test_data data = test_data_create(&c);
            test_result result = test_run(&c, &data);
            if (result.status != RA_NOT_AVAILABLE) test_result_holds(&c, &data, &result); /* f64 is the scalar kernel's */
            test_result_free(&result);
            test_data_free(&data);
        }
        kernels++;
    }
    assert_true(kernels > 0);
    print_message("%lld kernels\n", (long long)kernels);
}

static void draw_wide(test_case *c, test_rng *rng, int64_t n) {
    static const int64_t dims[] = {65, 80, 96, 100, 127, 128, 129, 160, 192, 255, 256};
    test_case_random(c, rng, 50, 4);
    c->desc.head_dim = dims[n % 11];
}

static void wide_heads_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(3, 33, 330, draw_wide);
}

static void draw_large_ring(test_case *c, test_rng *rng, int64_t n) {
    test_case_random(c, rng, 150, 1);
    c->ranks = n % 3 ? 64 : (int)(9 + rng_below(rng, 50));
    c->transport = n % 2 ? TEST_THREADS : TEST_CUSTOM;
    c->desc.threads = 1;
    if (c->desc.bucket == 1 && c->desc.seq_k > 40) c->desc.bucket = 5;
}

static void rings_of_up_to_64_ranks_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(4, 24, 300, draw_large_ring);
}

static void draw_long(test_case *c, test_rng *rng, int64_t n) {
    (void)n;
    test_case_random(c, rng, 40, 6);
    c->desc.batch = 1;
    c->key_range = false;
    c->desc.seq_k = 300 + rng_below(rng, 700);
    c->desc.seq_q = rng_chance(rng, 70) ? c->desc.seq_k : 300 + rng_below(rng, 400);
    for (int64_t b = 0; b < c->desc.branches; b++) {
        c->segment_lengths[b] = rng_chance(rng, 20) ? 0 : 1 + rng_below(rng, 600);
        c->dilation_rates[b] = 1 + rng_below(rng, 6);
    }
    if (c->desc.bucket == 1) c->desc.bucket = 0;
    test_case_link(c);
}

static void longer_sequences_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(5, 12, 120, draw_long);
}

/* One call, one process; a result without lse. */
static void the_one_call_form_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(6)};
    for (int64_t n = test_cases(20, 200); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, 40, 1);
        c.desc.dtype = RA_F32;
        c.strides = TEST_BNHD;
        c.transport = TEST_SELF;
        c.backward = false;
        test_data data = test_data_create(&c);
        test_result result = test_run(&c, &data);
        int64_t rows = c.desc.batch * c.desc.seq_q * c.desc.heads, queries = rows * c.desc.head_dim;
        int64_t keys = c.desc.batch * c.desc.seq_k * c.desc.kv_heads * c.desc.head_dim;
        float *q = malloc((size_t)(2 * queries + 2 * keys + 1) * sizeof *q);
        assert_non_null(q);
        float *out = q + queries, *k = out + queries, *v = k + keys;
        for (int64_t e = 0; e < queries; e++) q[e] = (float)data.q[e];
        for (int64_t e = 0; e < keys; e++) k[e] = (float)data.k[e];
        for (int64_t e = 0; e < keys; e++) v[e] = (float)data.v[e];
        ra_forward_args args = {.q = ra_tensor_bnhd(q, c.desc.seq_q, c.desc.heads, c.desc.head_dim),
                                .k = ra_tensor_bnhd(k, c.desc.seq_k, c.desc.kv_heads, c.desc.head_dim),
                                .v = ra_tensor_bnhd(v, c.desc.seq_k, c.desc.kv_heads, c.desc.head_dim),
                                .out = ra_tensor_bnhd(out, c.desc.seq_q, c.desc.heads, c.desc.head_dim)};
        assert_int_equal(ra_attention(&c.desc, &args), RA_OK);
        for (int64_t e = 0; e < queries; e++) assert_true((double)out[e] == result.out[e]);
        free(q);
        test_result_free(&result);
        test_data_free(&data);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_cases_match_the_reference),
        cmocka_unit_test(random_cases_match_on_each_kernel_of_this_machine),
        cmocka_unit_test(wide_heads_match_the_reference),
        cmocka_unit_test(rings_of_up_to_64_ranks_match_the_reference),
        cmocka_unit_test(longer_sequences_match_the_reference),
        cmocka_unit_test(the_one_call_form_gives_the_same_bits),
    };
    return cmocka_run_group_tests_name("random cases", tests, NULL, test_print_worst);
}
