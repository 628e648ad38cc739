#include "core/size.h"

int64_t ra_gcd(int64_t a, int64_t b) {
    /* Unsigned, because |INT64_MIN| has no int64_t; only gcd(INT64_MIN, 0 or INT64_MIN) itself does not fit and wraps. */
    uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a;
    uint64_t y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
    while (y) {
        uint64_t rest = x % y;
        x = y;
        y = rest;
    }
    return (int64_t)x;
}

int64_t ra_inverse(int64_t a, int64_t m) {
    /* Extended Euclid. Invariant: r0 = a*x0, r1 = a*x1 (mod m); |x| never exceeds m, so nothing overflows. */
    int64_t r0 = ra_mod(a, m), r1 = m, x0 = 1, x1 = 0;
    while (r1) {
        int64_t quotient = r0 / r1;
        int64_t r2 = r0 - quotient * r1, x2 = x0 - quotient * x1;
        r0 = r1;
        r1 = r2;
        x0 = x1;
        x1 = x2;
    }
    return ra_mod(x0, m);
}
