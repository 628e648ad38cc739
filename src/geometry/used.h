/* The rows of a rank that its pattern touches. With dilation that may be one in r: what a pass does to every row before the
 * first step and after the last, it then does to these rows alone. */
#ifndef RA_GEOMETRY_USED_H
#define RA_GEOMETRY_USED_H

#include "geometry/route.h"

/* Rows of a tensor and heads (queries: query heads, keys: KV heads): every row with every head. */
typedef struct ra_used {
    ra_span rows, heads;
} ra_used;

/* Sets that together are all queries (keys) of the rank that take part in anything; they may overlap in `mix`. Returns their
 * number, or -1 if there are more than `most`. */
int64_t ra_used_sets(const ra_route *route, int rank, bool queries, ra_used *sets, int64_t most);

/* These rows and heads as a tensor of their own; size: bytes of an element. */
ra_tensor ra_part_of_tensor(ra_tensor tensor, int64_t size, ra_span rows, ra_span heads);

#endif
