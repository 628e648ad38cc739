/* The same bits: whatever may not change the result changes nothing at all. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

static void same_bits(const test_case *a, const test_data *data, const test_result *first, const test_case *b) {
    test_result second = test_run(b, data);
    char text[2048];
    if (second.status != RA_OK) fail_msg("%s: %s", test_case_text(b, text, sizeof text), second.error);
    const char *difference = test_difference(a, first, &second);
    if (difference) {
        print_error("case: %s\n", test_case_text(a, text, sizeof text));
        fail_msg("%s differs in: %s", difference, test_case_text(b, text, sizeof text));
    }
    test_result_free(&second);
}

static void random_case(test_case *c, test_rng *rng, int64_t max_seq) {
    test_case_random(c, rng, max_seq, 6);
    c->desc.threads = 1;
}

static void the_same_call_twice_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(41)};
    for (int64_t n = test_cases(60, 800); n > 0; n--) {
        test_case c;
        random_case(&c, &rng, 100);
        test_data data = test_data_create(&c);
        test_ring ring;
        test_ring_open(&ring, c.ranks, c.transport);
        test_result first = test_run_on(&ring, &c, &data), again = test_run_on(&ring, &c, &data);
        assert_int_equal(first.status, RA_OK);
        const char *difference = test_difference(&c, &first, &again);
        char text[2048];
        if (difference) fail_msg("%s differs the second time: %s", difference, test_case_text(&c, text, sizeof text));
        /* The second plan came from the cache. */
        assert_true(again.forward[0].cache_hits > first.forward[0].cache_hits);
        same_bits(&c, &data, &first, &c);
        test_ring_close(&ring);
        test_result_free(&first);
        test_result_free(&again);
        test_data_free(&data);
    }
}

static void one_two_and_four_threads_give_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(42)};
    for (int64_t n = test_cases(40, 400); n > 0; n--) {
        test_case c;
        random_case(&c, &rng, 60);
        if (n % 2) { /* enough rows for every worker */
            c.desc.batch = 1;
            c.desc.seq_q = c.desc.seq_k = 200 + rng_below(&rng, 200);
            c.key_range = false;
            if (c.desc.bucket == 1) c.desc.bucket = 0;
            test_case_link(&c);
        }
        test_data data = test_data_create(&c);
        test_result first = test_run(&c, &data);
        test_case other = c;
        test_case_link(&other);
        other.desc.threads = 2;
        same_bits(&c, &data, &first, &other);
        other.desc.threads = 4;
        same_bits(&c, &data, &first, &other);
        test_result_free(&first);
        test_data_free(&data);
    }
}

static void every_transport_gives_the_same_bits(void **state) {
    (void)state;
    test_rng rng = {test_seed(43)};
    for (int64_t n = test_cases(60, 600); n > 0; n--) {
        test_case c;
        random_case(&c, &rng, 80);
        if (n % 2) c.ranks = 1;
        c.transport = TEST_THREADS;
        test_data data = test_data_create(&c);
        test_result first = test_run(&c, &data);
        test_case other = c;
        test_case_link(&other);
        other.transport = TEST_CUSTOM;
        same_bits(&c, &data, &first, &other);
        other.transport = TEST_SELF;
        if (c.ranks == 1) same_bits(&c, &data, &first, &other);
        test_result_free(&first);
        test_data_free(&data);
    }
}

static void strides_and_checksums_do_not_change_a_bit(void **state) {
    (void)state;
    test_rng rng = {test_seed(44)};
    for (int64_t n = test_cases(40, 400); n > 0; n--) {
        test_case c;
        random_case(&c, &rng, 80);
        test_data data = test_data_create(&c);
        test_result first = test_run(&c, &data);
        test_case other = c;
        test_case_link(&other);
        other.desc.checksum = !c.desc.checksum;
        for (int strides = 0; strides < TEST_STRIDES; strides++) {
            other.strides = (test_strides)strides;
            same_bits(&c, &data, &first, &other);
        }
        test_result_free(&first);
        test_data_free(&data);
    }
}

/* Which rows a poisoned neighbour lies in, or what buffers held before, is nobody's business: a ring that ran other cases
 * first. */
static void what_ran_before_does_not_change_a_bit(void **state) {
    (void)state;
    test_rng rng = {test_seed(45)};
    for (int round = 0; round < 4; round++) {
        test_ring ring;
        int ranks = 1 + round;
        test_ring_open(&ring, ranks, TEST_THREADS);
        for (int64_t n = test_cases(25, 200); n > 0; n--) {
            test_case c;
            random_case(&c, &rng, 60);
            c.ranks = ranks;
            c.transport = TEST_THREADS;
            test_data data = test_data_create(&c);
            test_result here = test_run_on(&ring, &c, &data);
            char text[2048];
            if (here.status != RA_OK) fail_msg("%s: %s", test_case_text(&c, text, sizeof text), here.error);
            same_bits(&c, &data, &here, &c);
            test_result_free(&here);
            test_data_free(&data);
        }
        test_ring_close(&ring);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_call_twice_gives_the_same_bits),
        cmocka_unit_test(one_two_and_four_threads_give_the_same_bits),
        cmocka_unit_test(every_transport_gives_the_same_bits),
        cmocka_unit_test(strides_and_checksums_do_not_change_a_bit),
        cmocka_unit_test(what_ran_before_does_not_change_a_bit),
    };
    return cmocka_run_group_tests_name("same bits", tests, NULL, NULL);
}
