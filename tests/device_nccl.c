/* Rings of GPUs by NCCL, without either: the stand-in module plays both, and is as inconvenient as NCCL may be. Ranks are
 * threads over a caller's transport; processes are tests/mpi's. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device_hand.h"
#include "ring/comm.h"
#include "support_patience.h"
#include "transport/link_internal.h"

/* Direct, and by NCCL over a caller's transport. */
static void nccl_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(61)};
    for (int64_t n = test_cases(30, 600); n > 0; n--) {
        test_case c;
        device_case_random(&c, &rng, n % 10 ? 40 : 120, 5);
        c.desc.checksum = false;
        if (c.ranks == 1) continue;
        test_data data = test_data_create(&c);
        test_result results[2];
        for (int nccl = 0; nccl < 2; nccl++) {
            char text[2048];
            c.transport = nccl ? TEST_CUSTOM : TEST_THREADS;
            results[nccl] = test_run(&c, &data);
            if (results[nccl].status != RA_OK) fail_msg("%s: %s", results[nccl].error, test_case_text(&c, text, sizeof text));
        }
        const char *differs = test_difference(&c, &results[0], &results[1]);
        if (differs) fail_msg("%s differs", differs);
        device_same_bytes(&c, &results[0], &results[1]);
        for (int nccl = 0; nccl < 2; nccl++) test_result_free(&results[nccl]);
        test_data_free(&data);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- faults */

static double timeout; /* of the rings */
static int gpus = 1;   /* that their ranks have */

/* Runs a ring with a fault of the stand-in's (tests/stand_in/nccl.c). */
static hand *run_by(const char *fault, void (*work)(void *arg, int rank)) {
    static hand h;
    setenv("RINGATTN_STAND_IN_NCCL", fault, 1);
    hand_open(&h, TEST_CUSTOM);
    h.gpus = gpus;
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(ra_comm_set_timeout(h.ring.comms[rank], timeout, timeout), RA_OK);
    test_ring_each(&h.ring, work, &h);
    return &h;
}

static hand *run_with(const char *fault) { return run_by(fault, hand_call); }

static void end(hand *h) {
    test_ring_close(&h->ring);
    unsetenv("RINGATTN_STAND_IN_NCCL");
}

static void expect(const hand *h, ra_status status, const char *sentence, double seconds) {
    for (int rank = 0; rank < RANKS; rank++) {
        if (h->status[rank] != status || !strstr(h->error[rank], sentence) || h->seconds[rank] > seconds)
            fail_msg("rank %d: %s after %.2f s: %s", rank, ra_status_name(h->status[rank]), h->seconds[rank], h->error[rank]);
    }
}

static void expect_no_numbers(const hand *h) {
    hand_synchronize(h); /* the streams run on */
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < NUMBERS; i++) assert_true(isnan(h->out[rank][i]));
}

static void expect_numbers(const hand *h, const hand *right) {
    hand_synchronize(h);
    assert_memory_equal(h->out, right->out, sizeof h->out);
}

/* Two buckets over two hops, K and V of half a rank's rows each. */
static void a_lane_by_nccl_can_be_told_to_be_slow(void **state) {
    (void)state;
    const double bytes = 4 * 2 * (ROWS / 2) * HEADS * DIM * sizeof(float), seconds = 0.2;
    char rate[32];
    snprintf(rate, sizeof rate, "%g", 1e-9 * bytes / seconds);
    setenv("RINGATTN_LANE_RATE", rate, 1);
    hand *h = run_with("");
    unsetenv("RINGATTN_LANE_RATE");
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(h->status[rank], RA_OK);
        assert_true(h->seconds[rank] >= seconds); /* a call by NCCL ends when its last message has come */
    }
    end(h);
}

static void call_and_leave(void *arg, int rank) {
    hand *h = arg;
    hand_call(arg, rank);
    ra_comm_destroy(h->ring.comms[rank]);
    h->ring.comms[rank] = NULL;
}

/* What a rank has sent may still be on its way when the rank is through. */
static void a_rank_that_leaves_first_takes_nothing_with_it(void **state) {
    (void)state;
    static hand first;
    for (int round = 0; round < 20; round++) {
        hand *h = run_by("", call_and_leave);
        for (int rank = 0; rank < RANKS; rank++)
            if (h->status[rank] != RA_OK) fail_msg("rank %d: %s", rank, h->error[rank]);
        hand_synchronize(h);
        if (round == 0) memcpy(first.out, h->out, sizeof first.out);
        expect_numbers(h, &first);
        end(h);
    }
}

