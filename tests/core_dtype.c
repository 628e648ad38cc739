/* Element types and their conversions. Rounding is checked at every tie and just beside it, which pins down a monotone
 * function. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "core/dtype.h"

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* The value of an f16 from its definition. */
static double f16_value(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent == 31 ? INFINITY : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

static double bf16_value(uint16_t h) {
    int exponent = h >> 7 & 255, fraction = h & 127;
    double magnitude = exponent == 255 ? INFINITY : exponent ? ldexp(128 + fraction, exponent - 134) : ldexp(fraction, -133);
    return h & 0x8000 ? -magnitude : magnitude;
}

static void every_f16_value_widens_exactly_and_round_trips(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float wide = ra_f16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) {
            assert_true(isnan(wide));
            assert_int_equal(ra_f32_to_f16(wide), h | 0x0200); /* NaNs come back quiet */
            continue;
        }
        assert_true((double)wide == f16_value((uint16_t)h));
        assert_int_equal(signbit(wide) != 0, h >> 15);
        assert_int_equal(ra_f32_to_f16(wide), h);
    }
}

static void every_bf16_value_widens_exactly_and_round_trips(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float wide = ra_bf16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7f80) {
            assert_true(isnan(wide));
            assert_int_equal(ra_f32_to_bf16(wide), h | 0x0040);
            continue;
        }
        assert_true((double)wide == bf16_value((uint16_t)h));
        assert_int_equal(ra_f32_to_bf16(wide), h);
    }
}

static uint16_t f16_from_f64(double d) {
    uint16_t h;
    ra_convert(&h, RA_F16, &d, RA_F64, 1);
    return h;
}

static uint16_t bf16_from_f64(double d) {
    uint16_t h;
    ra_convert(&h, RA_BF16, &d, RA_F64, 1);
    return h;
}

/* Between neighbours `low` and `low + 1` of a 16-bit type: `middle` goes to the even one, its neighbours to the nearer one. */
static void check_tie(uint16_t low, double middle, uint16_t (*from_f32)(float), uint16_t (*from_f64)(double)) {
    uint16_t even = (uint16_t)(low + (low & 1));
    float tie = (float)middle;
    assert_true((double)tie == middle);
    for (int sign = 0; sign < 2; sign++) {
        float s = sign ? -1.0f : 1.0f;
        uint16_t bit = sign ? 0x8000 : 0;
        assert_int_equal(from_f32(s * tie), even | bit);
        assert_int_equal(from_f32(s * nextafterf(tie, 0.0f)), low | bit);
        assert_int_equal(from_f32(s * nextafterf(tie, INFINITY)), (low + 1) | bit);
        assert_int_equal(from_f64(s * middle), even | bit);
        assert_int_equal(from_f64(s * nextafter(middle, 0.0)), low | bit);
        assert_int_equal(from_f64(s * nextafter(middle, INFINITY)), (low + 1) | bit);
    }
}

static void f32_and_f64_round_to_the_nearest_even_f16_once(void **state) {
    (void)state;
    for (uint16_t low = 0; low < 0x7bff; low++)
        check_tie(low, (f16_value(low) + f16_value((uint16_t)(low + 1))) / 2, ra_f32_to_f16, f16_from_f64);
    check_tie(0x7bff, 65520.0, ra_f32_to_f16, f16_from_f64); /* the last tie is between 65504 and infinity */
    assert_int_equal(ra_f32_to_f16(3e38f), 0x7c00);
    assert_int_equal(f16_from_f64(-1e300), 0xfc00);
    assert_int_equal(f16_from_f64(1e-300), 0x0000);
}

