/* How far two results are apart, against the size of the sums behind them. */
#include <math.h>

#include "reference/reference.h"

#define F16_MAX 65504.0

double ref_bound(ra_dtype dtype, bool lse, double max_score) {
    double wide = max_score >= 10 ? 4 : 1; /* an error of a score is an error of its exponential */
    switch (dtype) {
    case RA_F32: return lse ? 2e-6 : wide * 2e-6;
    case RA_BF16: return lse ? 2e-5 : 1e-2;
    case RA_F16: return lse ? 2e-5 : 1.4e-3;
    case RA_F64: return wide * 1e-13;
    }
    return 0;
}

/* The error of one element; infinite when something exact is missed. */
static double element_error(double got, double want, double m, ra_dtype stored) {
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got) ? 0 : INFINITY;
    if (isinf(want)) return got == want ? 0 : INFINITY;
    if (stored == RA_F16 && isinf(got) && fabs(want) > F16_MAX * (1 - 2e-3) && (got > 0) == (want > 0)) return 0;
    if (stored == RA_F16 && !isinf(got) && fabs(want) > F16_MAX * (1 + 2e-3)) return INFINITY;
    if (isinf(got)) return INFINITY;
    if (m == 0 && got != 0) return INFINITY;
    return fabs(got - want);
}

ref_error ref_compare(const double *got, const double *want, const double *m, int64_t count, ra_dtype stored) {
    double largest_m = 0, largest = 0, squares = 0;
    ref_error result = {.where = -1};
    for (int64_t n = 0; n < count; n++) {
        double error = element_error(got[n], want[n], m[n], stored);
        if (m[n] > largest_m && isfinite(m[n])) largest_m = m[n];
        squares += error * error;
        if (error > largest) {
            largest = error;
            result.where = n;
        }
    }
    result.rms = count ? sqrt(squares / (double)count) : 0;
    if (largest > 0) result.ratio = largest_m > 0 ? largest / largest_m : INFINITY;
    return result;
}

ref_error ref_compare_lse(const double *got, const double *want, const double *m, int64_t count) {
    double largest_m = 1, largest = 0, squares = 0;
    ref_error result = {.where = -1};
    for (int64_t n = 0; n < count; n++) {
        double error = isinf(want[n]) || isnan(want[n]) ? element_error(got[n], want[n], 1, RA_F64)
                       : isfinite(got[n])               ? fabs(got[n] - want[n])
                                                        : INFINITY;
        if (m[n] > largest_m && isfinite(m[n])) largest_m = m[n];
        squares += error * error;
        if (error > largest) {
            largest = error;
            result.where = n;
        }
    }
    result.rms = count ? sqrt(squares / (double)count) : 0;
    if (largest > 0) result.ratio = largest / largest_m;
    return result;
}
