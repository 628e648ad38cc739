#include "transport/link.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/size.h"
#include "core/status.h"
#include "transport/crc32c.h"
#include "transport/link_internal.h"

#define GATHER_TAG ((uint64_t)1 << 63) /* and above: the link's own messages */

double ra_link_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ------------------------------------------------------------------------------------------------------ life and errors */

ra_status ra_link_create(const ra_comm_ops *ops, void *ctx, int rank, int ranks, const char *transport, ra_link **out) {
    ra_status status = RA_OK;
    ra_link *link = NULL;
    *out = NULL;
    if (!ops->post_recv || !ops->post_send || !ops->wait || !ops->cancel) {
        status = ra_fail(RA_INVALID, "a transport needs post_recv, post_send, wait and cancel");
    } else if (ranks < 1 || rank < 0 || rank >= ranks) {
        status = ra_fail(RA_INVALID, "rank %d of %d ranks does not exist", rank, ranks);
    } else if (!(link = ra_calloc(sizeof *link)) || !(link->peers = ra_calloc(ranks * (int64_t)sizeof *link->peers))) {
        status = ra_fail(RA_NOMEM, "no memory for a link to %d ranks", ranks);
    }
    if (status != RA_OK) {
        ra_free(link, sizeof *link);
        if (ops->destroy) ops->destroy(ctx);
        return status;
    }
    link->ops = *ops;
    link->ctx = ctx;
    link->rank = rank;
    link->ranks = ranks;
    strncpy(link->transport, transport, sizeof link->transport - 1);
    link->timeout = 60;
    link->start_timeout = 600;
    pthread_mutex_init(&link->mutex, NULL);
    *out = link;
    return RA_OK;
}

static void forget(ra_link *link, ra_flight *flight) {
    if (flight->previous) flight->previous->next = flight->next;
    else link->flights = flight->next;
    if (flight->next) flight->next->previous = flight->previous;
    flight->next = link->spare;
    link->spare = flight;
}

/* Gives up a request; false: its buffer must live for ever. */
static bool give_up(ra_link *link, ra_flight *flight) {
    bool freed = link->ops.cancel(link->ctx, flight->request) == RA_OK;
    if (!freed) link->kept_buffers++;
    forget(link, flight);
    return freed;
}

void ra_link_destroy(ra_link *link) {
    if (!link) return;
    while (link->flights) give_up(link, link->flights);
    if (link->ops.destroy) link->ops.destroy(link->ctx);
    while (link->spare) {
        ra_flight *next = link->spare->next;
        ra_free(link->spare, sizeof *link->spare);
        link->spare = next;
    }
    pthread_mutex_destroy(&link->mutex);
    ra_free(link->peers, link->ranks * (int64_t)sizeof *link->peers);
    ra_free(link, sizeof *link);
}

int ra_link_rank(const ra_link *link) { return link->rank; }
int ra_link_size(const ra_link *link) { return link->ranks; }
const char *ra_link_transport(const ra_link *link) { return link->transport; }

ra_status ra_link_set_timeout(ra_link *link, double timeout, double start_timeout) {
    if (!(timeout > 0) || !isfinite(timeout)) return ra_fail(RA_INVALID, "timeout is %g seconds; it must be positive", timeout);
    if (!(start_timeout > 0) || !isfinite(start_timeout)) {
        return ra_fail(RA_INVALID, "start_timeout is %g seconds; it must be positive", start_timeout);
    }
    pthread_mutex_lock(&link->mutex);
    link->timeout = timeout;
    link->start_timeout = start_timeout;
    pthread_mutex_unlock(&link->mutex);
    return RA_OK;
}

void ra_link_set_checksum(ra_link *link, bool payload_crc) {
    pthread_mutex_lock(&link->mutex);
    link->checksum = payload_crc;
    pthread_mutex_unlock(&link->mutex);
}

