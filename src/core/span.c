#include "core/span.h"

#include "core/size.h"

__extension__ typedef __int128 int128;

#define VALUE_LIMIT ((int64_t)1 << 62)

ra_span ra_span_clip(ra_span s, int64_t lo, int64_t hi) {
    int64_t first = s.start >= lo ? 0 : ra_ceil_div(lo - s.start, s.step);
    int64_t end = s.start >= hi ? 0 : ra_min(s.count, ra_ceil_div(hi - s.start, s.step));
    if (first >= end) return (ra_span){s.start, s.step, 0};
    return (ra_span){s.start + first * s.step, s.step, end - first};
}

/* x = a.start (mod a.step) and x = b.start (mod b.step), by the Chinese remainder theorem. */
ra_span ra_span_intersect(ra_span a, ra_span b) {
    if (a.count == 0 || b.count == 0) return (ra_span){a.start, 1, 0};
    int64_t g = ra_gcd(a.step, b.step);
    int64_t gap = b.start - a.start;
    if (gap % g != 0) return (ra_span){a.start, 1, 0};
    int64_t modulus = b.step / g; /* of the number of a's steps */
    int64_t steps = (int64_t)((int128)ra_mod(gap / g, modulus) * ra_inverse(ra_mod(a.step / g, modulus), modulus) % modulus);
    int128 lcm = (int128)a.step * modulus, x = a.start + (int128)steps * a.step; /* the first common value >= a.start */
    int64_t lo = ra_max(a.start, b.start), hi = ra_min(ra_span_last(a), ra_span_last(b));
    if (x < lo) x += (lo - x + lcm - 1) / lcm * lcm;
    /* A step beyond every value leaves one element at most, for which any multiple of a's step will do. */
    int64_t step = lcm < VALUE_LIMIT ? (int64_t)lcm : a.step;
    if (x > hi) return (ra_span){a.start, step, 0};
    return (ra_span){(int64_t)x, step, (int64_t)((hi - x) / lcm) + 1};
}
