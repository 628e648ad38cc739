/* Rings of GPUs without one: every mode over several ranks on the stand-in module, whose streams are threads that take their
 * time, by every lane. A wait that is missing shows as a wrong number, and under a thread sanitizer as a race. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/loader.h"
#include "device_hand.h"

static void draw_case(test_case *c, test_rng *rng, int64_t n) {
    device_case_random(c, rng, n % 10 ? 40 : 120, 5);
    if (n % 8 == 3) c->desc.schedule = RA_SCHEDULE_GATHER;
    if (n % 8 == 6) c->desc.query_placement = RA_REPLICATED, c->desc.schedule = RA_SCHEDULE_AUTO;
}

static void every_mode_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(51, 120, 3000, draw_case);
}

static void rows_that_nobody_reads_may_hold_anything(void **state) {
    (void)state;
    assert_true(test_poisoned_cases_hold(52, 40, 1000, draw_case) > 0);
}

/* Direct; staged over threads, for a checksum wants the payload on the link; staged over a caller's transport. */
static void every_lane_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(53)};
    for (int64_t n = test_cases(30, 600); n > 0; n--) {
        test_case c;
        draw_case(&c, &rng, n);
        if (c.ranks == 1) continue;
        test_data data = test_data_create(&c);
        test_result results[3];
        for (int lane = 0; lane < 3; lane++) {
            c.transport = lane < 2 ? TEST_THREADS : TEST_CUSTOM;
            c.desc.checksum = lane == 1;
            results[lane] = test_run(&c, &data);
            char text[2048];
            if (results[lane].status != RA_OK) fail_msg("%s: %s", results[lane].error, test_case_text(&c, text, sizeof text));
            const char *differs = lane ? test_difference(&c, &results[0], &results[lane]) : NULL;
            if (differs) fail_msg("%s differs on lane %d: %s", differs, lane, test_case_text(&c, text, sizeof text));
            device_same_bytes(&c, &results[0], &results[lane]);
        }
        for (int lane = 0; lane < 3; lane++) test_result_free(&results[lane]);
        test_data_free(&data);
    }
}

/* ------------------------------------------------------------------------------------------------------------- by hand */

static hand *open_threads(void) {
    static hand h;
    hand_open(&h, TEST_THREADS);
    return &h;
}

static void run(hand *h) {
    test_ring_each(&h->ring, hand_call, h);
    hand_synchronize(h);
}

static void calls_that_follow_each_other_without_waiting_do_not_disturb_each_other(void **state) {
    (void)state;
    static float once[RANKS][NUMBERS];
    hand *h = open_threads();
    run(h);
    memcpy(once, h->out, sizeof once);
    memset(h->out, 0, sizeof h->out);
    h->calls = 20;
    run(h);
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(h->status[rank], RA_OK);
    assert_memory_equal(once, h->out, sizeof once);
    test_ring_close(&h->ring);
}

/* The streams of all ranks wait for another one, which is busy for a while: the calls are through long before it is. */
static void hosts_of_a_direct_lane_never_wait_for_devices(void **state) {
    (void)state;
    enum { COPIES = 20000 };
    hand *h = open_threads();
    run(h); /* plans and workspaces are there */
    void *busy = NULL, *event = NULL, *copied = NULL;
    bool passed = true;
    assert_int_equal(ra_cuda_open_stream(&busy), RA_OK);
    assert_int_equal(ra_cuda_alloc(2, &copied), RA_OK);
    for (int i = 0; i < COPIES; i++) assert_int_equal(ra_cuda_copy(copied, (char *)copied + 1, 1, busy), RA_OK);
    assert_int_equal(ra_cuda_mark(busy, &event), RA_OK);
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(ra_cuda_wait(h->streams[rank], event), RA_OK);
    test_ring_each(&h->ring, hand_call, h);
    assert_int_equal(ra_cuda_passed(event, &passed), RA_OK);
    assert_false(passed);
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(h->status[rank], RA_OK);
    test_ring_close(&h->ring);
    ra_cuda_forget(event);
    ra_cuda_free(copied);
    ra_cuda_close_stream(busy);
}

/* Two buckets over two hops: six steps, and four of them exchange. Beside each other they take as long as the steps; one after
 * the other the copies of each exchange would come on top. */
static void the_next_bucket_travels_while_this_one_is_computed(void **state) {
    (void)state;
    enum { STEPS = 6, EXCHANGES = 4, STEP_MS = 60 };
    for (int staged = 0; staged < 2; staged++) {
        const int copies = staged ? 2 : 1, copy_ms = staged ? 20 : 40; /* out and in, or straight */
        hand *h = open_threads();
        h->checksum = staged;
        run(h);
        char text[16];
        snprintf(text, sizeof text, "%d", copy_ms);
        setenv("RINGATTN_STAND_IN_COPY_MS", text, 1);
        snprintf(text, sizeof text, "%d", STEP_MS);
        setenv("RINGATTN_STAND_IN_STEP_MS", text, 1);
        const double steps = 1e-3 * STEPS * STEP_MS, exchanges = 1e-3 * EXCHANGES * copies * copy_ms,
                     limit = steps + 0.75 * exchanges;
        double took = INFINITY;
        for (int i = 0; i < 30 && took >= limit; i++) { /* again on a busy machine: without overlap all take longer */
            const double start = ra_seconds();
            run(h);
            took = fmin(took, ra_seconds() - start);
        }
        unsetenv("RINGATTN_STAND_IN_COPY_MS");
        unsetenv("RINGATTN_STAND_IN_STEP_MS");
        print_message("%s: %.0f ms, of which steps take %.0f; copies take %.0f\n", staged ? "staged" : "direct", 1e3 * took,
                      1e3 * steps, 1e3 * exchanges);
        for (int rank = 0; rank < RANKS; rank++) assert_int_equal(h->status[rank], RA_OK);
        assert_true(took > steps);
        assert_true(took < limit);
        test_ring_close(&h->ring);
    }
}

