/* The inside of a link, shared by link.c (messages), link_control.c (heartbeats, verdicts) and header.c (the frame). */
#ifndef RA_TRANSPORT_LINK_INTERNAL_H
#define RA_TRANSPORT_LINK_INTERNAL_H

#include <pthread.h>

#include "transport/link.h"

/* ------------------------------------------------------------------------------------------------------------- header
 *
 *     0 magic 4 | version 2 | flags 2 | 8 sequence 8 | 16 step 8 | 24 tag 8 | 32 length 8 |
 *     40 source 4 | destination 4 | 48 payload crc 4 | reserved 8 | 60 header crc 4
 *
 * little endian; the header crc covers the 60 bytes before it. */
typedef struct ra_header {
    uint16_t flags;
    uint64_t sequence; /* 0, 1, ... from source to destination */
    int64_t step;
    uint64_t tag;
    int64_t length; /* of the payload */
    int32_t source, destination;
    uint32_t payload_crc; /* 0 without RA_HEADER_PAYLOAD_CRC */
} ra_header;

#define RA_HEADER_PAYLOAD_CRC 1u

void ra_header_write(const ra_header *header, void *buf);
/* RA_PROTOCOL with a sentence if magic, version, crc, flags or the reserved bytes are not as they should be. */
ra_status ra_header_read(const void *buf, ra_header *header);

/* --------------------------------------------------------------------------------------------------------------- link */

#define RA_SEEN_WINDOW 4096 /* sequence numbers a peer's messages may be apart */

/* Which sequence numbers of a peer have come: all below `base`, and those whose bit (number % window) is set. */
typedef struct ra_seen {
    uint64_t base;
    uint64_t bits[RA_SEEN_WINDOW / 64];
} ra_seen;

/* True the first time; false for a number that came before or lies beyond the window. */
bool ra_seen_mark(ra_seen *seen, uint64_t sequence);

/* A message in flight; ra_transfer.request points to it. */
typedef struct ra_flight {
    struct ra_flight *next, *previous;
    void *request; /* the transport's */
    char *buf;
    int64_t payload, step;
    uint64_t tag;
    int32_t peer;
    bool receiving;
} ra_flight;

typedef struct ra_peer {
    uint64_t sequence;   /* of the next message to it */
    double heard;        /* when its last sign of life came */
    bool arrived;        /* anything ever came */
    ra_seen seen;
} ra_peer;

struct ra_link {
    ra_comm_ops ops;
    void *ctx;
    int rank, ranks;
    char transport[16];
    pthread_mutex_t mutex; /* around everything below and around every call of ops */

    double timeout, start_timeout;
    bool checksum;
    ra_peer *peers;
    ra_flight *flights, *spare; /* in flight; kept for reuse */
    uint64_t gathers;           /* ra_link_allgather calls so far: their tags */
    ra_link_counts counts;
    int64_t kept_buffers; /* of requests that could not be cancelled */

    ra_status status; /* not RA_OK: broken */
    char sentence[512];
};

double ra_link_now(void);

#endif
