/* Calls whose tensors stay in host memory, on the stand-in module: values, gradients, order and memory. A copy or a step that
 * does not wait for another shows as a wrong number, and under a thread sanitizer as a race. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device_case.h"
#include "ringattn_cuda.h"

/* Blocks of a few rows, so that there are many. */
static void draw_case(test_case *c, test_rng *rng, int64_t n) {
    device_case_random(c, rng, n % 10 ? 40 : 120, 1);
    c->desc.offload = true;
    c->desc.bucket = 1 + rng_below(rng, 30);
    if (c->strides == TEST_PADDED) c->strides = TEST_BNHD;
}

static void every_mode_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(61, 100, 3000, draw_case);
}

static void rows_that_nobody_reads_may_hold_anything(void **state) {
    (void)state;
    assert_true(test_poisoned_cases_hold(62, 30, 1000, draw_case) > 0);
}

/* Each rank of the ring holds one block of all, and sends it as one bucket. */
static void blocks_give_the_bits_of_a_ring_of_as_many_ranks(void **state) {
    (void)state;
    enum { ROWS = 24 };
    for (int causal = 0; causal < 2; causal++)
        for (int dtype = RA_F32; dtype <= RA_BF16; dtype++) {
            test_case c;
            test_case_init(&c);
            c.desc.device = RA_DEVICE_CUDA;
            c.desc.kernel = NULL;
            c.desc.dtype = (ra_dtype)dtype;
            c.desc.seq_q = c.desc.seq_k = 4 * ROWS;
            c.desc.causal = causal;
            c.desc.schedule = RA_SCHEDULE_RING;
            c.desc.bucket = ROWS;
            c.desc.layout = RA_LAYOUT_CONTIGUOUS;
            c.ranks = 4;
            c.transport = TEST_THREADS;
            c.backward = true;
            test_case_link(&c);
            test_data data = test_data_create(&c);
            test_result ring = test_run(&c, &data);
            c.desc.offload = true;
            c.ranks = 1;
            c.transport = TEST_SELF;
            test_result blocks = test_run(&c, &data);
            assert_int_equal(ring.status, RA_OK);
            if (blocks.status != RA_OK) fail_msg("%s", blocks.error);
            const size_t bytes = (size_t)(c.desc.batch * c.desc.seq_q * c.desc.heads * c.desc.head_dim) * sizeof(double);
            assert_memory_equal(ring.out, blocks.out, bytes);
            assert_memory_equal(ring.dq, blocks.dq, bytes);
            assert_memory_equal(ring.lse, blocks.lse, bytes / (size_t)c.desc.head_dim);
            test_result_free(&ring);
            test_result_free(&blocks);
            test_data_free(&data);
        }
}

/* ------------------------------------------------------------------------------------------------------------- by hand */

enum { BLOCKS = 4, ROWS = 32, HEADS = 2, DIM = 16, NUMBERS = BLOCKS * ROWS * HEADS * DIM };
enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, TENSORS };

/* A call in pinned memory, from and to which copies are enqueued. */
typedef struct hand {
    ra_comm *comm;
    ra_attention_desc desc;
    ra_plan *plan;
    void *t[TENSORS]; /* room for float32 */
} hand;

static hand hand_open(ra_dtype dtype, bool causal) {
    hand h = {0};
    test_rng rng = {test_seed(63)};
    ra_attention_desc_init(&h.desc);
    h.desc.seq_q = h.desc.seq_k = BLOCKS * ROWS;
    h.desc.heads = HEADS;
    h.desc.head_dim = DIM;
    h.desc.dtype = dtype;
    h.desc.causal = causal;
    h.desc.bucket = ROWS;
    h.desc.device = RA_DEVICE_CUDA;
    h.desc.offload = true;
    for (int i = 0; i < TENSORS; i++) {
        assert_int_equal(ra_cuda_pin(NUMBERS * (int64_t)sizeof(float), &h.t[i]), RA_OK);
        memset(h.t[i], 0, NUMBERS * sizeof(float));
        for (int j = 0; j < NUMBERS; j++) test_store(dtype, h.t[i], j, rng_normal(&rng));
    }
    assert_int_equal(ra_comm_self(&h.comm), RA_OK);
    assert_int_equal(ra_plan_create(h.comm, &h.desc, &h.plan), RA_OK);
    return h;
}

