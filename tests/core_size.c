/* Checked and floored integer arithmetic. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/size.h"

static void checked_sums_and_products_report_overflow_at_the_edges(void **state) {
    (void)state;
    int64_t r = 0;
    assert_true(ra_add(INT64_MAX - 1, 1, &r) && r == INT64_MAX);
    assert_false(ra_add(INT64_MAX, 1, &r));
    assert_false(ra_add(INT64_MIN, -1, &r));
    assert_true(ra_mul(INT64_C(3037000499), INT64_C(3037000499), &r) && r == INT64_C(9223372030926249001));
    assert_false(ra_mul(INT64_C(3037000500), INT64_C(3037000500), &r));
    assert_false(ra_mul(INT64_MIN, -1, &r));
    assert_true(ra_mul(INT64_MIN, 1, &r) && r == INT64_MIN);
}

static void saturating_forms_stop_at_the_largest_value_and_stay_there(void **state) {
    (void)state;
    assert_int_equal(ra_sat_add(2, 3), 5);
    assert_int_equal(ra_sat_add(INT64_MAX, 1), INT64_MAX);
    assert_int_equal(ra_sat_mul(INT64_C(1) << 32, INT64_C(1) << 31), INT64_MAX);
    assert_int_equal(ra_sat_mul(INT64_C(1) << 31, INT64_C(1) << 31), INT64_C(1) << 62);
    assert_int_equal(ra_sat_add(ra_sat_mul(INT64_MAX, 2), 7), INT64_MAX);
}

static void division_floors_and_ceils_for_negative_numbers_too(void **state) {
    (void)state;
    for (int64_t a = -50; a <= 50; a++)
        for (int64_t b = 1; b <= 12; b++) {
            int64_t floor = ra_floor_div(a, b), ceil = ra_ceil_div(a, b), mod = ra_mod(a, b);
            assert_true(floor * b <= a && (floor + 1) * b > a);
            assert_true(ceil * b >= a && (ceil - 1) * b < a);
            assert_true(mod >= 0 && mod < b);
            assert_int_equal(floor * b + mod, a);
        }
    assert_int_equal(ra_floor_div(INT64_MIN, 1), INT64_MIN);
    assert_int_equal(ra_floor_div(INT64_MIN, INT64_MAX), -2);
    assert_int_equal(ra_ceil_div(INT64_MIN, INT64_MAX), -1);
    assert_int_equal(ra_ceil_div(INT64_MAX, 2), INT64_C(1) << 62);
    assert_int_equal(ra_mod(INT64_MIN, INT64_MAX), INT64_MAX - 1);
}

static void rounding_up_reaches_the_next_multiple(void **state) {
    (void)state;
    assert_int_equal(ra_round_up(0, 64), 0);
    assert_int_equal(ra_round_up(1, 64), 64);
    assert_int_equal(ra_round_up(64, 64), 64);
    assert_int_equal(ra_round_up(65, 64), 128);
}

static int64_t gcd_by_trial(int64_t a, int64_t b) {
    for (int64_t d = a > b ? a : b; d > 0; d--)
        if (a % d == 0 && b % d == 0) return d;
    return 0;
}

static void gcd_is_the_largest_common_divisor(void **state) {
    (void)state;
    for (int64_t a = 0; a <= 40; a++)
        for (int64_t b = 0; b <= 40; b++) {
            assert_int_equal(ra_gcd(a, b), gcd_by_trial(a, b));
            assert_int_equal(ra_gcd(-a, b), ra_gcd(a, b));
            assert_int_equal(ra_gcd(a, -b), ra_gcd(a, b));
        }
    assert_int_equal(ra_gcd(INT64_MAX, INT64_MAX - 1), 1);
    assert_int_equal(ra_gcd(INT64_MIN, 96), 32);
    assert_int_equal(ra_gcd(INT64_C(7516192768), INT64_C(3221225472)), INT64_C(1) << 30);
}

static void inverse_times_the_number_is_one_modulo_m(void **state) {
    (void)state;
    for (int64_t m = 1; m <= 60; m++)
        for (int64_t a = -60; a <= 120; a++) {
            if (ra_gcd(a, m) != 1) continue;
            int64_t x = ra_inverse(a, m);
            assert_true(x >= 0 && x < m);
            assert_int_equal(ra_mod(a * x, m), 1 % m);
        }
    /* A large prime modulus and a large power of two, checked in 128 bits. */
    const int64_t moduli[] = {INT64_MAX - 24, INT64_C(1) << 62}, numbers[] = {3, 1000003, INT64_C(4611686018427387903)};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 3; j++) {
            if (ra_gcd(numbers[j], moduli[i]) != 1) continue;
            __extension__ __int128 product = (__int128)numbers[j] * ra_inverse(numbers[j], moduli[i]);
            assert_true(product % moduli[i] == 1);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checked_sums_and_products_report_overflow_at_the_edges),
        cmocka_unit_test(saturating_forms_stop_at_the_largest_value_and_stay_there),
        cmocka_unit_test(division_floors_and_ceils_for_negative_numbers_too),
        cmocka_unit_test(rounding_up_reaches_the_next_multiple),
        cmocka_unit_test(gcd_is_the_largest_common_divisor),
        cmocka_unit_test(inverse_times_the_number_is_one_modulo_m),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
