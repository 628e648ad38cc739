/* The rows of a rank that its pattern touches. With dilation that may be one in r: what a pass does to every row before the
 * first step and after the last, it then does to these rows alone. */
#ifndef RA_RING_USED_H
#define RA_RING_USED_H

#include "ring/plan.h"

/* Queries (their heads) or keys (KV heads) of a tensor: every row with every head. */
typedef struct ra_used {
    ra_span rows, heads;
} ra_used;

/* Calls visit for sets that together are all queries (keys) of the rank that take part in anything. Sets may overlap in
 * `mix`. */
void ra_each_used(const ra_route *route, int rank, bool queries, void (*visit)(void *arg, const ra_used *used), void *arg);
/* Whether so many rows lie in few enough such sets that it pays to leave out the others. */
bool ra_used_sparsely(const ra_route *route, int rank, bool queries, int64_t rows);

/* The set as a tensor of rows.count x heads.count, of elements of `size` bytes. */
ra_tensor ra_used_view(const ra_used *used, ra_tensor tensor, int64_t size);

#endif