static void hand_close(hand *h) {
    ra_plan_destroy(h->plan);
    ra_comm_destroy(h->comm);
    for (int i = 0; i < TENSORS; i++) ra_cuda_unpin(h->t[i]);
}

static ra_tensor tensor(const hand *h, int id) { return ra_tensor_bnhd(h->t[id], BLOCKS * ROWS, HEADS, DIM); }
static ra_tensor lse(const hand *h) { return ra_tensor_lse(h->t[LSE], BLOCKS * ROWS, HEADS); }

static void enqueue_forward(const hand *h) {
    const ra_forward_args args = {
        .q = tensor(h, Q), .k = tensor(h, K), .v = tensor(h, V), .out = tensor(h, OUT), .lse = lse(h)};
    assert_int_equal(ra_forward(h->plan, &args), RA_OK);
}

static void enqueue_backward(const hand *h) {
    const ra_backward_args args = {.q = tensor(h, Q),
                                   .k = tensor(h, K),
                                   .v = tensor(h, V),
                                   .out = tensor(h, OUT),
                                   .lse = lse(h),
                                   .dout = tensor(h, DOUT),
                                   .dq = tensor(h, DQ),
                                   .dk = tensor(h, DK),
                                   .dv = tensor(h, DV)};
    assert_int_equal(ra_backward(h->plan, &args), RA_OK);
}

