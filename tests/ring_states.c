/* Merging of running states: an empty one adds nothing, whatever its sums hold. */
#include <math.h>

#include "core/workers.h"
#include "device/device.h"
#include "support.h"

enum { BATCH = 2, ROWS = 4, HEADS = 3, DIM = 5, NUMBERS = BATCH * ROWS * HEADS, SIZE = NUMBERS * (DIM + 2) };

typedef struct sample {
    double acc, m, l;
} sample;

/* Row r of a pair of states: bit 0 of it says that the one is empty, bit 1 that the other is. */
static sample sample_of(int r, int which) {
    const sample some[] = {{1.5, 0.25, 2}, {-3, 1.75, 0.5}};
    return r >> which & 1 ? (sample){NAN, -INFINITY, 0} : some[which];
}

static void put(void *state, ra_dtype dtype, int64_t i, double x) {
    if (dtype == RA_F64) ((double *)state)[i] = x;
    else ((float *)state)[i] = (float)x;
}
static double get(const void *state, ra_dtype dtype, int64_t i) {
    return dtype == RA_F64 ? ((const double *)state)[i] : (double)((const float *)state)[i];
}

static int64_t sum_at(int b, int r, int h, int d) { return (((int64_t)b * ROWS + r) * HEADS + h) * DIM + d; }
static int64_t number_at(int b, int r, int h) { return ((int64_t)b * HEADS + h) * ROWS + r; }

static void fill(void *state, ra_dtype dtype, int which) {
    for (int b = 0; b < BATCH; b++)
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < HEADS; h++) {
                const sample s = sample_of(r, which);
                for (int d = 0; d < DIM; d++) put(state, dtype, sum_at(b, r, h, d), s.acc * (1 + d));
                put(state, dtype, NUMBERS * DIM + number_at(b, r, h), s.m);
                put(state, dtype, NUMBERS * (DIM + 1) + number_at(b, r, h), s.l);
            }
}

static sample merged(int r) {
    const sample one = sample_of(r, 0), two = sample_of(r, 1);
    if (r & 1) return two;
    if (r & 2) return one;
    const double top = fmax(one.m, two.m), x = exp(one.m - top), y = exp(two.m - top);
    return (sample){one.acc * x + two.acc * y, top, one.l * x + two.l * y};
}

static void empty_states_are_neutral_whatever_their_sums_hold(void **state) {
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F64}; /* sums of 16 bits are f32 */
    const ra_device_ops *cpu = ra_device_of(RA_DEVICE_CPU);
    ra_workers *workers;
    assert_int_equal(ra_workers_create(2, &workers), RA_OK);
    for (int i = 0; i < 3; i++) {
        const ra_dtype sums = dtypes[i] == RA_F64 ? RA_F64 : RA_F32;
        const ra_problem problem = {
            .dtype = dtypes[i], .batch = BATCH, .heads = HEADS, .kv_heads = HEADS, .head_dim = DIM, .rows_q = ROWS};
        assert_int_equal(cpu->travelling_bytes(&problem, false), SIZE * (sums == RA_F64 ? 8 : 4));
        double into[SIZE], from[SIZE];
        fill(into, sums, 0);
        fill(from, sums, 1);
        cpu->merge_states(&(ra_queue){.workers = workers}, &problem, (char *)into, (const char *)from);
        for (int b = 0; b < BATCH; b++)
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < HEADS; h++) {
                    const sample want = merged(r);
                    const double m = get(into, sums, NUMBERS * DIM + number_at(b, r, h)),
                                 l = get(into, sums, NUMBERS * (DIM + 1) + number_at(b, r, h));
                    assert_true(m == want.m || fabs(m - want.m) < 1e-6);
                    assert_true(fabs(l - want.l) < 1e-6);
                    for (int d = 0; d < DIM && want.l > 0; d++)
                        assert_true(fabs(get(into, sums, sum_at(b, r, h, d)) - want.acc * (1 + d)) < 1e-5);
                }
    }
    ra_workers_destroy(workers);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(empty_states_are_neutral_whatever_their_sums_hold)};
    return cmocka_run_group_tests_name("states", tests, NULL, NULL);
}
