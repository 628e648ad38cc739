/* What peers of a rank that is played alone would send. */
#ifndef RA_RING_SOLO_H
#define RA_RING_SOLO_H

#include "device/device.h"
#include "geometry/route.h"
#include "ring/comm.h"

/* Pieces one after the other, each K then V: an ra_maker. */
typedef struct ra_made_pieces {
    const ra_route *route;
    const ra_piece *pieces;
    int64_t count;
    const ra_comm *comm;
    const ra_device_ops *device;
    const ra_queue *queue; /* of the lane, where there is one */
} ra_made_pieces;
ra_status ra_make_pieces(void *made_pieces, char *packed);

#endif
