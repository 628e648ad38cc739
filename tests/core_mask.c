/* The mask between two progressions, against the definition pair by pair. */
#include "core/mask.h"
#include "support.h"

typedef struct rows {
    int64_t pos, step, count;
} rows;

static rows draw_rows(test_rng *rng) { return (rows){rng_below(rng, 40) - 20, 1 + rng_below(rng, 5), 1 + rng_below(rng, 12)}; }
static int64_t at(const rows *r, int64_t i) { return r->pos + i * r->step; }
static int64_t draw_limit(test_rng *rng) { return rng_below(rng, 3) == 0 ? RA_NO_LIMIT : rng_below(rng, 25); }

static bool attends(int64_t left, int64_t right, int64_t x, int64_t y) {
    return (left == RA_NO_LIMIT || y >= x - left) && (right == RA_NO_LIMIT || y <= x + right);
}

static void the_keys_of_a_query_are_those_that_the_limits_let_through(void **state) {
    (void)state;
    test_rng rng = {test_seed(71)};
    for (int n = 0; n < 20000; n++) {
        const rows k = draw_rows(&rng);
        const int64_t left = draw_limit(&rng), right = draw_limit(&rng), x = rng_below(&rng, 60) - 30;
        int64_t begin, end;
        ra_mask_keys(left, right, x, x, k.pos, k.step, k.count, &begin, &end);
        assert_true(begin >= 0 && begin <= end);
        for (int64_t c = 0; c < k.count; c++) assert_int_equal(c >= begin && c < end, attends(left, right, x, at(&k, c)));
    }
}

static void the_queries_of_a_key_are_those_whose_keys_it_is_among(void **state) {
    (void)state;
    test_rng rng = {test_seed(72)};
    for (int n = 0; n < 20000; n++) {
        const rows q = draw_rows(&rng);
        const int64_t left = draw_limit(&rng), right = draw_limit(&rng), y = rng_below(&rng, 60) - 30;
        int64_t begin, end;
        ra_mask_queries(left, right, y, y, q.pos, q.step, q.count, &begin, &end);
        for (int64_t a = 0; a < q.count; a++) assert_int_equal(a >= begin && a < end, attends(left, right, at(&q, a), y));
    }
}

static void keys_outside_the_interval_of_many_queries_are_met_by_none(void **state) {
    (void)state;
    test_rng rng = {test_seed(73)};
    for (int n = 0; n < 5000; n++) {
        const rows q = draw_rows(&rng), k = draw_rows(&rng);
        const int64_t left = draw_limit(&rng), right = draw_limit(&rng);
        int64_t begin, end;
        ra_mask_keys(left, right, at(&q, 0), at(&q, q.count - 1), k.pos, k.step, k.count, &begin, &end);
        for (int64_t c = 0; c < k.count; c++)
            for (int64_t a = 0; a < q.count && (c < begin || c >= end); a++)
                assert_false(attends(left, right, at(&q, a), at(&k, c)));
    }
}

static void without_a_left_limit_later_queries_have_no_fewer_keys(void **state) {
    (void)state;
    test_rng rng = {test_seed(74)};
    for (int n = 0; n < 5000; n++) {
        const rows q = draw_rows(&rng), k = draw_rows(&rng);
        const int64_t left = draw_limit(&rng), right = draw_limit(&rng);
        int64_t before = 0, begin, end;
        for (int64_t a = 0; a < q.count && ra_mask_grows(left, right); a++) {
            ra_mask_keys(left, right, at(&q, a), at(&q, a), k.pos, k.step, k.count, &begin, &end);
            assert_true(end - begin >= before);
            before = end - begin;
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_keys_of_a_query_are_those_that_the_limits_let_through),
        cmocka_unit_test(the_queries_of_a_key_are_those_whose_keys_it_is_among),
        cmocka_unit_test(keys_outside_the_interval_of_many_queries_are_met_by_none),
        cmocka_unit_test(without_a_left_limit_later_queries_have_no_fewer_keys),
    };
    return cmocka_run_group_tests_name("mask", tests, NULL, NULL);
}