static void f32_and_f64_round_to_the_nearest_even_bf16_once(void **state) {
    (void)state;
    for (uint16_t low = 0; low < 0x7f7f; low++)
        check_tie(low, (bf16_value(low) + bf16_value((uint16_t)(low + 1))) / 2, ra_f32_to_bf16, bf16_from_f64);
    check_tie(0x7f7f, ldexp(511, 119), ra_f32_to_bf16, bf16_from_f64);
    assert_int_equal(bf16_from_f64(1e300), 0x7f80);
    assert_int_equal(bf16_from_f64(-1e-300), 0x8000);
}

static void infinities_nans_and_zeros_survive_every_conversion(void **state) {
    (void)state;
    const ra_dtype types[] = {RA_F32, RA_BF16, RA_F16, RA_F64};
    const double values[] = {INFINITY, -INFINITY, NAN, 0.0, -0.0, 1.0, -2.5};
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            for (int i = 0; i < 7; i++) {
                double source, target, back;
                ra_convert(&source, types[from], &values[i], RA_F64, 1);
                ra_convert(&target, types[to], &source, types[from], 1);
                ra_convert(&back, RA_F64, &target, types[to], 1);
                if (isnan(values[i])) {
                    assert_true(isnan(back));
                } else {
                    assert_true(back == values[i]);
                    assert_int_equal(signbit(back) != 0, signbit(values[i]) != 0);
                }
            }
}

static void runs_convert_element_by_element_at_any_length(void **state) {
    (void)state;
    enum { MOST = 70 };
    float source[MOST];
    for (int i = 0; i < MOST; i++) source[i] = 0.1f * (float)(i - 35);
    for (int count = 0; count <= MOST; count++) {
        uint16_t half[MOST + 1], brain[MOST + 1];
        double wide[MOST + 1];
        half[count] = brain[count] = 0xabcd;
        wide[count] = 42.0;
        ra_convert(half, RA_F16, source, RA_F32, count);
        ra_convert(brain, RA_BF16, source, RA_F32, count);
        ra_convert(wide, RA_F64, source, RA_F32, count);
        for (int i = 0; i < count; i++) {
            assert_int_equal(half[i], ra_f32_to_f16(source[i]));
            assert_int_equal(brain[i], ra_f32_to_bf16(source[i]));
            assert_true(wide[i] == (double)source[i]);
        }
        assert_int_equal(half[count], 0xabcd);
        assert_int_equal(brain[count], 0xabcd);
        assert_true(wide[count] == 42.0);
    }
}

static void sizes_and_names_are_known_and_unknown_types_have_none(void **state) {
    (void)state;
    assert_int_equal(ra_dtype_size(RA_F32), 4);
    assert_int_equal(ra_dtype_size(RA_BF16), 2);
    assert_int_equal(ra_dtype_size(RA_F16), 2);
    assert_int_equal(ra_dtype_size(RA_F64), 8);
    assert_int_equal(ra_dtype_size((ra_dtype)4), 0);
    assert_string_equal(ra_dtype_name(RA_F32), "f32");
    assert_string_equal(ra_dtype_name(RA_BF16), "bf16");
    assert_string_equal(ra_dtype_name(RA_F16), "f16");
    assert_string_equal(ra_dtype_name(RA_F64), "f64");
    assert_null(ra_dtype_name((ra_dtype)4));
    assert_int_equal(ra_state_size(RA_F64), 8);
    assert_int_equal(ra_state_size(RA_F16), 4);
    assert_int_equal(bits_of(ra_f16_to_f32(0x0001)), 0x33800000); /* 2^-24 */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_f16_value_widens_exactly_and_round_trips),
        cmocka_unit_test(every_bf16_value_widens_exactly_and_round_trips),
        cmocka_unit_test(f32_and_f64_round_to_the_nearest_even_f16_once),
        cmocka_unit_test(f32_and_f64_round_to_the_nearest_even_bf16_once),
        cmocka_unit_test(infinities_nans_and_zeros_survive_every_conversion),
        cmocka_unit_test(runs_convert_element_by_element_at_any_length),
        cmocka_unit_test(sizes_and_names_are_known_and_unknown_types_have_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
