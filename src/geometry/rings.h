/* Rings: for each class and segment, who holds its keys and who asks for them.
 *
 * The ranks that hold a lattice key or a query of a segment are its members; non-members never hear of it. Segments that look
 * alike from every member form one ring with a repeat count: each repeat lies `shift` positions after the one before.
 *
 *     contiguous, zigzag         | rank 0       | rank 1       |       The whole segments inside a run are one ring;
 *                                [s0 ][s1 ][s2 ][s3 ][s4 ][s5 ]        a segment that a cut goes through (s2) is its own.
 *
 *     striped                    every segment has rows of every rank; segment s and s + p/gcd(w, p) look alike.
 *
 * So the number of rings depends on ranks and classes, never on the sequence length. */
#ifndef RA_GEOMETRY_RINGS_H
#define RA_GEOMETRY_RINGS_H

#include "core/arena.h"
#include "geometry/pattern.h"
#include "geometry/shard.h"

/* The rows of one run in one segment of a ring. */
typedef struct ra_part {
    int32_t rank, member; /* member: index into the ring's members */
    ra_item_rows rows;    /* of the first segment */
    int64_t row_shift;    /* local rows from one repeat to the next */
} ra_part;

/* How far a bucket of a source travels, for the slices up to slice_end (from where the previous reach ended). */
typedef struct ra_reach {
    int64_t slice_end;
    int32_t hops;  /* to the last member that needs it; 0: nobody else does */
    int32_t first; /* hops to the first member that needs it */
    bool down;     /* towards lower members instead of higher ones */
} ra_reach;

typedef struct ra_path {
    ra_reach *reaches;
    int64_t count;
} ra_path;

typedef struct ra_ring {
    int32_t class_index, round, channel; /* channel -1: a single member, nothing to exchange */
    int64_t repeat, shift;               /* segments, and positions from one to the next */
    int64_t origin;                      /* where the first segment begins */
    int64_t member_count, source_count, target_count;
    int32_t *members;           /* ascending ranks */
    ra_part *sources, *targets; /* keys, queries; by position (striped: by rank) */
    int32_t *first_target;      /* of each member (ra_first_target), */
    int32_t *next_target;       /* and of each target the next one of its member; -1: none */
    /* A bucket is either `bundle` whole segments, or one of `slices` slices of `cap` rows of one segment. */
    int64_t cap, slices, bundle, buckets;
    ra_path *paths; /* of each source */
} ra_ring;

typedef struct ra_rings {
    ra_class *classes;
    int64_t class_count;
    ra_ring *rings;
    int64_t count, capacity;
    int64_t rounds; /* rings of one round are exchanged together, one round after the other */
    int32_t *by_rank; /* the rings of rank 0, then those of rank 1, ... (ra_rings_of) */
    int64_t *first_of_rank;
} ra_rings;

/* All rings of the configuration over `ranks`. A ring without keys or without queries does not appear. With replicated queries
 * the rings are those of `rank` alone: all queries against its own keys, and nothing to exchange. */
ra_status ra_rings_create(ra_arena *arena, const ra_config *config, int rank, int ranks, ra_rings *rings);

/* The rings that a rank is a member of, in their order. Of millions of rings on thousands of ranks these are few. */
typedef struct ra_ring_list {
    const int32_t *list;
    int64_t count;
} ra_ring_list;
static inline ra_ring_list ra_rings_of(const ra_rings *rings, int rank) {
    const int64_t first = rings->first_of_rank[rank];
    return (ra_ring_list){rings->by_rank + first, rings->first_of_rank[rank + 1] - first};
}

/* The first target of a rank, or -1: next_target knows the others. */
int32_t ra_first_target(const ra_ring *ring, int rank);
/* How many it has. */
int64_t ra_targets_of(const ra_ring *ring, int rank);

#endif
