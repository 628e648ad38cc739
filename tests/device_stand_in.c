/* The way of a call to a GPU and back, without one: forward and backward of one rank in every mode on the stand-in module,
 * whose streams are threads that take their time, against the reference. */
#include <stdlib.h>
#include <string.h>

#include "device_case.h"
#include "ringattn_cuda.h"

static void draw_case(test_case *c, test_rng *rng, int64_t n) {
    device_case_random(c, rng, n % 10 ? 40 : 150, 1);
    if (n % 5 == 0) c->desc.kernel = "sm80";
    c->desc.schedule = RA_SCHEDULE_AUTO;
    c->transport = TEST_SELF;
}

static void every_mode_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(41, 150, 3000, draw_case);
}

static void rows_that_nobody_reads_may_hold_anything(void **state) {
    (void)state;
    assert_true(test_poisoned_cases_hold(42, 60, 1200, draw_case) > 0);
}

/* Mixed branches keep a state in the workspace, which the next call on another stream must not get before this one is done. */
static void streams_do_not_share_a_workspace(void **state) {
    (void)state;
    enum { STREAMS = 4, ROUNDS = 8, ROWS = 96, HEADS = 2, DIM = 16, NUMBERS = ROWS * HEADS * DIM };
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.batch = 1;
    desc.seq_q = desc.seq_k = ROWS;
    desc.heads = desc.kv_heads = HEADS;
    desc.head_dim = DIM;
    desc.dtype = RA_BF16;
    desc.device = RA_DEVICE_CUDA;
    desc.combine = RA_COMBINE_MIX;
    desc.segment_lengths = (int64_t[]){32, 64};
    desc.dilation_rates = (int64_t[]){2, 4};
    desc.branches = 2;
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    assert_int_equal(ra_plan_create(comm, &desc, &plan), RA_OK);
    static uint16_t in[NUMBERS], out[STREAMS * ROUNDS][NUMBERS], expected[NUMBERS];
    test_rng rng = {test_seed(43)};
    for (int i = 0; i < NUMBERS; i++) test_store(RA_BF16, in, i, rng_normal(&rng));
    for (int i = 0; i <= STREAMS * ROUNDS; i++) {
        const ra_tensor x = ra_tensor_bnhd(in, ROWS, HEADS, DIM);
        ra_forward_args args = {.q = x, .k = x, .v = x, .stream = &out[i % STREAMS]};
        args.out = ra_tensor_bnhd(i < STREAMS * ROUNDS ? out[i] : expected, ROWS, HEADS, DIM);
        assert_int_equal(ra_forward(plan, &args), RA_OK);
    }
    for (int i = 0; i < STREAMS; i++) assert_int_equal(ra_cuda_synchronize(&out[i]), RA_OK);
    for (int i = 0; i < STREAMS * ROUNDS; i++) assert_memory_equal(out[i], expected, sizeof expected);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
}

static void a_backward_pass_that_cannot_run_is_known_before_the_forward_pass(void **state) {
    (void)state;
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    test_case c;
    test_case_init(&c);
    c.desc.device = RA_DEVICE_CUDA;
    c.desc.kernel = "sm90a";
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    assert_int_equal(ra_plan_create(comm, &c.desc, &plan), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "Hopper"));
    c.desc.kernel = "sm80";
    assert_int_equal(ra_plan_create(comm, &c.desc, &plan), RA_OK);
    assert_int_equal(ra_plan_check_backward(plan), RA_OK);
    assert_int_equal(ra_plan_check_backward(NULL), RA_INVALID);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mode_matches_the_reference),
        cmocka_unit_test(rows_that_nobody_reads_may_hold_anything),
        cmocka_unit_test(streams_do_not_share_a_workspace),
        cmocka_unit_test(a_backward_pass_that_cannot_run_is_known_before_the_forward_pass),
    };
    return cmocka_run_group_tests_name("stand-in GPU", tests, NULL, test_print_worst);
}