/* Breaks the link with the sentence recorded on this thread, unless it is broken already; returns why it is broken. */
static ra_status break_link(ra_link *link, ra_status status) {
    if (link->status == RA_OK) {
        link->status = status;
        strncpy(link->sentence, ra_last_error(), sizeof link->sentence - 1);
        if (link->ops.abort) link->ops.abort(link->ctx, status);
    }
    return ra_fail(link->status, "%s", link->sentence);
}

static ra_status broken(const ra_link *link) {
    return link->status == RA_OK ? RA_OK : ra_fail(link->status, "%s", link->sentence);
}

/* The lock is part of the link's inside: taking it leaves the link as const as it was. */
static pthread_mutex_t *lock_of(const ra_link *link) { return &((ra_link *)(uintptr_t)link)->mutex; }

ra_status ra_link_status(const ra_link *link) {
    pthread_mutex_lock(lock_of(link));
    ra_status status = broken(link);
    pthread_mutex_unlock(lock_of(link));
    return status;
}

void ra_link_abort(ra_link *link, ra_status status, const char *reason) {
    pthread_mutex_lock(&link->mutex);
    ra_fail(status, "rank %d gave up: %s", link->rank, reason ? reason : "no reason given");
    break_link(link, status == RA_OK ? RA_ABORTED : status);
    pthread_mutex_unlock(&link->mutex);
}

ra_link_counts ra_link_read(const ra_link *link) {
    pthread_mutex_lock(lock_of(link));
    ra_link_counts counts = link->counts;
    pthread_mutex_unlock(lock_of(link));
    return counts;
}

/* ------------------------------------------------------------------------------------------------------------- messages */

static ra_status start(ra_link *link, bool receiving, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload,
                       ra_transfer *transfer) {
    RA_TRY(broken(link));
    int64_t bytes;
    if (peer < 0 || peer >= link->ranks || payload < 0 || !ra_add(payload, RA_LINK_HEADER, &bytes)) {
        return ra_fail(RA_INTERNAL, "a message of %lld bytes for rank %d of %d", (long long)payload, peer, link->ranks);
    }
    ra_flight *flight = link->spare;
    if (flight) link->spare = flight->next;
    else if (!(flight = ra_alloc(sizeof *flight))) return break_link(link, ra_fail(RA_NOMEM, "no memory to note a message"));
    *flight = (ra_flight){.buf = buf, .payload = payload, .step = step, .tag = tag, .peer = peer, .receiving = receiving};
    ra_status status;
    if (receiving) {
        status = link->ops.post_recv(link->ctx, peer, tag, buf, (size_t)bytes, &flight->request);
    } else {
        ra_header header = {.sequence = link->peers[peer].sequence++,
                            .step = step,
                            .tag = tag,
                            .length = payload,
                            .source = link->rank,
                            .destination = peer};
        if (link->checksum) {
            header.flags = RA_HEADER_PAYLOAD_CRC;
            header.payload_crc = ra_crc32c(0, (char *)buf + RA_LINK_HEADER, (size_t)payload);
        }
        ra_header_write(&header, buf);
        status = link->ops.post_send(link->ctx, peer, tag, buf, (size_t)bytes, &flight->request);
    }
    flight->next = status == RA_OK ? link->flights : link->spare;
    if (status != RA_OK) {
        link->spare = flight;
        ra_fail_context(status, "step %lld, %s rank %d: ", (long long)step, receiving ? "receiving from" : "sending to", peer);
        return break_link(link, status);
    }
    if (link->flights) link->flights->previous = flight;
    link->flights = flight;
    *transfer = (ra_transfer){
        .request = flight, .buffer = buf, .payload = payload, .peer = peer, .receiving = receiving, .tag = tag};
    return RA_OK;
}

ra_status ra_link_recv(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer) {
    *transfer = (ra_transfer){0};
    pthread_mutex_lock(&link->mutex);
    ra_status status = start(link, true, peer, tag, step, buf, payload, transfer);
    pthread_mutex_unlock(&link->mutex);
    return status;
}

