/* Integers: checked arithmetic and floored division, the only way sizes and positions are computed. */
#ifndef RA_CORE_SIZE_H
#define RA_CORE_SIZE_H

#include <stdbool.h>
#include <stdint.h>

/* True and *result set, or false on overflow. */
static inline bool ra_add(int64_t a, int64_t b, int64_t *result) { return !__builtin_add_overflow(a, b, result); }
static inline bool ra_mul(int64_t a, int64_t b, int64_t *result) { return !__builtin_mul_overflow(a, b, result); }

/* Saturating forms for sums whose overflow is caught once, at the end: a result of INT64_MAX means "too large". Not for
 * negatives. */
static inline int64_t ra_sat_add(int64_t a, int64_t b) {
    int64_t r;
    return ra_add(a, b, &r) ? r : INT64_MAX;
}
static inline int64_t ra_sat_mul(int64_t a, int64_t b) {
    int64_t r;
    return ra_mul(a, b, &r) ? r : INT64_MAX;
}

static inline int64_t ra_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ra_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floored division and modulus, b > 0. */
static inline int64_t ra_floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static inline int64_t ra_ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }
static inline int64_t ra_mod(int64_t a, int64_t b) {
    int64_t m = a % b;
    return m < 0 ? m + b : m;
}
/* The next multiple of align at or above a >= 0. align must be a power of two. */
static inline int64_t ra_round_up(int64_t a, int64_t align) { return (a + align - 1) & ~(align - 1); }

int64_t ra_gcd(int64_t a, int64_t b);
/* x in [0, m) with a*x = 1 (mod m); gcd(a, m) = 1, m >= 1. */
int64_t ra_inverse(int64_t a, int64_t m);

#endif