static void calls_that_follow_each_other_without_waiting_do_not_disturb_each_other(void **state) {
    (void)state;
    static float once[TENSORS][NUMBERS];
    for (int causal = 0; causal < 2; causal++)
        for (int dtype = RA_F32; dtype <= RA_BF16; dtype++) {
            hand h = hand_open((ra_dtype)dtype, causal);
            const size_t bytes = NUMBERS * ra_dtype_size((ra_dtype)dtype);
            enqueue_forward(&h);
            enqueue_backward(&h);
            assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
            for (int i = 0; i < TENSORS; i++) memcpy(once[i], h.t[i], sizeof once[i]);
            for (int i = OUT; i < LSE; i++)
                if (i != DOUT) memset(h.t[i], 0xff, bytes);
            for (int i = 0; i < 5; i++) {
                enqueue_forward(&h);
                enqueue_backward(&h);
            }
            assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
            for (int i = 0; i < TENSORS; i++) assert_memory_equal(once[i], h.t[i], sizeof once[i]);
            hand_close(&h);
        }
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sixteen stages of two blocks of K and V each, and the blocks of queries. The first block of each and the last results have
 * nothing to hide behind; all other copies take less time than the stage beside which they run. */
static void the_next_block_comes_while_this_one_is_computed(void **state) {
    (void)state;
    enum { STAGES = BLOCKS * BLOCKS, STEP_MS = 40, COPY_MS = 10, COPIES = 2 * (STAGES - BLOCKS + 1) + 3 * BLOCKS };
    hand h = hand_open(RA_F32, false);
    enqueue_forward(&h);
    assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
    setenv("RINGATTN_STAND_IN_COPY_MS", "10", 1);
    setenv("RINGATTN_STAND_IN_STEP_MS", "40", 1);
    const double steps = 1e-3 * STAGES * STEP_MS, copies = 1e-3 * COPIES * COPY_MS, limit = steps + 0.5 * copies;
    double took = INFINITY;
    for (int i = 0; i < 20 && took >= limit; i++) { /* again on a busy machine: without overlap all take longer */
        const double start = seconds_now();
        enqueue_forward(&h);
        assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
        took = fmin(took, seconds_now() - start);
    }
    unsetenv("RINGATTN_STAND_IN_COPY_MS");
    unsetenv("RINGATTN_STAND_IN_STEP_MS");
    print_message("%.0f ms, of which steps take %.0f; copies take %.0f\n", 1e3 * took, 1e3 * steps, 1e3 * copies);
    assert_true(took > steps);
    assert_true(took < limit);
    hand_close(&h);
}

/* -------------------------------------------------------------------------------------------------------------- planning */

static void a_plan_stays_within_its_memory_limit_at_any_length(void **state) {
    (void)state;
    const int64_t limit = 4 << 20;
    hand h = hand_open(RA_F32, true);
    ra_attention_desc desc = h.desc;
    ra_rank_summary summary = {.struct_size = sizeof summary};
    desc.bucket = 0;
    desc.memory_limit = limit;
    for (desc.seq_q = desc.seq_k = 1 << 12; desc.seq_k <= 1 << 20; desc.seq_q = desc.seq_k *= 4) {
        assert_int_equal(ra_plan_summary(&desc, 0, 1, &summary), RA_OK);
        assert_int_equal(summary.shard_bytes, 0);
        assert_true(summary.workspace_bytes > limit / 4 && summary.workspace_bytes <= limit);
        assert_true(summary.workspace_bytes_backward > limit / 4 && summary.workspace_bytes_backward <= limit);
    }
    desc.bucket = 1 << 18;
    assert_int_equal(ra_plan_summary(&desc, 0, 1, &summary), RA_NOMEM);
    assert_non_null(strstr(ra_last_error(), "blocks of 262144 rows"));
    hand_close(&h);
}

static void a_call_takes_the_memory_that_was_planned(void **state) {
    (void)state;
    hand h = hand_open(RA_F32, true);
    ra_stats_data stats = {.struct_size = sizeof stats};
    enqueue_forward(&h);
    assert_int_equal(ra_comm_stats(h.comm, &stats), RA_OK);
    assert_int_equal(stats.pool_peak, ra_plan_workspace(h.plan, false));
    enqueue_backward(&h);
    assert_int_equal(ra_comm_stats(h.comm, &stats), RA_OK);
    assert_int_equal(stats.pool_peak, ra_plan_workspace(h.plan, true));
    assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
    hand_close(&h);
}

static void what_offload_cannot_do_is_said(void **state) {
    (void)state;
    hand h = hand_open(RA_F32, true);
    ra_attention_desc desc = h.desc;
    ra_rank_summary summary = {.struct_size = sizeof summary};
    assert_int_equal(ra_plan_summary(&desc, 0, 2, &summary), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "one rank"));
    desc.device = RA_DEVICE_CPU;
    assert_int_equal(ra_attention_desc_check(&desc), RA_INVALID);
    assert_non_null(strstr(ra_last_error(), "offload needs device"));
    ra_forward_args args = {.q = tensor(&h, Q), .k = tensor(&h, K), .v = tensor(&h, V), .out = tensor(&h, OUT)};
    args.k.row = 2 * HEADS * DIM;
    args.k.head = DIM;
    assert_int_equal(ra_forward(h.plan, &args), RA_INVALID);
    assert_non_null(strstr(ra_last_error(), "k has a row stride of 64"));
    enqueue_forward(&h); /* that cost the communicator nothing */
    setenv("RINGATTN_STAND_IN_CAPTURES", "1", 1);
    args.k = tensor(&h, K);
    assert_int_equal(ra_forward(h.plan, &args), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "CUDA graph"));
    unsetenv("RINGATTN_STAND_IN_CAPTURES");
    assert_int_equal(ra_cuda_synchronize(NULL), RA_OK);
    hand_close(&h);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_that_follow_each_other_without_waiting_do_not_disturb_each_other),
        cmocka_unit_test(every_mode_matches_the_reference),
        cmocka_unit_test(rows_that_nobody_reads_may_hold_anything),
        cmocka_unit_test(blocks_give_the_bits_of_a_ring_of_as_many_ranks),
        cmocka_unit_test(the_next_block_comes_while_this_one_is_computed),
        cmocka_unit_test(a_plan_stays_within_its_memory_limit_at_any_length),
        cmocka_unit_test(a_call_takes_the_memory_that_was_planned),
        cmocka_unit_test(what_offload_cannot_do_is_said),
    };
    return cmocka_run_group_tests_name("offload", tests, NULL, test_print_worst);
}