ra_status ra_link_send(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer) {
    *transfer = (ra_transfer){0};
    pthread_mutex_lock(&link->mutex);
    ra_status status = start(link, false, peer, tag, step, buf, payload, transfer);
    pthread_mutex_unlock(&link->mutex);
    return status;
}

/* Is what came what was asked for? */
static ra_status check_message(ra_link *link, const ra_flight *flight, size_t received) {
    ra_peer *peer = &link->peers[flight->peer];
    if (received != (size_t)(flight->payload + RA_LINK_HEADER)) {
        return ra_fail(RA_PROTOCOL, "%zu bytes came instead of %lld", received, (long long)flight->payload + RA_LINK_HEADER);
    }
    ra_header header;
    RA_TRY(ra_header_read(flight->buf, &header));
    if (header.source != flight->peer || header.destination != link->rank) {
        return ra_fail(RA_PROTOCOL, "the message goes from rank %d to rank %d", header.source, header.destination);
    }
    if (header.tag != flight->tag) {
        return ra_fail(RA_PROTOCOL, "the message has tag %llu instead of %llu", (unsigned long long)header.tag,
                       (unsigned long long)flight->tag);
    }
    if (header.length != flight->payload) {
        return ra_fail(RA_PROTOCOL, "the message says %lld bytes instead of %lld", (long long)header.length,
                       (long long)flight->payload);
    }
    if (!ra_seen_mark(&peer->seen, header.sequence)) {
        return ra_fail(RA_PROTOCOL, "message number %llu came a second time", (unsigned long long)header.sequence);
    }
    if ((header.flags & RA_HEADER_PAYLOAD_CRC) &&
        header.payload_crc != ra_crc32c(0, flight->buf + RA_LINK_HEADER, (size_t)flight->payload)) {
        return ra_fail(RA_PROTOCOL, "the payload is damaged (its CRC differs)");
    }
    return RA_OK;
}

/* Looks at one message for at most `seconds`; sets *done. On failure breaks the link. */
static ra_status advance(ra_link *link, ra_flight *flight, double seconds, const char *phase, bool *done) {
    int finished = 0;
    size_t received = 0;
    *done = false;
    ra_status status = link->ops.wait(link->ctx, flight->request, seconds, &finished, &received);
    if (status == RA_OK && !finished) return RA_OK;
    *done = true;
    ra_peer *peer = &link->peers[flight->peer];
    if (status == RA_OK) {
        if (flight->receiving) status = check_message(link, flight, received);
    }
    if (status == RA_OK) {
        peer->arrived = true;
        peer->heard = ra_link_now();
        int64_t *bytes = flight->receiving ? &link->counts.bytes_received : &link->counts.bytes_sent;
        int64_t *messages = flight->receiving ? &link->counts.messages_received : &link->counts.messages_sent;
        *bytes += flight->payload;
        *messages += 1;
    } else {
        ra_fail_context(status, "%s, step %lld, %s rank %d: ", phase, (long long)flight->step,
                        flight->receiving ? "receiving from" : "sending to", flight->peer);
    }
    forget(link, flight);
    return status == RA_OK ? RA_OK : break_link(link, status);
}

ra_status ra_link_wait(ra_link *link, ra_transfer *transfers, int64_t count, const char *phase) {
    pthread_mutex_lock(&link->mutex);
    double begin = ra_link_now();
    ra_status status = broken(link);
    for (int64_t i = 0; i < count && status == RA_OK; i++) {
        ra_flight *flight = transfers[i].request;
        while (flight && status == RA_OK) {
            bool done;
            status = advance(link, flight, 0.01, phase, &done);
            if (done) transfers[i].request = NULL;
            if (done || status != RA_OK) break;
            const ra_peer *peer = &link->peers[flight->peer];
            double limit = peer->arrived ? link->timeout : link->start_timeout;
            double since = peer->heard > begin ? peer->heard : begin;
            if (ra_link_now() - since > limit) {
                ra_fail(RA_TIMEOUT, "rank %d was silent for %g s (%s, step %lld)", flight->peer, limit, phase,
                        (long long)flight->step);
                status = break_link(link, RA_TIMEOUT);
            }
            pthread_mutex_unlock(&link->mutex);
            pthread_mutex_lock(&link->mutex);
            if (status == RA_OK) status = broken(link);
        }
    }
    link->counts.wait_seconds += ra_link_now() - begin;
    pthread_mutex_unlock(&link->mutex);
    return status;
}

