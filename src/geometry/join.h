/* Fewer and larger work items: where a rank's rows are two runs (zigzag), both often meet the same keys or are met by the same
 * queries, and a device that starts a kernel for each item computes both at once. */
#ifndef RA_GEOMETRY_JOIN_H
#define RA_GEOMETRY_JOIN_H

#include "core/item.h"

/* Joins items whose queries follow each other and meet the same keys, or the other way round. Returns how many items are left,
 * at the front of the list. The same pairs meet as before. */
int64_t ra_join_items(const ra_problem *problem, ra_item *items, int64_t count);

#endif
