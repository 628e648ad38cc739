/* A span: start, start + step, start + 2*step, ... The one shape that every set of rows in ringattn has.
 *
 * Closed under intersection and clipping; a mask between two spans is a linear inequality. Values stay within +-2^62, which
 * ra_config_create guarantees by bounding every size to 2^40. */
#ifndef RA_CORE_SPAN_H
#define RA_CORE_SPAN_H

#include <stdint.h>

typedef struct ra_span {
    int64_t start, step, count; /* step >= 1, count >= 0 */
} ra_span;

/* The last element; count > 0. */
static inline int64_t ra_span_last(ra_span s) { return s.start + (s.count - 1) * s.step; }

/* The elements in [lo, hi). */
ra_span ra_span_clip(ra_span s, int64_t lo, int64_t hi);
/* The elements of both. */
ra_span ra_span_intersect(ra_span a, ra_span b);

#endif