static void a_kernel_that_never_ends_is_a_timeout(void **state) {
    (void)state;
    for (int64_t number = 1; number < 4; number += 2) {
        char fault[32];
        snprintf(fault, sizeof fault, "stuck:1:%d", (int)number);
        hand *h = run_with(fault);
        expect(h, RA_TIMEOUT, "their devices have waited for each other for", timeout + 1 + 0.5 * test_patience());
        expect_no_numbers(h);
        end(h);
    }
}

static void a_failure_that_no_rank_has_died_of_is_told_by_the_rank_that_has_it(void **state) {
    (void)state;
    hand *h = run_with("fails:1:2");
    expect(h, RA_DEVICE, "NCCL failed: remote process error: the stand-in says so", timeout + 1.5 + 0.5 * test_patience());
    for (int rank = 0; rank < RANKS; rank++) assert_true(rank == 1 || strstr(h->error[rank], "rank 1 gave up"));
    expect_no_numbers(h);
    end(h);
}

/* The last exchange of the call. */
static void a_failure_that_ends_a_kernel_is_seen_by_the_call(void **state) {
    (void)state;
    hand *h = run_with("torn:1:4");
    expect(h, RA_DEVICE, "NCCL failed: remote process error: the stand-in says so", timeout + 1.5 + 0.5 * test_patience());
    expect_no_numbers(h);
    end(h);
}

/* The second call goes wrong: the GPU of rank 2 is busy when it comes, so that the kernels of its peers wait for it, and rank
 * 0's link breaks, whose kernels are aborted while its word is still on its way. */
static void *break_and_tell_later(void *arg) {
    ra_link *link = ((ra_comm *)arg)->link;
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    pthread_mutex_lock(&link->mutex);
    link->status = RA_ABORTED;
    snprintf(link->sentence, sizeof link->sentence, "rank 0 gave up: it is time");
    link->broke(link->broke_arg);
    pthread_mutex_unlock(&link->mutex);
    nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    pthread_mutex_lock(&link->mutex);
    ra_control_tell(link);
    pthread_mutex_unlock(&link->mutex);
    return NULL;
}

static void call_twice(void *arg, int rank) {
    hand *h = arg;
    pthread_t thread;
    void *memory = NULL;
    hand_call(h, rank);
    ra_cuda_synchronize(h->streams[rank]);
    for (int i = 0; i < NUMBERS; i++) h->q[rank][i] += 1;
    const bool breaks = rank == 0 && pthread_create(&thread, NULL, break_and_tell_later, h->ring.comms[rank]) == 0;
    if (rank == 2 && ra_cuda_alloc(2, &memory) == RA_OK) /* its stream is busy for a while */
        for (int i = 0; i < 5000; i++) ra_cuda_copy(memory, (char *)memory + 1, 1, h->streams[rank]);
    hand_call(h, rank);
    if (breaks) pthread_join(thread, NULL);
    ra_cuda_synchronize(h->streams[rank]);
    ra_cuda_free(memory);
}

static void what_a_rank_sends_on_when_it_is_aborted_is_no_result(void **state) {
    (void)state;
    const double usual = timeout;
    timeout = 30; /* between two heartbeats it is silent */
    hand *h = run_by("eager:0:5", call_twice);
    timeout = usual;
    expect(h, RA_ABORTED, "rank 0 gave up: it is time", 10);
    expect_no_numbers(h);
    end(h);
}

static void ranks_for_whom_nccl_does_not_start_stage_or_say_why_not(void **state) {
    (void)state;
    static hand right;
    for (int insists = 0; insists < 2; insists++) {
        setenv("RINGATTN_LANE", insists ? "nccl" : "staged", 1);
        hand *h = run_with("");
        hand_synchronize(h);
        right = *h;
        end(h);
        if (!insists) unsetenv("RINGATTN_LANE");
        h = run_with("starts:2");
        if (insists) expect(h, RA_NOT_AVAILABLE, "asks for NCCL, and rank 0 says: NCCL was not ready within ", timeout + 1);
        else expect_numbers(h, &right);
        end(h);
        h = run_with("stuck:1"); /* from the trial on */
        if (insists) expect(h, RA_NOT_AVAILABLE, "asks for NCCL, and rank 1 says: NCCL was not ready within ", timeout + 1);
        else expect_numbers(h, &right);
        end(h);
    }
}

