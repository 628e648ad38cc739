/* Spans and the closed-form counts over them, against loops. */
#include "core/item.h"
#include "core/span.h"
#include "geometry/count.h"
#include "support.h"

static ra_span random_span(test_rng *rng, int64_t max_step, int64_t max_count) {
    return (ra_span){rng_below(rng, 41) - 20, 1 + rng_below(rng, max_step), rng_below(rng, max_count + 1)};
}

static bool contains(ra_span s, int64_t x) {
    for (int64_t n = 0; n < s.count; n++) {
        if (s.start + n * s.step == x) return true;
    }
    return false;
}

static void a_clip_keeps_exactly_the_elements_in_range(void **state) {
    (void)state;
    test_rng rng = {test_seed(61)};
    for (int n = 0; n < 3000; n++) {
        ra_span s = random_span(&rng, 7, 12);
        int64_t lo = rng_below(&rng, 120) - 60, hi = rng_below(&rng, 120) - 60;
        ra_span clip = ra_span_clip(s, lo, hi);
        assert_true(clip.count >= 0);
        for (int64_t x = -80; x < 120; x++) assert_int_equal(contains(clip, x), contains(s, x) && x >= lo && x < hi);
    }
}

static void an_intersection_holds_exactly_the_elements_of_both(void **state) {
    (void)state;
    test_rng rng = {test_seed(62)};
    int64_t some = 0;
    for (int n = 0; n < 3000; n++) {
        ra_span a = random_span(&rng, 9, 15), b = random_span(&rng, 9, 15), both = ra_span_intersect(a, b);
        for (int64_t x = -30; x < 160; x++) assert_int_equal(contains(both, x), contains(a, x) && contains(b, x));
        some += both.count > 1;
    }
    assert_true(some > 100);
}

/* Neither a rate of up to 2^40 against a stripe of up to 2^20 ranks nor two such rates overflow on the way. */
static void intersections_of_huge_spans_are_exact(void **state) {
    (void)state;
    test_rng rng = {test_seed(63)};
    for (int n = 0; n < 2000; n++) {
        int64_t step_a = 1 + rng_below(&rng, (int64_t)1 << 40),
                step_b = 1 + rng_below(&rng, (int64_t)1 << (1 + rng_below(&rng, 40)));
        int64_t meet = rng_below(&rng, (int64_t)1 << 40), before_a = rng_below(&rng, 1000), before_b = rng_below(&rng, 1000);
        ra_span a = {meet - before_a * step_a, step_a, before_a + 1 + rng_below(&rng, 1000)};
        ra_span b = {meet - before_b * step_b, step_b, before_b + 1 + rng_below(&rng, 1000)};
        ra_span both = ra_span_intersect(a, b);
        assert_true(both.count >= 1);
        bool found = false;
        for (int64_t i = 0; i < both.count && i < 4000; i++) {
            int64_t x = both.start + i * both.step;
            assert_true((x - a.start) % a.step == 0 && x >= a.start && (x - a.start) / a.step < a.count);
            assert_true((x - b.start) % b.step == 0 && x >= b.start && (x - b.start) / b.step < b.count);
            found |= x == meet;
        }
        assert_true(found);
    }
}

/* Two steps without a common divisor whose product is beyond 2^63: they meet once or not at all. */
static void spans_of_coprime_huge_steps_meet_at_most_once(void **state) {
    (void)state;
    ra_span a = {0, 4261281277, 200}, b = {0, 4261281269, 200};
    ra_span both = ra_span_intersect(a, b);
    assert_true(both.start == 0 && both.count == 1 && both.step > 0);
    b.start = 7;
    assert_true(ra_span_intersect(a, b).count == 0);
    b.start = 100 * a.step - 50 * b.step;
    both = ra_span_intersect(a, b);
    assert_true(both.start == 100 * a.step && both.count == 1 && both.step > 0);
}

