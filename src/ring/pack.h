/* Between a rank's tensors and messages: the only copies the ring makes. */
#ifndef RA_RING_PACK_H
#define RA_RING_PACK_H

#include "core/workers.h"
#include "plan/messages.h"

/* Copies the rows of a piece from the rank's tensor (k or v) to `packed`: [batch][head][repeat][row][d]. */
void ra_pack(const ra_route *route, const ra_piece *piece, ra_tensor tensor, char *packed);
/* Packs K and V of all pieces of a message that go anywhere. */
void ra_pack_message(const ra_route *route, const ra_message *message, ra_tensor k, ra_tensor v, char *packed);
/* Adds packed sums (f32, f64) to the rows of a piece in the rank's tensor of sums (dk or dv). */
void ra_unpack_add(const ra_route *route, const ra_piece *piece, char *packed, ra_tensor sums);
/* The view of a packed piece by head index, for items. */
ra_tensor ra_packed_view(const ra_route *route, const ra_piece *piece, char *packed);
/* a[i] += b[i] over `count` sums of the configuration's state type. */
void ra_add_sums(ra_dtype dtype, char *a, const char *b, int64_t count);
/* What a peer would have sent, made row by row: pieces one after the other, each K then V. */
void ra_make_pieces(const ra_route *route, const ra_piece *pieces, int64_t count, ra_workers *workers, const ra_solo_ops *ops,
                    char *packed);

#endif