static void an_abort_that_takes_too_long_is_not_waited_for(void **state) {
    (void)state;
    hand *h = run_with("slow:1:2");
    expect(h, RA_TIMEOUT, "their devices have waited for each other for", timeout + 1 + 0.5 * test_patience());
    const double begin = ra_seconds();
    ra_comm_destroy(h->ring.comms[1]);
    assert_true(ra_seconds() - begin < 2 * timeout + 1);
    h->ring.comms[1] = NULL;
    end(h); /* the others share the device, and wait for it */
}

/* Workspaces of three streams are one too many to keep: the third call frees one. */
static void call_on_three_streams(void *arg, int rank) {
    hand *h = arg;
    char others[2];
    void *streams[] = {&others[0], &others[1], h->streams[rank]};
    for (int i = 0; i < 3; i++) {
        h->streams[rank] = streams[i];
        hand_call(h, rank);
        if (i < 2) ra_cuda_synchronize(streams[i]); /* all write the same results */
    }
}

/* The trial and two calls of four exchanges each go well. */
static void a_call_that_fails_frees_nothing_that_would_wait_for_its_gpu(void **state) {
    (void)state;
    char fault[32];
    snprintf(fault, sizeof fault, "slow:1:9:%d", (int)(3 * timeout + 2));
    setenv("RINGATTN_STAND_IN_GPUS", "3", 1);
    gpus = RANKS;
    hand *h = run_by(fault, call_on_three_streams);
    gpus = 1;
    expect(h, RA_TIMEOUT, "their devices have waited for each other for", timeout + 1 + 0.5 * test_patience());
    end(h);
    unsetenv("RINGATTN_STAND_IN_GPUS");
}

/* From the trial on, before anybody has chosen NCCL. What the rank would stage instead would wait for the same GPU. */
static void a_rank_whose_gpu_stays_stuck_in_nccl_says_so_in_time(void **state) {
    (void)state;
    char fault[32];
    snprintf(fault, sizeof fault, "slow:1:0:%d", (int)(7 * timeout + 2));
    unsetenv("RINGATTN_LANE");
    setenv("RINGATTN_STAND_IN_GPUS", "3", 1);
    gpus = RANKS;
    hand *h = run_with(fault);
    gpus = 1;
    setenv("RINGATTN_LANE", "nccl", 1);
    expect(h, RA_DEVICE, "rank 1 gave up: its device is stuck in NCCL", 3 * timeout + 1 + 0.5 * test_patience());
    end(h);
    unsetenv("RINGATTN_STAND_IN_GPUS");
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    setenv("RINGATTN_NCCL", STAND_IN "/libringattn_cuda.so", 1);
    setenv("RINGATTN_LANE", "nccl", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nccl_gives_the_same_bits),
        cmocka_unit_test(a_lane_by_nccl_can_be_told_to_be_slow),
        cmocka_unit_test(a_rank_that_leaves_first_takes_nothing_with_it),
        cmocka_unit_test(a_kernel_that_never_ends_is_a_timeout),
        cmocka_unit_test(a_failure_that_no_rank_has_died_of_is_told_by_the_rank_that_has_it),
        cmocka_unit_test(a_failure_that_ends_a_kernel_is_seen_by_the_call),
        cmocka_unit_test(what_a_rank_sends_on_when_it_is_aborted_is_no_result),
        cmocka_unit_test(ranks_for_whom_nccl_does_not_start_stage_or_say_why_not),
        cmocka_unit_test(an_abort_that_takes_too_long_is_not_waited_for),
        cmocka_unit_test(a_call_that_fails_frees_nothing_that_would_wait_for_its_gpu),
        cmocka_unit_test(a_rank_whose_gpu_stays_stuck_in_nccl_says_so_in_time),
    };
    timeout = 0.4 * test_patience();
    return test_run_patiently("device_nccl", tests, sizeof tests / sizeof *tests, 0.4);
}
