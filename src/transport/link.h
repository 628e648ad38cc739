/* A rank's link to its peers: framed messages over a transport's raw operations (ra_comm_ops), with deadlines.
 *
 * Every message is one buffer, a frame (core/frame.h): the header, which the link writes and checks, then the payload, which is
 * all that callers see. So nothing is copied:
 *
 *     [ header 64 | payload ... ]
 *       ^ buf       ^ ra_frame_payload(buf)
 *
 * Tags number the messages between two ranks; those in flight at once between two ranks differ in their low RA_LINK_TAG_BITS (a
 * transport may send only these). Tags from RA_LINK_OWN_TAG up are the link's own: heartbeats, verdicts and allgathers. A
 * message that is being sent keeps its buffer, header included, so one buffer is not sent to two peers at once. The link knows
 * nothing of attention. After the first failure the link is broken: all later calls return that status. */
#ifndef RA_TRANSPORT_LINK_H
#define RA_TRANSPORT_LINK_H

#include "core/frame.h"
#include "ringattn.h"

#define RA_LINK_HEADER RA_FRAME_HEADER
#define RA_LINK_OWN_TAG ((uint64_t)1 << 63)
#define RA_LINK_TAG_BITS 20

typedef struct ra_link ra_link;

/* Takes ownership of ctx (calls ops->destroy in the end, also when this fails). */
ra_status ra_link_create(const ra_comm_ops *ops, void *ctx, int rank, int ranks, const char *transport, ra_link **link);
/* A link without peers, for a rank that is played alone: a send goes nowhere and counts, a receive is made on the spot. */
ra_status ra_link_create_solo(int rank, int ranks, ra_link **link);
bool ra_link_is_solo(const ra_link *link);
/* Bounded, never waits for peers; safe for NULL. */
void ra_link_destroy(ra_link *link);

int ra_link_rank(const ra_link *link);
int ra_link_size(const ra_link *link);
const char *ra_link_transport(const ra_link *link);
ra_status ra_link_set_timeout(ra_link *link, double timeout, double start_timeout);
/* A rank that is silent for longer is lost; one that has not arrived yet has the second. */
double ra_link_timeout(const ra_link *link);
double ra_link_start_timeout(const ra_link *link);
/* Seconds that a call may last even if all peers are alive; 0: no limit. */
ra_status ra_link_set_call_timeout(ra_link *link, double seconds);
void ra_link_set_checksum(ra_link *link, bool payload_crc);
/* No post-mortem when it breaks. */
void ra_link_set_mute(ra_link *link);

/* An operation in flight, owned by the caller (lives in its arrays, zero = none). */
typedef struct ra_transfer {
    void *request; /* NULL: finished or none */
    char *buffer;
    int64_t payload; /* bytes expected or sent */
    int32_t peer;
    bool receiving;
    uint64_t tag;
} ra_transfer;

/* What a peer would have sent, for a link without peers: fills the payload. */
typedef struct ra_maker {
    ra_status (*make)(void *arg, char *payload); /* NULL: zeros */
    void *arg;
} ra_maker;

/* payload >= 0 bytes; buf is a frame with room for them. `step` is only for messages to people. */
ra_status ra_link_recv_or_make(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload,
                               const ra_maker *maker, ra_transfer *transfer);
ra_status ra_link_recv(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer);
ra_status ra_link_send(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer);
/* Waits until all are finished. A peer that is silent for the timeout is RA_TIMEOUT, and so are ranks that wait for each
 * other for that long; one that is known dead is RA_PEER_LOST, a damaged message RA_PROTOCOL; the sentence names peer, step
 * and phase ("forward", "backward", "plan"). */
ra_status ra_link_wait(ra_link *link, ra_transfer *transfers, int64_t count, const char *phase);
/* Between these two the rank is in a call that every rank makes, in the same order: a peer that dies meanwhile breaks the link,
 * also while this rank only computes. Calls are numbered, and every message and heartbeat says which one its rank is in: ranks
 * whose calls of the same number differ in phase or in what they work on (`subject`: its digest and its text of "field=value"
 * lines) learn that as RA_DISAGREE, which names both. The phase is also for messages to people; ra_link_wait sets
 * it anew. */
typedef struct ra_subject {
    uint64_t digest;
    const char *text;
    int64_t bytes; /* of the text */
} ra_subject;
void ra_link_begin(ra_link *link, const char *phase, const ra_subject *subject);
void ra_link_end(ra_link *link);
/* In a call, the caller waits for its device, and that only for messages from other devices, since the time `since` (of
 * ra_seconds; 0: no longer). When every rank that is still in the call says so, or waits for a message of the link, for longer
 * than the timeout, that is RA_TIMEOUT. */
void ra_link_set_stalled(ra_link *link, double since);
/* Lets transfers and heartbeats progress; cheap; never blocks. False: the link is broken. */
bool ra_link_poll(ra_link *link);
/* Gives up transfers after an error. False: their buffers must never be freed or reused. */
bool ra_link_cancel(ra_link *link, ra_transfer *transfers, int64_t count);

/* Every rank contributes `bytes` (equal everywhere) and gets all of them in rank order: all has ranks*bytes. */
ra_status ra_link_allgather(ra_link *link, const void *mine, void *all, int64_t bytes, const char *phase);

/* Breaks the link here and tells the peers why; never waits. */
void ra_link_abort(ra_link *link, ra_status status, const char *reason);
/* broke(arg) is called when the link breaks, and a few times a second from then on until it is destroyed, by whichever thread
 * finds it or by the link's own, under its lock; NULL: no more. False: the link has no thread, so that nobody would call while
 * this rank is elsewhere. */
bool ra_link_on_break(ra_link *link, void (*broke)(void *arg), void *arg);
/* RA_OK, or why the link is broken (with the sentence recorded for this thread). */
ra_status ra_link_status(const ra_link *link);

typedef struct ra_link_counts {
    int64_t bytes_sent, bytes_received; /* payload of the caller's messages; the link's own do not count */
    int64_t messages_sent, messages_received;
    double wait_seconds;
    int64_t kept_buffers; /* of requests that could not be cancelled: never freed */
} ra_link_counts;
ra_link_counts ra_link_read(const ra_link *link);

/* Raw transports; each fills ops and ctx for ra_link_create. */
ra_status ra_transport_self(ra_comm_ops *ops, void **ctx);
ra_status ra_transport_threads(int ranks, ra_comm_ops *ops, void **ctxs);

#endif
