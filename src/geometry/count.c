/* A query at x sees the keys in [x - left, x + right], so the pairs are a difference of two prefix counts, and the sum of
 * prefix counts over a progression is a sum of floors, which the Euclidean algorithm gives in logarithmic time. */
#include "geometry/count.h"

#include "core/item.h"
#include "core/size.h"

__extension__ typedef __int128 int128;

/* Further than any position, and still safe to subtract. */
#define FAR ((int64_t)1 << 61)

static int64_t saturate(int128 value) { return value > INT64_MAX ? INT64_MAX : (int64_t)value; }

/* sum of floor((a*i + b) / m) for i in [0, n); m >= 1, a and b of any sign. */
static int128 floor_sum(int128 n, int128 a, int128 b, int128 m) {
    int128 sum = 0;
    if (n <= 0) return 0;
    if (a < 0) { /* count i from the other end */
        b += a * (n - 1);
        a = -a;
    }
    if (b < 0) {
        int128 up = (-b + m - 1) / m;
        sum -= up * n;
        b += up * m;
    }
    while (n > 0) {
        sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
        a %= m;
        b %= m;
        int128 top = a * n + b;
        if (top < m) break;
        int128 swap = a;
        n = top / m;
        b = top % m;
        a = m;
        m = swap;
    }
    return sum;
}

/* sum over x in queries of the number of keys <= x + z. */
static int128 sum_ranks(ra_span q, ra_span k, int64_t z) {
    int64_t some = ra_min(q.count, ra_max(0, ra_ceil_div(k.start - z - q.start, q.step)));
    int64_t full = ra_min(q.count, ra_max(some, ra_ceil_div(ra_span_last(k) - z - q.start, q.step)));
    int128 sum = (int128)(q.count - full) * k.count;
    int64_t first = q.start + some * q.step + z - k.start;
    return sum + (full - some) + floor_sum(full - some, q.step, first, k.step);
}

static int128 pairs(ra_span q, ra_span k, int64_t left, int64_t right) {
    if (q.count == 0 || k.count == 0) return 0;
    int128 upto = right == RA_NO_LIMIT ? (int128)q.count * k.count : sum_ranks(q, k, right);
    return left == RA_NO_LIMIT ? upto : upto - sum_ranks(q, k, -left - 1);
}

int64_t ra_count_pairs(ra_span q, ra_span k, int64_t left, int64_t right) { return saturate(pairs(q, k, left, right)); }

/* The queries that lie in [low, high], either of which may be unbounded. */
static ra_span between(ra_span q, int64_t low, int64_t high) { return ra_span_clip(q, low, high + 1); }

/* Queries that reach some key of [first, last] with this window. */
static ra_span reaching(ra_span q, int64_t first, int64_t last, int64_t left, int64_t right) {
    int64_t begin, end;
    ra_mask_queries(left, right, first, last, q.start, q.step, q.count, &begin, &end);
    return (ra_span){q.start + begin * q.step, q.step, end - begin};
}

int64_t ra_count_covered(ra_span q, ra_span k, int64_t left, int64_t right) {
    if (q.count == 0 || k.count == 0) return 0;
    /* Windows of neighbouring keys either join to one interval of queries, or are disjoint and see one key each. */
    bool joined = left == RA_NO_LIMIT || right == RA_NO_LIMIT || k.count == 1 || left + right + 1 >= k.step;
    return joined ? reaching(q, k.start, ra_span_last(k), left, right).count : ra_count_pairs(q, k, left, right);
}

/* The number of y in [low, high] with y = x (mod r) is floor((high - x)/r) - floor((low - 1 - x)/r). Each bound is either a
 * fixed position, whose floors sum up over the queries, or moves with x, which makes its floor a constant. */
static int128 sum_floor_fixed(ra_span q, int64_t bound, int64_t rate) {
    return q.count ? floor_sum(q.count, -(int128)q.step, (int128)bound - q.start, rate) : 0;
}

int64_t ra_count_pairs_residue(ra_span q, ra_span k, int64_t rate, int64_t left, int64_t right) {
    if (q.count == 0 || k.count == 0) return 0;
    int64_t first = k.start, last = ra_span_last(k);
    q = reaching(q, first, last, left, right);
    int128 sum = 0;
    ra_span fixed = right == RA_NO_LIMIT ? q : between(q, last - right, FAR);
    ra_span moving = right == RA_NO_LIMIT ? (ra_span){0, 1, 0} : between(q, -FAR, last - right - 1);
    sum += sum_floor_fixed(fixed, last, rate) + (int128)moving.count * (right == RA_NO_LIMIT ? 0 : right / rate);
    fixed = left == RA_NO_LIMIT ? q : between(q, -FAR, first + left);
    moving = left == RA_NO_LIMIT ? (ra_span){0, 1, 0} : between(q, first + left + 1, FAR);
    sum -= sum_floor_fixed(fixed, first - 1, rate);
    sum -= (int128)moving.count * (left == RA_NO_LIMIT ? 0 : ra_floor_div(-left - 1, rate));
    return saturate(sum);
}

/* Queries whose residue, counted from `first`, is below `length`. */
static int64_t count_residues(ra_span q, int64_t first, int64_t length, int64_t rate) {
    if (length >= rate || q.count == 0) return q.count;
    int128 start = (int128)q.start - first;
    return (int64_t)(floor_sum(q.count, q.step, start, rate) - floor_sum(q.count, q.step, start - length, rate));
}

int64_t ra_count_covered_residue(ra_span q, ra_span k, int64_t rate, int64_t left, int64_t right) {
    if (q.count == 0 || k.count == 0) return 0;
    int64_t first = k.start, last = ra_span_last(k);
    int64_t covered = between(q, first, last).count; /* these meet themselves */
    /* A query outside meets the nearest key of its residue, a whole number of rates away, if that key exists at all. */
    ra_span below = between(q, right == RA_NO_LIMIT ? -FAR : first - right / rate * rate, first - 1);
    ra_span above = between(q, last + 1, left == RA_NO_LIMIT ? FAR : last + left / rate * rate);
    return covered + count_residues(below, first, k.count, rate) + count_residues(above, first, k.count, rate);
}
