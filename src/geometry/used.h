/* The rows of a rank that its pattern touches. With dilation that may be one in r: what a pass does to every row before the
 * first step and after the last, it then does to these rows alone. */
#ifndef RA_GEOMETRY_USED_H
#define RA_GEOMETRY_USED_H

#include "geometry/route.h"

/* Sets that together are all queries (keys) of the rank that take part in anything, or (shared) in rings with other members;
 * they may overlap in `mix`. Returns their number, or -1 if there are more than `most`. */
int64_t ra_used_sets(const ra_route *route, int rank, bool queries, bool shared, ra_used *sets, int64_t most);

/* The largest number modulo which the rows of all sets that share a head are congruent; count > 0. */
int64_t ra_used_modulus(const ra_used *sets, int64_t count);

#endif
