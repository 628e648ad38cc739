/* What peers of a rank that is played alone would send. */
#ifndef RA_RING_SOLO_H
#define RA_RING_SOLO_H

#include "core/workers.h"
#include "geometry/route.h"

/* Pieces one after the other, each K then V, made row by row: an ra_maker. */
typedef struct ra_made_pieces {
    const ra_route *route;
    const ra_piece *pieces;
    int64_t count;
    ra_workers *workers;
    const ra_solo_ops *ops;
} ra_made_pieces;
void ra_make_pieces(void *made_pieces, char *packed);

#endif