void ra_link_poll(ra_link *link) { (void)link; }

bool ra_link_cancel(ra_link *link, ra_transfer *transfers, int64_t count) {
    bool all = true;
    pthread_mutex_lock(&link->mutex);
    for (int64_t i = 0; i < count; i++) {
        if (transfers[i].request && !give_up(link, transfers[i].request)) all = false;
        transfers[i].request = NULL;
    }
    pthread_mutex_unlock(&link->mutex);
    return all;
}

/* ------------------------------------------------------------------------------------------------------------ allgather */

/* Everyone to everyone at once: a message is small, and p-1 of them are in flight. Room: [receive 0, send 0, receive 1, ...]. */
ra_status ra_link_allgather(ra_link *link, const void *mine, void *all, int64_t bytes, const char *phase) {
    RA_TRY(ra_link_status(link));
    int64_t others = link->ranks - 1, frame = bytes + RA_LINK_HEADER, room = ra_sat_mul(2 * others, ra_round_up(frame, 8));
    int64_t table = 2 * others * (int64_t)sizeof(ra_transfer);
    if (bytes > 0) memmove((char *)all + link->rank * bytes, mine, (size_t)bytes);
    if (others == 0) return RA_OK;
    char *buffers = room < INT64_MAX ? ra_alloc(room) : NULL;
    ra_transfer *transfers = ra_calloc(table);
    uint64_t tag = GATHER_TAG + 1 + (link->gathers++ & 0xfffff);
    ra_status status = RA_OK;
    if (!buffers || !transfers) {
        pthread_mutex_lock(&link->mutex);
        status = break_link(link, ra_fail(RA_NOMEM, "no memory to exchange %lld bytes with %d ranks", (long long)bytes, link->ranks));
        pthread_mutex_unlock(&link->mutex);
    }
    for (int64_t i = 0; i < others && status == RA_OK; i++) {
        int peer = (int)((link->rank + link->ranks - 1 - i) % link->ranks);
        status = ra_link_recv(link, peer, tag, 0, buffers + 2 * i * ra_round_up(frame, 8), bytes, &transfers[2 * i]);
    }
    for (int64_t i = 0; i < others && status == RA_OK; i++) {
        int peer = (int)((link->rank + 1 + i) % link->ranks);
        char *buf = buffers + (2 * i + 1) * ra_round_up(frame, 8);
        if (bytes > 0) memcpy(buf + RA_LINK_HEADER, (char *)all + link->rank * bytes, (size_t)bytes);
        status = ra_link_send(link, peer, tag, 0, buf, bytes, &transfers[2 * i + 1]);
    }
    if (status == RA_OK) status = ra_link_wait(link, transfers, 2 * others, phase);
    for (int64_t i = 0; i < others && status == RA_OK && bytes > 0; i++) {
        int peer = (int)((link->rank + link->ranks - 1 - i) % link->ranks);
        memcpy((char *)all + peer * bytes, buffers + 2 * i * ra_round_up(frame, 8) + RA_LINK_HEADER, (size_t)bytes);
    }
    bool free_buffers = !transfers || ra_link_cancel(link, transfers, 2 * others);
    ra_free(transfers, table);
    if (free_buffers && buffers) ra_free(buffers, room);
    return status;
}