/* A message of a bucket's keys and values takes 40 ms to arrive, where copies take none. */
static void a_slow_lane_holds_back_what_arrives_beside_what_is_computed(void **state) {
    (void)state;
    enum { STEPS = 6, EXCHANGES = 4, STEP_MS = 60, MESSAGE_MS = 40, BYTES = 2 * ROWS / 2 * HEADS * DIM * 4 };
    static float fast[RANKS][NUMBERS];
    char rate[32], step[16];
    snprintf(rate, sizeof rate, "%.9f", BYTES / (1e-3 * MESSAGE_MS) / 1e9);
    snprintf(step, sizeof step, "%d", STEP_MS);
    for (int staged = 0; staged < 2; staged++) {
        hand *h = open_threads();
        h->checksum = staged;
        run(h);
        memcpy(fast, h->out, sizeof fast);
        test_ring_close(&h->ring);
        setenv("RINGATTN_LANE_RATE", rate, 1);
        h = open_threads();
        h->checksum = staged;
        run(h);
        unsetenv("RINGATTN_LANE_RATE");
        const double exchanges = 1e-3 * EXCHANGES * MESSAGE_MS, steps = 1e-3 * STEPS * STEP_MS,
                     limit = steps + 0.75 * exchanges;
        double start = ra_seconds();
        run(h);
        assert_true(ra_seconds() - start >= exchanges);
        assert_memory_equal(fast, h->out, sizeof fast);
        setenv("RINGATTN_STAND_IN_STEP_MS", step, 1);
        double took = INFINITY;
        for (int i = 0; i < 30 && took >= limit; i++) { /* again on a busy machine: without overlap all take longer */
            start = ra_seconds();
            run(h);
            took = fmin(took, ra_seconds() - start);
        }
        unsetenv("RINGATTN_STAND_IN_STEP_MS");
        print_message("%s: %.0f ms, of which steps take %.0f; messages take %.0f\n", staged ? "staged" : "direct", 1e3 * took,
                      1e3 * steps, 1e3 * exchanges);
        assert_true(took > steps);
        assert_true(took < limit);
        test_ring_close(&h->ring);
    }
}

/* Whoever closes lanes may be on another GPU than they are; what they hold back still comes. */
static void a_slow_lane_is_closed_from_any_gpu(void **state) {
    (void)state;
    static float fast[RANKS][NUMBERS];
    hand *h = open_threads();
    run(h);
    memcpy(fast, h->out, sizeof fast);
    test_ring_close(&h->ring);
    setenv("RINGATTN_LANE_RATE", "0.0001", 1);
    setenv("RINGATTN_STAND_IN_GPUS", "3", 1);
    h = open_threads();
    h->gpus = 3;
    test_ring_each(&h->ring, hand_call, h);
    for (int rank = 0; rank < RANKS; rank++)
        if (h->status[rank] != RA_OK) fail_msg("rank %d: %s", rank, h->error[rank]);
    assert_int_equal(ra_cuda_use(2), RA_OK);
    test_ring_close(&h->ring);
    assert_int_equal(ra_cuda_use(0), RA_OK);
    unsetenv("RINGATTN_STAND_IN_GPUS");
    unsetenv("RINGATTN_LANE_RATE");
    hand_synchronize(h);
    assert_memory_equal(fast, h->out, sizeof fast);
}

/* Kernels of the stand-in take no other GPU's memory, and no copy between GPUs for which nobody has opened the way. */
static void ranks_with_a_gpu_each_give_the_same_bits_and_keep_to_it(void **state) {
    (void)state;
    static float shared[RANKS][NUMBERS];
    for (int staged = 0; staged < 2; staged++) {
        hand *h = open_threads();
        h->checksum = staged;
        run(h);
        memcpy(shared, h->out, sizeof shared);
        test_ring_close(&h->ring);
        setenv("RINGATTN_STAND_IN_GPUS", "3", 1);
        for (int gpus = 2; gpus <= 3; gpus++) {
            h = open_threads();
            h->checksum = staged;
            h->gpus = gpus;
            run(h);
            for (int rank = 0; rank < RANKS; rank++)
                if (h->status[rank] != RA_OK) fail_msg("rank %d: %s", rank, h->error[rank]);
            assert_memory_equal(shared, h->out, sizeof shared);
            h->gpus = 1;
            run(h);
            assert_int_equal(h->status[1], RA_INVALID);
            assert_non_null(strstr(h->error[1], "rank 1 began on GPU 1 and keeps to it, but now GPU 0 is the current one"));
            for (int rank = 0; rank < RANKS; rank++) assert_int_not_equal(h->status[rank], RA_OK);
            test_ring_close(&h->ring);
        }
        unsetenv("RINGATTN_STAND_IN_GPUS");
    }
    int gpus = 0;
    assert_int_equal(ra_cuda_count(&gpus), RA_OK);
    assert_int_equal(gpus, 1);
    assert_int_equal(ra_cuda_use(1), RA_INVALID);
    assert_non_null(strstr(ra_last_error(), "gpu is 1, and this process sees 1"));
}

