/* Decoding: one query against a cache of keys that grows by one with every call. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support.h"
#include "support_sanitized.h"

#define SLOW_BUILD (TEST_SANITIZED ? 30 : 1)

static void decode_case(test_case *c, int pattern, int ranks) {
    test_case_init(c);
    c->ranks = ranks;
    c->transport = TEST_CUSTOM;
    c->backward = false;
    c->desc.heads = 4;
    c->desc.kv_heads = 2;
    c->desc.seq_q = 1;
    c->desc.causal = true;
    c->desc.threads = 1;
    if (ranks > 1) c->desc.query_placement = RA_REPLICATED;
    if (pattern > 0) {
        c->desc.branches = 2;
        c->desc.combine = RA_COMBINE_MIX;
        c->desc.dilate_queries = pattern == 2;
        c->segment_lengths[0] = 16;
        c->segment_lengths[1] = 0;
        c->dilation_rates[0] = 1;
        c->dilation_rates[1] = 3;
    }
    test_case_link(c);
}

static int64_t total_messages(const test_ring *ring, bool agreements) {
    int64_t sum = 0;
    for (int rank = 0; rank < ring->ranks; rank++)
        sum += agreements ? ring->traffic[rank].agreements : ring->traffic[rank].messages;
    return sum;
}

static void every_length_of_a_growing_cache_matches_the_reference(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 5; ranks += ranks == 1 ? 1 : 3) {
        for (int pattern = 0; pattern < 3; pattern++) {
            test_case c;
            test_ring ring;
            decode_case(&c, pattern, ranks);
            test_ring_open(&ring, ranks, TEST_CUSTOM);
            for (c.desc.seq_k = 1; c.desc.seq_k <= (test_long() ? 300 : 70); c.desc.seq_k++) test_case_holds_on(&ring, &c);
            test_ring_close(&ring);
        }
    }
}

/* A token costs the messages of one merge: each rank but the first sends its state to its parent and gets the merged state. The
 * ranks agree on every new length by the headers alone; only the first call of a communicator agrees by itself. */
static void a_token_costs_no_message_beyond_the_merge(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 7; ranks++) {
        test_case c;
        test_ring ring;
        decode_case(&c, ranks % 3, ranks);
        test_ring_open(&ring, ranks, TEST_CUSTOM);
        c.desc.seq_k = 20;
        test_case_holds_on(&ring, &c);
        int64_t agreements = total_messages(&ring, true), messages = total_messages(&ring, false);
        assert_true(agreements > 0);
        for (int token = 1; token <= 10; token++) {
            c.desc.seq_k++;
            test_case_holds_on(&ring, &c);
            assert_int_equal(total_messages(&ring, true), agreements);
            assert_int_equal(total_messages(&ring, false) - messages, token * 2 * (ranks - 1));
        }
        test_ring_close(&ring);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- cost */

static int64_t allocations, allocated_bytes;

static void *counted_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    allocations++;
    allocated_bytes += (int64_t)bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void counted_free(void *ctx, void *ptr, size_t bytes) {
    (void)ctx;
    (void)bytes;
    free(ptr);
}

/* Of this thread's own work: whatever else the machine does is not its time. */
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The cost of a new length on one rank, of which no call before has heard. */
static void a_new_length_is_planned_in_under_50_us_with_few_allocations_of_few_bytes(void **state) {
    (void)state;
    static const ra_allocator counted = {counted_alloc, counted_free, NULL};
    enum { LENGTHS = 400 };
    ra_set_allocator(&counted);
    for (int pattern = 0; pattern < 3; pattern++) {
        test_case c;
        ra_comm *comm;
        double times[LENGTHS];
        int64_t most = 0, most_bytes = 0;
        decode_case(&c, pattern, 1);
        c.desc.heads = c.desc.kv_heads = 8;
        c.desc.head_dim = 64;
        assert_int_equal(ra_comm_self(&comm), RA_OK);
        for (int i = 0; i < LENGTHS; i++) {
            ra_plan *plan;
            c.desc.seq_k = 100000 + i;
            int64_t allocations_before = allocations, bytes_before = allocated_bytes;
            double start = seconds();
            assert_int_equal(ra_plan_create(comm, &c.desc, &plan), RA_OK);
            times[i] = seconds() - start;
            ra_plan_destroy(plan);
            if (i == 0) continue;
            most = allocations - allocations_before > most ? allocations - allocations_before : most;
            most_bytes = allocated_bytes - bytes_before > most_bytes ? allocated_bytes - bytes_before : most_bytes;
        }
        qsort(times, LENGTHS, sizeof *times, by_value);
        print_message("pattern %d: %.1f us in the middle, %.1f us at best, %lld allocations, %lld bytes\n", pattern,
                      1e6 * times[LENGTHS / 2], 1e6 * times[0], (long long)most, (long long)most_bytes);
        assert_true(most <= 8);
        assert_true(most_bytes <= 64 << 10);
        assert_true(times[LENGTHS / 2] < 50e-6 * SLOW_BUILD);
        ra_comm_destroy(comm);
    }
    ra_set_allocator(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_length_of_a_growing_cache_matches_the_reference),
        cmocka_unit_test(a_token_costs_no_message_beyond_the_merge),
        cmocka_unit_test(a_new_length_is_planned_in_under_50_us_with_few_allocations_of_few_bytes),
    };
    return cmocka_run_group_tests_name("decoding", tests, NULL, NULL);
}
