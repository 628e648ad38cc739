/* Fewer and larger work items: where a rank's rows are two runs (zigzag), both often meet the same keys, and the three items of
 * a rank that meets itself are one triangle. A GPU computes one large item faster than small ones, which wait for each other
 * where they meet the same rows. */
#ifndef RA_GEOMETRY_JOIN_H
#define RA_GEOMETRY_JOIN_H

#include "core/item.h"

/* Joins items whose queries follow each other and meet the same keys, or the other way round. Returns how many items are left,
 * at the front of the list. The same pairs meet as before. */
int64_t ra_join_items(const ra_problem *problem, ra_item *items, int64_t count);

#endif