static void two_ranks_of_a_process_with_one_stream_are_refused(void **state) {
    (void)state;
    hand *h = open_threads();
    h->streams[2] = h->streams[1];
    run(h);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(h->status[rank], RA_INVALID);
        assert_non_null(strstr(h->error[rank], "ranks 1 and 2 of this process use the same stream"));
    }
    for (int i = 0; i < NUMBERS; i++) assert_true(isnan(h->out[1][i]));
    test_ring_close(&h->ring);
}

static void a_call_of_several_ranks_is_not_captured_into_a_graph(void **state) {
    (void)state;
    hand *h = open_threads();
    setenv("RINGATTN_STAND_IN_CAPTURES", "1", 1);
    run(h);
    unsetenv("RINGATTN_STAND_IN_CAPTURES");
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(h->status[rank], RA_NOT_AVAILABLE);
        assert_non_null(strstr(h->error[rank], "cannot be captured into a CUDA graph"));
    }
    test_ring_close(&h->ring);
}

static ra_attention_desc tokens(int64_t count) {
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.batch = 1;
    desc.seq_q = desc.seq_k = count;
    desc.heads = HEADS;
    desc.head_dim = 64;
    return desc;
}

static int64_t bucket_of(const ra_attention_desc *desc, int ranks) {
    ra_rank_summary summary = {.struct_size = sizeof summary};
    assert_int_equal(ra_plan_summary(desc, 0, ranks, &summary), RA_OK);
    return summary.bucket;
}

/* Small buckets, which save memory where `ring` is asked for by name, are the CPU's: a GPU would wait for them. */
static void a_gpu_keeps_its_bucket(void **state) {
    (void)state;
    ra_attention_desc desc = tokens(4096);
    desc.schedule = RA_SCHEDULE_RING;
    assert_int_equal(bucket_of(&desc, 2), 2048 / 16);
    desc.device = RA_DEVICE_CUDA;
    assert_int_equal(bucket_of(&desc, 2), 8192);
}

/* Where a query meets half of a bucket at a time, it has twice the rows. */
static void a_bucket_of_a_gpu_is_as_long_as_what_a_query_meets_of_it(void **state) {
    (void)state;
    static const struct {
        ra_layout layout;
        bool causal;
        int64_t bucket;
    } cases[] = {{RA_LAYOUT_CONTIGUOUS, false, 8192}, {RA_LAYOUT_CONTIGUOUS, true, 8192}, {RA_LAYOUT_ZIGZAG, false, 16384},
                 {RA_LAYOUT_ZIGZAG, true, 16384},     {RA_LAYOUT_STRIPED, false, 8192},   {RA_LAYOUT_STRIPED, true, 16384}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ra_attention_desc desc = tokens(131072);
        desc.device = RA_DEVICE_CUDA;
        desc.layout = cases[i].layout;
        desc.causal = cases[i].causal;
        assert_int_equal(bucket_of(&desc, 8), cases[i].bucket);
        assert_int_equal(bucket_of(&desc, 1), 8192); /* one rank's rows are of one piece */
    }
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_that_follow_each_other_without_waiting_do_not_disturb_each_other),
        cmocka_unit_test(every_mode_matches_the_reference),
        cmocka_unit_test(rows_that_nobody_reads_may_hold_anything),
        cmocka_unit_test(every_lane_gives_the_same_bits),
        cmocka_unit_test(hosts_of_a_direct_lane_never_wait_for_devices),
        cmocka_unit_test(the_next_bucket_travels_while_this_one_is_computed),
        cmocka_unit_test(a_slow_lane_holds_back_what_arrives_beside_what_is_computed),
        cmocka_unit_test(a_slow_lane_is_closed_from_any_gpu),
        cmocka_unit_test(a_gpu_keeps_its_bucket),
        cmocka_unit_test(a_bucket_of_a_gpu_is_as_long_as_what_a_query_meets_of_it),
        cmocka_unit_test(ranks_with_a_gpu_each_give_the_same_bits_and_keep_to_it),
        cmocka_unit_test(two_ranks_of_a_process_with_one_stream_are_refused),
        cmocka_unit_test(a_call_of_several_ranks_is_not_captured_into_a_graph),
    };
    return cmocka_run_group_tests_name("rings of stand-in GPUs", tests, NULL, test_print_worst);
}
