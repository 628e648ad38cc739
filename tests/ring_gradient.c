/* Gradients through the whole ring: finite differences of its own forward, dlse, dropout, and f16 at its end. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

static double loss(const test_ring *ring, const test_case *c, const test_data *data) {
    test_case forward = *c;
    forward.backward = false;
    test_case_link(&forward);
    test_result result = test_run_on(ring, &forward, data);
    assert_int_equal(result.status, RA_OK);
    int64_t rows = c->desc.batch * c->desc.seq_q * c->desc.heads;
    double sum = 0;
    for (int64_t n = 0; n < rows * c->desc.head_dim; n++) sum += result.out[n] * data->dout[n];
    for (int64_t n = 0; n < rows && c->dlse; n++) sum += isfinite(result.lse[n]) ? result.lse[n] * data->dlse[n] : 0;
    test_result_free(&result);
    return sum;
}

/* Along a random direction, which sees every element at once. */
static void slope_matches(const test_ring *ring, const test_case *c, const test_data *data, double *array,
                          const double *gradient, int64_t count, const char *name) {
    test_rng rng = {c->data_seed + 77};
    double step = 1e-5, along = 0, size = 0;
    double *kept = malloc((size_t)(count + 1) * sizeof *kept), *direction = malloc((size_t)(count + 1) * sizeof *direction);
    assert_non_null(kept);
    assert_non_null(direction);
    memcpy(kept, array, (size_t)count * sizeof *kept);
    for (int64_t n = 0; n < count; n++) {
        direction[n] = rng_normal(&rng);
        along += direction[n] * gradient[n];
        size += fabs(direction[n] * gradient[n]);
    }
    for (int64_t n = 0; n < count; n++) array[n] = kept[n] + step * direction[n];
    double up = loss(ring, c, data);
    for (int64_t n = 0; n < count; n++) array[n] = kept[n] - step * direction[n];
    double down = loss(ring, c, data);
    memcpy(array, kept, (size_t)count * sizeof *kept);
    free(kept);
    free(direction);
    double slope = (up - down) / (2 * step);
    if (!(fabs(slope - along) <= 1e-6 * (1 + size))) {
        char text[2048];
        fail_msg("%s: the slope is %.10g, the gradient says %.10g\n%s", name, slope, along,
                 test_case_text(c, text, sizeof text));
    }
}

static void gradients_are_the_slopes_of_forward(void **state) {
    (void)state;
    test_rng rng = {test_seed(31)};
    for (int64_t n = test_cases(80, 1500); n > 0; n--) {
        test_case c;
        test_case_random(&c, &rng, 30, 6);
        c.desc.dtype = RA_F64;
        c.amplitude = 1;
        c.dlse = n % 2;
        test_data data = test_data_create(&c);
        test_ring ring;
        test_ring_open(&ring, c.ranks, c.transport);
        test_result result = test_run_on(&ring, &c, &data);
        assert_int_equal(result.status, RA_OK);
        int64_t queries = c.desc.batch * c.desc.seq_q * c.desc.heads * c.desc.head_dim;
        int64_t keys = c.desc.batch * c.desc.seq_k * c.desc.kv_heads * c.desc.head_dim;
        slope_matches(&ring, &c, &data, data.q, result.dq, queries, "dq");
        slope_matches(&ring, &c, &data, data.k, result.dk, keys, "dk");
        slope_matches(&ring, &c, &data, data.v, result.dv, keys, "dv");
        test_ring_close(&ring);
        test_result_free(&result);
        test_data_free(&data);
    }
}

