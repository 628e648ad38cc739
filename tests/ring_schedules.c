/* Gather, merge and replicated queries: other ways to the same function, held to the same reference, bytes and memory
 * included. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

static void any_case(test_case *c, test_rng *rng, int64_t max_seq, int max_ranks) {
    test_case_random(c, rng, max_seq, max_ranks);
    if (c->transport == TEST_SELF) c->transport = TEST_THREADS;
}

static void draw_gather(test_case *c, test_rng *rng, int64_t n) {
    any_case(c, rng, n % 10 ? 40 : 150, 8);
    c->desc.schedule = RA_SCHEDULE_GATHER;
}

static void gather_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(71, 250, 4000, draw_gather);
}

static void draw_auto(test_case *c, test_rng *rng, int64_t n) {
    any_case(c, rng, n % 10 ? 40 : 150, 8);
    c->desc.schedule = RA_SCHEDULE_AUTO;
    if (rng_chance(rng, 40)) c->desc.query_placement = RA_REPLICATED;
}

static void auto_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(72, 150, 2000, draw_auto);
}

/* Every rank ends with the same bits of out, lse and dq: test_run compares them. */
static void draw_replicated(test_case *c, test_rng *rng, int64_t n) {
    static const ra_schedule schedules[] = {RA_SCHEDULE_MERGE, RA_SCHEDULE_AUTO, RA_SCHEDULE_RING, RA_SCHEDULE_GATHER};
    any_case(c, rng, n % 10 ? 40 : 150, 8);
    c->desc.query_placement = RA_REPLICATED;
    c->desc.schedule = schedules[n % 4];
}

static void replicated_queries_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(73, 250, 4000, draw_replicated);
}

/* Decode: one query, or a few, against a sharded cache. */
static void draw_decoding(test_case *c, test_rng *rng, int64_t n) {
    any_case(c, rng, 200, 8);
    c->desc.query_placement = RA_REPLICATED;
    c->desc.schedule = n % 3 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_AUTO;
    c->desc.seq_q = n % 4 ? 1 : 3;
    c->desc.causal = true;
}

static void decoding_matches_the_reference(void **state) {
    (void)state;
    test_cases_hold(74, 120, 2000, draw_decoding);
}

static void draw_large_ring(test_case *c, test_rng *rng, int64_t n) {
    any_case(c, rng, 130, 1);
    c->ranks = n % 3 ? 64 : (int)(9 + rng_below(rng, 50));
    c->desc.threads = 1;
    c->desc.query_placement = n % 2 ? RA_REPLICATED : RA_SHARDED;
    c->desc.schedule = n % 2 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_GATHER;
}

static void other_schedules_on_up_to_64_ranks_match_the_reference(void **state) {
    (void)state;
    test_cases_hold(75, 18, 200, draw_large_ring);
}

static void draw_either(test_case *c, test_rng *rng, int64_t n) {
    any_case(c, rng, 40, 8);
    c->desc.query_placement = n % 2 ? RA_REPLICATED : RA_SHARDED;
    c->desc.schedule = n % 2 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_GATHER;
}

static void poison_stays_where_it_is(void **state) {
    (void)state;
    assert_true(test_poisoned_cases_hold(76, 120, 2000, draw_either) > 500);
}

static void the_same_bits_every_time(void **state) {
    (void)state;
    test_rng rng = {test_seed(77)};
    for (int64_t n = test_cases(60, 600); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, 80, 6);
        c.desc.query_placement = n % 2 ? RA_REPLICATED : RA_SHARDED;
        c.desc.schedule = n % 2 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_GATHER;
        c.desc.threads = 1;
        c.transport = TEST_THREADS;
        test_data data = test_data_create(&c);
        test_result first = test_run(&c, &data);
        c.transport = TEST_CUSTOM;
        c.desc.threads = 1 + (int32_t)rng_below(&rng, 4);
        test_result second = test_run(&c, &data);
        const char *difference = test_difference(&c, &first, &second);
        char text[2048];
        if (first.status != RA_OK) fail_msg("%s: %s", test_case_text(&c, text, sizeof text), first.error);
        if (difference) fail_msg("%s differs: %s", difference, test_case_text(&c, text, sizeof text));
        test_result_free(&first);
        test_result_free(&second);
        test_data_free(&data);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_matches_the_reference),
        cmocka_unit_test(auto_matches_the_reference),
        cmocka_unit_test(replicated_queries_match_the_reference),
        cmocka_unit_test(decoding_matches_the_reference),
        cmocka_unit_test(other_schedules_on_up_to_64_ranks_match_the_reference),
        cmocka_unit_test(poison_stays_where_it_is),
        cmocka_unit_test(the_same_bits_every_time),
    };
    return cmocka_run_group_tests_name("schedules", tests, NULL, test_print_worst);
}
