/* Gather, merge and replicated queries: other ways to the same function, held to the same reference, bytes and memory included. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

static void any_case(test_case *c, test_rng *rng, int64_t max_seq, int max_ranks) {
    test_case_random(c, rng, max_seq, max_ranks);
    if (c->transport == TEST_SELF) c->transport = TEST_THREADS;
}

static void gather_matches_the_reference(void **state) {
    (void)state;
    test_rng rng = {test_seed(71)};
    for (int64_t n = test_cases(250, 4000); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, n % 10 ? 40 : 150, 8);
        c.desc.schedule = RA_SCHEDULE_GATHER;
        test_case_holds(&c);
    }
}

static void auto_matches_the_reference(void **state) {
    (void)state;
    test_rng rng = {test_seed(72)};
    for (int64_t n = test_cases(150, 2000); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, n % 10 ? 40 : 150, 8);
        c.desc.schedule = RA_SCHEDULE_AUTO;
        if (rng_chance(&rng, 40)) c.desc.query_placement = RA_REPLICATED;
        test_case_holds(&c);
    }
}

/* Every rank ends with the same bits of out, lse and dq: test_run compares them. */
static void replicated_queries_match_the_reference(void **state) {
    (void)state;
    static const ra_schedule schedules[] = {RA_SCHEDULE_MERGE, RA_SCHEDULE_AUTO, RA_SCHEDULE_RING, RA_SCHEDULE_GATHER};
    test_rng rng = {test_seed(73)};
    for (int64_t n = test_cases(250, 4000); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, n % 10 ? 40 : 150, 8);
        c.desc.query_placement = RA_REPLICATED;
        c.desc.schedule = schedules[n % 4];
        test_case_holds(&c);
    }
}

/* Decode: one query, or a few, against a sharded cache. */
static void decoding_matches_the_reference(void **state) {
    (void)state;
    test_rng rng = {test_seed(74)};
    for (int64_t n = test_cases(120, 2000); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, 200, 8);
        c.desc.query_placement = RA_REPLICATED;
        c.desc.schedule = n % 3 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_AUTO;
        c.desc.seq_q = n % 4 ? 1 : 3;
        c.desc.causal = true;
        test_case_holds(&c);
    }
}

static void other_schedules_on_up_to_64_ranks_match_the_reference(void **state) {
    (void)state;
    test_rng rng = {test_seed(75)};
    for (int64_t n = test_cases(18, 200); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, 130, 1);
        c.ranks = n % 3 ? 64 : (int)(9 + rng_below(&rng, 50));
        c.desc.threads = 1;
        c.desc.query_placement = n % 2 ? RA_REPLICATED : RA_SHARDED;
        c.desc.schedule = n % 2 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_GATHER;
        test_case_holds(&c);
    }
}

static void poison_stays_where_it_is(void **state) {
    (void)state;
    test_rng rng = {test_seed(76)};
    int64_t poisoned = 0;
    for (int64_t n = test_cases(120, 2000); n > 0; n--) {
        test_case c;
        any_case(&c, &rng, 40, 8);
        c.desc.query_placement = n % 2 ? RA_REPLICATED : RA_SHARDED;
        c.desc.schedule = n % 2 ? RA_SCHEDULE_MERGE : RA_SCHEDULE_GATHER;
        test_data data = test_data_create(&c);
        poisoned += test_data_poison(&c, &data);
        test_result result = test_run(&c, &data);
        test_result_holds(&c, &data, &result);
        test_result_free(&result);
        test_data_free(&data);
    }
    assert_true(poisoned > 500);
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

static int print_worst(void **state) {
    (void)state;
    test_print_worst();
    return 0;
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
    return cmocka_run_group_tests_name("schedules", tests, NULL, print_worst);
}
