/* Routes: rings cut into buckets, and the ways that buckets take.
 *
 * Rings of one round with the same members are one channel: what moves between two of its members in one step is one message.
 * The outer loop of a round runs over buckets and the inner one over hops:
 *
 *     bucket 0: hop 0 (at home)  hop 1 (neighbour)  hop 2 ...   bucket 1: hop 0  hop 1 ...
 *
 * A bucket goes up or down its ring, whichever way reaches the last member that needs it in fewer hops, and stops there.
 * Everything is a function of (round, bucket, hop), the same on every rank, so that sends and receives match without being
 * listed. */
#ifndef RA_GEOMETRY_ROUTE_H
#define RA_GEOMETRY_ROUTE_H

#include "geometry/rings.h"

typedef struct ra_source_ref {
    int32_t ring, source;
} ra_source_ref;

typedef struct ra_channel {
    int32_t round;
    int64_t member_count;
    const int32_t *members;
    int64_t ring_count, ring_capacity;
    int32_t *rings;
    ra_source_ref *refs; /* sources by member: those of member i are refs[first_ref[i]] .. refs[first_ref[i+1]-1] */
    int64_t *first_ref;
} ra_channel;

typedef struct ra_round {
    int64_t buckets;
    int32_t hops;
} ra_round;

typedef struct ra_route {
    const ra_config *config;
    int ranks;
    int64_t bucket; /* rows */
    ra_rings rings;
    int64_t channel_count, channel_capacity;
    ra_channel *channels;
    ra_round *rounds; /* [rings.rounds] */
} ra_route;

/* bucket >= 1: K/V rows that a rank sends at once (0: everything in one bucket). The route is the same for every rank, except
 * with replicated queries, where nothing is exchanged and `rank` sees its own keys only. */
ra_status ra_route_create(ra_arena *arena, const ra_config *config, int rank, int ranks, int64_t bucket, ra_route *route);

/* One source's share of a bucket. */
typedef struct ra_piece {
    int32_t ring, source;
    int64_t first_repeat, repeats; /* segments of the ring */
    int64_t first_row, rows;       /* of the source, in each of these segments */
    int32_t hops, first;           /* as in ra_reach */
} ra_piece;

/* The pieces of bucket `bucket` that set out from `member` in one direction and go at least min_hops, furthest first; so those
 * that go on are always the front of a message. Returns their number, at most the member's number of sources. */
int64_t ra_pieces(const ra_route *route, const ra_channel *channel, int64_t member, bool down, int64_t bucket, int32_t min_hops,
                  ra_piece *pieces);
/* What member `to` needs of the sources of member `from`, all at once: rows that no query of it may see are left out. For
 * routes of one bucket. Returns the number of pieces. */
int64_t ra_direct_pieces(const ra_route *route, const ra_channel *channel, int64_t from, int64_t to, ra_piece *pieces);
/* Elements of K (and as many of V) in a piece. */
int64_t ra_piece_elements(const ra_route *route, const ra_piece *piece);
/* Reach of one slice of a source. */
const ra_reach *ra_reach_of(const ra_ring *ring, int64_t source, int64_t slice);

/* The member `hops` away from `member`. */
static inline int64_t ra_member_at(const ra_channel *channel, int64_t member, int64_t hops, bool down) {
    return ra_mod(down ? member - hops : member + hops, channel->member_count);
}
/* The index of a rank among the members, or -1. */
int64_t ra_channel_member(const ra_channel *channel, int rank);

/* Work items of a target of a ring against a piece. Views are left empty. `packed`: the piece lies row by row in a message
 * instead of in the rank's tensor. Returns their number, at most RA_ITEMS_MAX. */
#define RA_ITEMS_MAX 8
int64_t ra_items(const ra_route *route, const ra_piece *piece, const ra_part *target, bool packed, ra_item *items);
/* Most keys of one iteration of an item's loops, over the items of `rank`: of a bucket at most, unless keys stay at home. */
int64_t ra_most_keys(const ra_route *route, int rank);

#endif