/* q = 0, unit v: out[y] * keys * (1 - p) is 1 where the pair is kept and 0 where it is dropped. */
static void the_dropout_mask_is_the_same_for_every_ring(void **state) {
    (void)state;
    static const int rings[] = {1, 2, 3, 5, 8};
    for (int variant = 0; variant < 8; variant++) {
        test_case c;
        test_case_init(&c);
        ra_attention_desc *desc = &c.desc;
        desc->seq_k = desc->seq_q = 41;
        desc->head_dim = 41;
        desc->heads = 4;
        desc->kv_heads = 2;
        desc->batch = 2;
        desc->dropout = 0.4;
        desc->seed = 0x123456789abcdefu + (uint64_t)variant;
        desc->causal = variant & 1;
        desc->offset = (ra_offset)(variant % 4);
        desc->dilate_queries = variant & 2;
        desc->branches = 2;
        desc->combine = variant & 4 ? RA_COMBINE_MIX : RA_COMBINE_HEADS;
        c.segment_lengths[0] = 0;
        c.segment_lengths[1] = 13;
        c.dilation_rates[0] = 2;
        c.dilation_rates[1] = 3;
        c.backward = false;
        test_case_link(&c);
        test_data data = test_data_create(&c);
        memset(data.q, 0, (size_t)(desc->batch * desc->seq_q * desc->heads * desc->head_dim) * sizeof *data.q);
        for (int64_t e = 0; e < desc->batch * desc->seq_k * desc->kv_heads * desc->head_dim; e++) {
            data.v[e] = e % desc->head_dim == e / (desc->kv_heads * desc->head_dim) % desc->seq_k;
        }
        int64_t kept = 0, dropped = 0;
        for (size_t n = 0; n < sizeof rings / sizeof *rings; n++) {
            c.ranks = rings[n];
            desc->layout = (ra_layout)(n % 3);
            desc->bucket = n % 2 ? 3 : 0;
            test_result result = test_run(&c, &data);
            assert_int_equal(result.status, RA_OK);
            for (int64_t b = 0; b < desc->batch; b++) {
                for (int64_t i = 0; i < desc->seq_q; i++) {
                    for (int64_t head = 0; head < desc->heads; head++) {
                        int64_t total = 0;
                        for (int64_t pair = 0; pair < desc->branches * desc->seq_k; pair++) {
                            total += ref_attended(desc, b, i, pair / desc->branches, head, pair % desc->branches);
                        }
                        for (int64_t y = 0; y < desc->seq_k; y++) {
                            int64_t want = 0;
                            for (int64_t branch = 0; branch < desc->branches; branch++) {
                                if (!ref_attended(desc, b, i, y, head, branch)) continue;
                                bool keep = ref_kept(desc, b, i, y, head, branch);
                                want += keep;
                                kept += keep;
                                dropped += !keep;
                            }
                            double got = result.out[((b * desc->seq_q + i) * desc->heads + head) * desc->head_dim + y] *
                                         (double)total * (1 - desc->dropout);
                            if (!(fabs(got - (double)want) < 1e-4)) {
                                char text[2048];
                                fail_msg("query %lld head %lld key %lld: kept %g times, should be %lld\n%s", (long long)i,
                                         (long long)head, (long long)y, got, (long long)want,
                                         test_case_text(&c, text, sizeof text));
                            }
                        }
                    }
                }
            }
            test_result_free(&result);
        }
        double share = (double)dropped / (double)(kept + dropped);
        assert_true(fabs(share - desc->dropout) < 0.06);
        test_data_free(&data);
    }
}

static void f16_gradients_beyond_65504_become_infinite(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        test_case c;
        test_case_init(&c);
        c.ranks = ranks;
        c.desc.dtype = RA_F16;
        c.desc.heads = 2; /* two query heads of one group sum into dv */
        c.desc.kv_heads = 1;
        c.desc.seq_q = c.desc.seq_k = 12;
        c.desc.window_left = c.desc.window_right = 0; /* P = 1: dv[y] is the sum of two dout */
        test_data data = test_data_create(&c);
        for (int64_t n = 0; n < 12 * 2 * 8; n++) data.dout[n] = n / 16 % 2 ? -40000 : n / 16 % 4 ? 40000 : 30000;
        test_result result = test_run(&c, &data);
        test_result_holds(&c, &data, &result);
        int64_t infinite = 0;
        for (int64_t n = 0; n < 12 * 8; n++) {
            double want = n / 8 % 2 ? -INFINITY : n / 8 % 4 ? INFINITY : 60000;
            assert_true(result.dv[n] == want || (want == 60000 && fabs(result.dv[n] - want) <= 32));
            infinite += isinf(result.dv[n]) != 0;
        }
        assert_true(infinite > 0);
        test_result_free(&result);
        test_data_free(&data);
    }
}

