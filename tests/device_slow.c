/* Rings over a slow network: messages take a good part of a step to arrive, and steps of a causal ring differ. Each rank is a
 * GPU of its own here, whose steps take as long as they have pairs, and a ring must hide nearly all of its messages. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/clock.h"
#include "core/size.h"
#include "device_case.h"
#include "ringattn_cuda.h"

enum { RANKS = 4, ROWS = 32, HEADS = 1, DIM = 8, NUMBERS = ROWS * HEADS * DIM, BUCKETS = 4, BUCKET = ROWS / BUCKETS };
enum { PAIR_US = 300, TRIES = 30 };

typedef struct group {
    test_ring ring;
    bool backward;
    float in[RANKS][NUMBERS], out[RANKS][NUMBERS], lse[RANKS][ROWS], dq[RANKS][NUMBERS], dk[RANKS][NUMBERS], dv[RANKS][NUMBERS];
    ra_status status[RANKS];
    int64_t sent[RANKS];
} group;

static void call(void *arg, int rank) {
    group *g = arg;
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.batch = 1;
    desc.seq_q = desc.seq_k = RANKS * ROWS;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.causal = true;
    desc.layout = RA_LAYOUT_ZIGZAG;
    desc.bucket = BUCKET;
    desc.schedule = RA_SCHEDULE_RING;
    desc.device = RA_DEVICE_CUDA;
    ra_plan *plan = NULL;
    ra_status status = ra_plan_create(g->ring.comms[rank], &desc, &plan);
    const ra_tensor x = ra_tensor_bnhd(g->in[rank], ROWS, HEADS, DIM), out = ra_tensor_bnhd(g->out[rank], ROWS, HEADS, DIM);
    const ra_tensor lse = {g->lse[rank], ROWS, 1, ROWS};
    if (status == RA_OK && !g->backward)
        status = ra_forward(plan, &(ra_forward_args){.q = x, .k = x, .v = x, .out = out, .lse = lse, .stream = g->in[rank]});
    if (status == RA_OK && g->backward)
        status = ra_backward(plan, &(ra_backward_args){.q = x, .k = x, .v = x, .out = out, .lse = lse, .dout = x,
                                                       .dq = ra_tensor_bnhd(g->dq[rank], ROWS, HEADS, DIM),
                                                       .dk = ra_tensor_bnhd(g->dk[rank], ROWS, HEADS, DIM),
                                                       .dv = ra_tensor_bnhd(g->dv[rank], ROWS, HEADS, DIM),
                                                       .stream = g->in[rank]});
    ra_stats_data stats = {.struct_size = sizeof stats};
    if (status == RA_OK) status = ra_stats(plan, &stats);
    g->sent[rank] = stats.bytes_sent;
    g->status[rank] = status;
    ra_plan_destroy(plan);
}

static double run(group *g) {
    const double start = ra_seconds();
    test_ring_each(&g->ring, call, g);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(g->status[rank], RA_OK);
        assert_int_equal(ra_cuda_synchronize(g->in[rank]), RA_OK);
    }
    return ra_seconds() - start;
}

/* Opens a ring for a pass; gigabytes a second, 0: as fast as can be. */
static void open_ring(group *g, double rate) {
    char text[32];
    snprintf(text, sizeof text, "%.9f", rate);
    if (rate > 0) setenv("RINGATTN_LANE_RATE", text, 1);
    test_ring_open(&g->ring, RANKS, TEST_THREADS);
    const bool backward = g->backward;
    g->backward = false; /* its results are wanted, and lanes are open from now on */
    run(g);
    unsetenv("RINGATTN_LANE_RATE");
    g->backward = backward;
}

/* A step's messages take 0.8 of its time, on average. Two things cannot be hidden: in backward the last gradients come home
 * when nothing is left to compute, and the last buckets have less to do at home than their messages take. A fast ring, which
 * has as much to do besides, shows what the machine takes. */
static void a_causal_ring_hides(bool backward, double most) {
    static group fast, slow;
    fast = (group){.backward = backward};
    test_rng rng = {test_seed(61)};
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < NUMBERS; i++) fast.in[rank][i] = (float)rng_normal(&rng);
    slow = fast;
    const double n = RANKS * ROWS, computed = 1e-6 * PAIR_US * n * (n + 1) / 2 / RANKS;
    open_ring(&fast, 0);
    run(&fast);
    int64_t sent = 0;
    for (int rank = 0; rank < RANKS; rank++) sent = ra_max(sent, fast.sent[rank]);
    open_ring(&slow, (double)sent / (0.8 * computed * (RANKS - 1) / RANKS) / 1e9);
    char text[16];
    snprintf(text, sizeof text, "%d", PAIR_US);
    setenv("RINGATTN_STAND_IN_PAIR_US", text, 1);
    double least[2] = {INFINITY, INFINITY};
    for (int i = 0; i < TRIES && (i < 2 || least[1] > most * least[0]); i++) { /* again on a busy machine */
        least[0] = fmin(least[0], run(&fast));
        least[1] = fmin(least[1], run(&slow));
    }
    unsetenv("RINGATTN_STAND_IN_PAIR_US");
    print_message("%s: steps take %.0f ms, all %.0f ms with a fast lane, %.0f ms with a slow one, %.3fx\n",
                  backward ? "backward" : "forward", 1e3 * computed, 1e3 * least[0], 1e3 * least[1], least[1] / least[0]);
    assert_true(least[1] >= computed);
    assert_true(least[1] <= most * least[0]);
    test_ring_close(&fast.ring);
    test_ring_close(&slow.ring);
    assert_memory_equal(fast.out, slow.out, sizeof fast.out);
    assert_memory_equal(fast.dq, slow.dq, sizeof fast.dq);
    assert_memory_equal(fast.dk, slow.dk, sizeof fast.dk);
    assert_memory_equal(fast.dv, slow.dv, sizeof fast.dv);
}

static void a_causal_ring_hides_keys_and_values(void **state) {
    (void)state;
    a_causal_ring_hides(false, 1.15);
}
static void a_causal_ring_hides_gradients(void **state) {
    (void)state;
    a_causal_ring_hides(true, 1.07);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_causal_ring_hides_keys_and_values),
        cmocka_unit_test(a_causal_ring_hides_gradients),
    };
    return cmocka_run_group_tests_name("rings over a slow network", tests, NULL, NULL);
}
