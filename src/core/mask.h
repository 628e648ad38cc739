/* The mask: a query at x attends to the keys y with x - left <= y <= x + right (causal: right is 0). Seen from a key the two
 * limits change places.
 *
 * Queries and keys are progressions, so the keys of a query are an interval of them, and move up with the query. Everybody who
 * asks which rows can meet (geometry, kernels) asks here. */
#ifndef RA_CORE_MASK_H
#define RA_CORE_MASK_H

#include "core/size.h"

#define RA_NO_LIMIT INT64_MAX /* of left and right */

static inline bool ra_mask_limits(int64_t left, int64_t right) { return left != RA_NO_LIMIT || right != RA_NO_LIMIT; }
/* Do later queries have more keys than earlier ones? */
static inline bool ra_mask_grows(int64_t left, int64_t right) { return left == RA_NO_LIMIT && right != RA_NO_LIMIT; }

/* The first key that the left limit lets through, and one past the last key that the right limit does; perhaps beyond the keys
 * that there are. `ahead` is the position of key 0 minus that of the query, here negative:
 *
 *     key 0         key 1  query  key 2         key 3
 *       |<-- step --->|      |      |             |
 *       |<----- -ahead ----->|
 */
static inline int64_t ra_mask_first(int64_t left, int64_t ahead, int64_t step) { return ra_ceil_div(-left - ahead, step); }
static inline int64_t ra_mask_end(int64_t right, int64_t ahead, int64_t step) { return ra_floor_div(right - ahead, step) + 1; }

/* The keys c < count, at pos + c*step, that some query in [first, last] attends to lie in [*begin, *end), and are all of it if
 * the queries are dense enough. Positions are within +-2^61, so the differences cannot overflow. Most pairs of shards see all
 * or nothing, which takes no division. */
static inline void ra_mask_keys(int64_t left, int64_t right, int64_t first, int64_t last, int64_t pos, int64_t step,
                                int64_t count, int64_t *begin, int64_t *end) {
    int64_t low = 0, high = count;
    if (left != RA_NO_LIMIT && first - left > pos) low = ra_mask_first(left, pos - first, step);
    if (right != RA_NO_LIMIT && last + right - pos < (count - 1) * step)
        high = last + right < pos ? 0 : ra_mask_end(right, pos - last, step);
    *begin = low;
    *end = ra_max(low, high);
}

/* The queries that attend to some key in [first, last]. */
static inline void ra_mask_queries(int64_t left, int64_t right, int64_t first, int64_t last, int64_t pos, int64_t step,
                                   int64_t count, int64_t *begin, int64_t *end) {
    ra_mask_keys(right, left, first, last, pos, step, count, begin, end);
}

#endif
