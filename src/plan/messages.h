/* The messages of one step on one rank.
 *
 * A buffer holds the messages of a step one after the other, each on a 64-byte boundary. Inside a message the pieces follow
 * each other without gaps, each as K then V (or dK then dV):
 *
 *     [ header | K of piece 0 | V of piece 0 | K of piece 1 | ... ]      K: [batch][head][repeat][row][d]
 */
#ifndef RA_PLAN_MESSAGES_H
#define RA_PLAN_MESSAGES_H

#include "core/box.h"
#include "geometry/route.h"

/* A channel that this rank is a member of. */
typedef struct ra_own_channel {
    const ra_channel *channel;
    int64_t member;
} ra_own_channel;

/* What set out from one member in one direction and has come `hop` hops to this rank (hop 0: from this rank). */
typedef struct ra_message {
    const ra_own_channel *own;
    bool down;
    int64_t source; /* member */
    int64_t offset; /* of its frame in the buffer */
    ra_piece *pieces;
    int64_t count;
} ra_message;

typedef struct ra_messages {
    int64_t count;
    ra_message *list;
    int64_t bytes; /* of the buffer that holds them */
} ra_messages;

/* Room for the messages of any step over `own_count` channels. */
bool ra_messages_create(ra_arena *arena, const ra_own_channel *own, int64_t own_count, ra_messages *messages);
/* The messages that are here after `hop` hops. With hop 0 and `all`, pieces that stay at home are among them. */
void ra_messages_list(const ra_route *route, const ra_own_channel *own, int64_t own_count, int64_t bucket, int32_t hop,
                      bool all, ra_messages *messages);

/* Bytes of the pieces that go at least min_hops: the front of the message. `size`: bytes of an element. */
int64_t ra_message_payload(const ra_route *route, const ra_message *message, int32_t min_hops, int64_t size);
/* Rank of the member `hops` further along the way, or before it for negative hops. */
int ra_message_rank(const ra_message *message, int64_t hops);

/* The rows of a piece in its rank's tensor (k or v), and the view of a packed piece by head index, for items. */
ra_box ra_piece_box(const ra_route *route, const ra_piece *piece);
ra_tensor ra_packed_view(const ra_route *route, const ra_piece *piece, char *packed);

/* Upper bounds over all buckets for rank-local buffers; round by round, hop by hop. */
typedef struct ra_message_bounds {
    int64_t kv_bytes[2];   /* buffers for K and V: of this hop and the next (ring), in and out (gather) */
    int64_t grad_bytes[2]; /* for dK and dV of what is computed here: in this step and the one before (ring) */
    int64_t grad_in_bytes; /* for dK and dV that arrive in a step, */
    int64_t added_bytes;   /* of which these are added to what is computed here, */
    int64_t home_bytes[3]; /* and these come home: at hop 0, at other even hops, at odd ones */
    int64_t step_items;    /* items of one step */
    int64_t transfers;     /* messages posted in one step, forward or backward */
} ra_message_bounds;
/* False: no memory. */
bool ra_message_bound(ra_arena *arena, const ra_route *route, const ra_own_channel *own, int64_t own_count, int rank,
                      ra_message_bounds *bounds);

#endif
