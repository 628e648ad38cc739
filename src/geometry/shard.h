/* Shards: which rows a rank holds. A run is a progression of rows that lie evenly in one rank's tensor. */
#ifndef RA_GEOMETRY_SHARD_H
#define RA_GEOMETRY_SHARD_H

#include "core/span.h"
#include "geometry/config.h"

typedef struct ra_run {
    int32_t rank;
    int64_t row, row_step; /* local row of the first, and from one to the next */
    ra_span span;          /* global positions */
} ra_run;

/* How many runs a layout has over `ranks`, empty ones included. */
int64_t ra_run_count(ra_layout layout, int ranks);
/* All runs of a sequence of `rows`, whose first row is at position `shift`: ascending by position (contiguous, zigzag) or rank
 * (striped). */
void ra_runs(ra_layout layout, int ranks, int64_t rows, int64_t shift, ra_run *runs);
/* The rows of one rank, as global indices. */
ra_shard ra_shard_of(ra_layout layout, int rank, int ranks, int64_t rows);

#endif
