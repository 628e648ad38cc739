/* Every allocation of the transport fails once, and once for good: a clean error on all ranks, nothing leaked, nobody waits for
 * ever. */
#include "transport_group.h"

#include <stdatomic.h>

static atomic_llong calls, failing_from, failing_count, live_blocks, injected;

static void *failing_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    long long call = atomic_fetch_add(&calls, 1), first = atomic_load(&failing_from);
    if (first >= 0 && call >= first && call - first < atomic_load(&failing_count)) {
        atomic_fetch_add(&injected, 1);
        return NULL;
    }
    void *block = aligned_alloc(align, (bytes + align - 1) / align * align + (bytes == 0 ? align : 0));
    if (block) atomic_fetch_add(&live_blocks, 1);
    return block;
}

static void counting_free(void *ctx, void *block, size_t bytes) {
    (void)ctx;
    (void)bytes;
    if (block) atomic_fetch_sub(&live_blocks, 1);
    free(block);
}

static bool may_follow(ra_status status) { return status == RA_OK || status == RA_NOMEM || status == RA_PEER_LOST; }

static void nomem_body(rank_run *run) {
    int all[MOST_RANKS];
    ring_job job = {.steps = 3, .payload = 2000, .slow = -1};
    ra_status status = ra_link_allgather(run->link, &run->rank, all, sizeof run->rank, "plan");
    if (status == RA_OK) status = pass_around(run->link, &job);
    note_failure(run, status);
    EXPECT(run, may_follow(status));
    EXPECT(run, status == RA_OK || run->sentence[0]);
}

/* Set-up, agreement, a ring and the end, with allocation number `nth` failing. True if it failed. */
static bool try_one(long long nth, long long count) {
    ra_comm_ops ops;
    void *ctxs[2];
    group g = {.ranks = 2};
    rank_run runs[MOST_RANKS];
    bool failed = false;
    long long noticeable = 0;
    atomic_store(&calls, 0);
    atomic_store(&injected, 0);
    atomic_store(&failing_count, count);
    atomic_store(&failing_from, nth);
    ra_status status = ra_transport_threads(2, &ops, ctxs);
    if (status == RA_OK) {
        for (int rank = 0; rank < 2; rank++) {
            status = ra_link_create(&ops, ctxs[rank], rank, 2, "threads", &g.links[rank]);
            if (status != RA_OK && status != RA_NOMEM) fail_msg("creating: %s", ra_last_error());
            failed |= status != RA_OK;
        }
        for (int rank = 0; rank < 2; rank++)
            if (g.links[rank]) ra_link_set_timeout(g.links[rank], 0.5 * test_patience(), 0.5 * test_patience());
        if (g.links[0] && g.links[1]) {
            start_ranks(&g, runs, nomem_body, NULL);
            join_ranks(&g, runs);
            for (int rank = 0; rank < 2; rank++) {
                if (runs[rank].complaint[0]) fail_msg("allocation %lld: %s", nth, runs[rank].complaint);
                failed |= runs[rank].status != RA_OK;
            }
        } else if (g.links[0] || g.links[1]) {
            rank_run run = {.g = &g, .rank = g.links[0] ? 0 : 1, .link = g.links[0] ? g.links[0] : g.links[1]};
            nomem_body(&run);
            if (run.complaint[0] || run.status == RA_OK) fail_msg("allocation %lld: alone and content: %s", nth, run.complaint);
        }
        for (int rank = 0; rank < 2; rank++) failed |= g.links[rank] && ra_link_status(g.links[rank]) != RA_OK;
        noticeable = atomic_load(&injected); /* a last word that is not said harms nobody */
        group_close(&g);
    } else {
        assert_int_equal(status, RA_NOMEM);
        failed = true;
    }
    atomic_store(&failing_from, -1);
    assert_int_equal(atomic_load(&live_blocks), 0);
    if (noticeable > 0 && !failed) fail_msg("allocation %lld failed and nobody noticed", nth);
    return atomic_load(&injected) > 0;
}

static void every_allocation_that_fails_is_a_clean_error_on_both_ranks_and_leaks_nothing(void **state) {
    (void)state;
    int once = 0, for_good = 0;
    while (try_one(once, 1)) once++;
    while (try_one(for_good, INT64_MAX)) for_good++;
    assert_true(once > 20 && for_good > 20);
    print_message("%d allocations failed once, %d for good\n", once, for_good);
}

int main(void) {
    const ra_allocator allocator = {.alloc = failing_alloc, .free = counting_free};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_that_fails_is_a_clean_error_on_both_ranks_and_leaks_nothing),
    };
    atomic_store(&failing_from, -1);
    ra_set_allocator(&allocator);
    return test_run_patiently("transport_nomem", tests, sizeof tests / sizeof *tests, 0.5);
}