/* dlse alone: out is not used at all, so the loss is sum(lse * dlse) and dv is 0. */
static void the_gradient_of_lse_alone_flows_to_q_and_k_only(void **state) {
    (void)state;
    test_rng rng = {test_seed(32)};
    for (int n = 0; n < 20; n++) {
        test_case c;
        test_case_random(&c, &rng, 30, 5);
        c.dlse = true;
        test_data data = test_data_create(&c);
        memset(data.dout, 0, (size_t)(c.desc.batch * c.desc.seq_q * c.desc.heads * c.desc.head_dim) * sizeof *data.dout);
        test_result result = test_run(&c, &data);
        test_result_holds(&c, &data, &result);
        for (int64_t e = 0; e < c.desc.batch * c.desc.seq_k * c.desc.kv_heads * c.desc.head_dim; e++)
            assert_true(result.dv[e] == 0);
        test_result_free(&result);
        test_data_free(&data);
    }
}

static void *dirty_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    void *block = aligned_alloc(align, (bytes + align - 1) / align * align);
    return block ? memset(block, 0xff, bytes) : NULL; /* NaN in every type */
}
static void dirty_free(void *ctx, void *block, size_t bytes) {
    (void)ctx;
    (void)bytes;
    free(block);
}

/* Most rows take part in nothing. */
static void draw_sparse(test_case *c, test_rng *rng, int64_t n) {
    test_case_random(c, rng, 60, 5);
    ra_attention_desc *desc = &c->desc;
    desc->dtype = (ra_dtype)(n % 4);
    desc->branches = 1 + rng_below(rng, desc->kv_heads < 2 ? 1 : 2); /* in `heads`, each has a head */
    desc->combine = RA_COMBINE_HEADS;
    desc->dilate_queries = true;
    for (int64_t i = 0; i < desc->branches; i++) {
        c->dilation_rates[i] = 2 + rng_below(rng, 4);
        c->segment_lengths[i] = rng_chance(rng, 70) ? c->dilation_rates[i] * (1 + rng_below(rng, 5)) : rng_below(rng, 20);
    }
    c->backward = true;
    test_case_link(c);
}

static void rows_outside_the_pattern_have_no_gradient_whatever_the_workspace_held(void **state) {
    (void)state;
    const ra_allocator dirty = {dirty_alloc, dirty_free, NULL};
    ra_set_allocator(&dirty);
    int64_t poisoned = test_poisoned_cases_hold(33, 300, 5000, draw_sparse);
    ra_set_allocator(NULL);
    assert_true(poisoned > 0 || test_cases(300, 5000) < 10);
}

/* More elements than a worker takes at a time. */
static void long_gradients_are_converted_in_several_pieces(void **state) {
    (void)state;
    for (int dilated = 0; dilated < 2; dilated++) {
        for (int strides = 0; strides < TEST_STRIDES; strides++) {
            test_case c;
            test_case_init(&c);
            c.strides = (test_strides)strides;
            c.desc.dtype = strides % 2 ? RA_F16 : RA_BF16;
            c.desc.seq_q = c.desc.seq_k = dilated ? 1300 : 620;
            c.desc.heads = c.desc.kv_heads = 2;
            c.desc.head_dim = 64;
            c.desc.window_left = c.desc.window_right = 20;
            c.desc.branches = dilated;
            c.segment_lengths[0] = 0;
            c.dilation_rates[0] = 2;
            c.desc.threads = 2;
            test_case_link(&c);
            test_case_holds(&c);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_slopes_of_forward),
        cmocka_unit_test(the_dropout_mask_is_the_same_for_every_ring),
        cmocka_unit_test(f16_gradients_beyond_65504_become_infinite),
        cmocka_unit_test(the_gradient_of_lse_alone_flows_to_q_and_k_only),
        cmocka_unit_test(long_gradients_are_converted_in_several_pieces),
        cmocka_unit_test(rows_outside_the_pattern_have_no_gradient_whatever_the_workspace_held),
    };
    return cmocka_run_group_tests_name("gradients", tests, NULL, NULL);
}
