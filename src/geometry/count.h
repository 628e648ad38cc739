/* Counting pairs between spans in closed form. Results saturate at INT64_MAX. */
#ifndef RA_GEOMETRY_COUNT_H
#define RA_GEOMETRY_COUNT_H

#include "core/span.h"

/* Pairs (x, y), x of queries, y of keys, with x - left <= y <= x + right (RA_NO_LIMIT: no bound). */
int64_t ra_count_pairs(ra_span queries, ra_span keys, int64_t left, int64_t right);
/* Queries with at least one such key. */
int64_t ra_count_covered(ra_span queries, ra_span keys, int64_t left, int64_t right);
/* The same where a query meets only the keys of its own residue modulo rate; keys has step 1. */
int64_t ra_count_pairs_residue(ra_span queries, ra_span keys, int64_t rate, int64_t left, int64_t right);
int64_t ra_count_covered_residue(ra_span queries, ra_span keys, int64_t rate, int64_t left, int64_t right);

#endif
