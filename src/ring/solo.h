#ifndef RA_RING_SOLO_H
#define RA_RING_SOLO_H

#include "core/workers.h"
#include "geometry/route.h"

/* What a peer would have sent, made row by row: pieces one after the other, each K then V. */
void ra_make_pieces(const ra_route *route, const ra_piece *pieces, int64_t count, ra_workers *workers, const ra_solo_ops *ops,
                    char *packed);

#endif