static int64_t random_limit(test_rng *rng) {
    return rng_chance(rng, 30) ? RA_NO_LIMIT : rng_chance(rng, 30) ? 0 : rng_below(rng, 25);
}

static bool sees(int64_t x, int64_t y, int64_t left, int64_t right) {
    return (left == RA_NO_LIMIT || y >= x - left) && (right == RA_NO_LIMIT || y <= x + right);
}

static void counts_equal_those_of_a_loop(void **state) {
    (void)state;
    test_rng rng = {test_seed(65)};
    for (int64_t n = test_cases(20000, 400000); n > 0; n--) {
        ra_span q = random_span(&rng, 6, 14), k = random_span(&rng, 6, 14);
        int64_t left = random_limit(&rng), right = random_limit(&rng), rate = 1 + rng_below(&rng, 6);
        ra_span every = k;
        every.step = 1;
        int64_t pairs = 0, covered = 0, pairs_residue = 0, covered_residue = 0;
        for (int64_t i = 0; i < q.count; i++) {
            int64_t x = q.start + i * q.step, met = 0, met_residue = 0;
            for (int64_t j = 0; j < k.count; j++) {
                met += sees(x, k.start + j * k.step, left, right);
                met_residue += sees(x, every.start + j, left, right) && (x - every.start - j) % rate == 0;
            }
            pairs += met;
            covered += met > 0;
            pairs_residue += met_residue;
            covered_residue += met_residue > 0;
        }
        bool held = ra_count_pairs(q, k, left, right) == pairs && ra_count_covered(q, k, left, right) == covered &&
                    ra_count_pairs_residue(q, every, rate, left, right) == pairs_residue &&
                    ra_count_covered_residue(q, every, rate, left, right) == covered_residue;
        if (!held) {
            fail_msg("queries %lld+%lld*%lld keys %lld+%lld*%lld window %lld,%lld rate %lld: pairs %lld (%lld) covered %lld "
                     "(%lld) residue "
                     "pairs %lld (%lld) covered %lld (%lld)",
                     (long long)q.start, (long long)q.step, (long long)q.count, (long long)k.start, (long long)k.step,
                     (long long)k.count, (long long)left, (long long)right, (long long)rate,
                     (long long)ra_count_pairs(q, k, left, right), (long long)pairs,
                     (long long)ra_count_covered(q, k, left, right), (long long)covered,
                     (long long)ra_count_pairs_residue(q, every, rate, left, right), (long long)pairs_residue,
                     (long long)ra_count_covered_residue(q, every, rate, left, right), (long long)covered_residue);
        }
    }
}

static void counts_beyond_63_bits_saturate(void **state) {
    (void)state;
    ra_span all = {0, 1, (int64_t)1 << 40};
    assert_true(ra_count_pairs(all, all, RA_NO_LIMIT, RA_NO_LIMIT) == INT64_MAX);
    assert_true(ra_count_pairs(all, all, RA_NO_LIMIT, 0) == INT64_MAX);
    assert_true(ra_count_pairs_residue(all, all, 1, RA_NO_LIMIT, RA_NO_LIMIT) == INT64_MAX);
    assert_true(ra_count_covered(all, all, 3, 3) == (int64_t)1 << 40);
    ra_span billion = {0, 1, 1000000000};
    assert_true(ra_count_pairs(billion, billion, RA_NO_LIMIT, 0) == 500000000500000000);
    assert_true(ra_count_pairs(billion, billion, 1, 1) == 2999999998);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_clip_keeps_exactly_the_elements_in_range),
        cmocka_unit_test(an_intersection_holds_exactly_the_elements_of_both),
        cmocka_unit_test(intersections_of_huge_spans_are_exact),
        cmocka_unit_test(spans_of_coprime_huge_steps_meet_at_most_once),
        cmocka_unit_test(counts_equal_those_of_a_loop),
        cmocka_unit_test(counts_beyond_63_bits_saturate),
    };
    return cmocka_run_group_tests_name("spans and counts", tests, NULL, NULL);
}
