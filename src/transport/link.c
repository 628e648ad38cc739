/* Messages: framed, posted, waited for, checked and counted. Heartbeats and verdicts are control.c's. */
#include "transport/link.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/log.h"
#include "core/size.h"
#include "core/status.h"
#include "transport/link_internal.h"

/* A const link may be locked: that changes nothing that callers can see. */
static void lock(const ra_link *link) { ra_link_lock((ra_link *)(uintptr_t)link); }
static void unlock(const ra_link *link) { ra_link_unlock((ra_link *)(uintptr_t)link); }

/* --------------------------------------------------------------------------------------------------------------- errors */

ra_status ra_link_broken(const ra_link *link) {
    return link->status == RA_OK ? RA_OK : ra_fail(link->status, "%s", link->sentence);
}

ra_status ra_link_break(ra_link *link, ra_status status, int culprit) {
    if (link->status == RA_OK) {
        link->status = status;
        link->culprit = culprit;
        snprintf(link->sentence, sizeof link->sentence, "%s", ra_last_error());
        if (link->broke) link->broke(link->broke_arg);
        if (link->open) {
            ra_control_tell(link);
            if (link->ops.abort) link->ops.abort(link->ctx, status);
            ra_history_print(link); /* last, for stderr may be slow */
        }
    }
    return ra_link_broken(link);
}

ra_status ra_link_status(const ra_link *link) {
    lock(link);
    ra_status status = ra_link_broken(link);
    unlock(link);
    return status;
}

bool ra_link_on_break(ra_link *link, void (*broke)(void *arg), void *arg) {
    lock(link);
    link->broke = broke;
    link->broke_arg = arg;
    const bool threaded = link->threaded;
    unlock(link);
    return threaded;
}

void ra_link_abort(ra_link *link, ra_status status, const char *reason) {
    lock(link);
    if (status == RA_OK) status = RA_ABORTED;
    ra_fail(status, "rank %d gave up: %s", link->rank, reason && *reason ? reason : "no reason given");
    ra_link_break(link, status, link->rank);
    unlock(link);
}

/* ----------------------------------------------------------------------------------------------------------------- life */

static void free_link(ra_link *link) {
    while (link->spare) {
        ra_flight *next = link->spare->next;
        ra_free(link->spare, sizeof *link->spare);
        link->spare = next;
    }
    pthread_cond_destroy(&link->wake);
    pthread_mutex_destroy(&link->mutex);
    pthread_mutex_destroy(&link->next);
    ra_free(link->peers, link->ranks * (int64_t)sizeof *link->peers);
    ra_free(link, sizeof *link);
}

static void forget(ra_link *link, ra_flight *flight) {
    if (flight->previous) flight->previous->next = flight->next;
    else link->flights = flight->next;
    if (flight->next) flight->next->previous = flight->previous;
    if (link->polled == flight) link->polled = flight->next;
    if (link->awaited == flight) link->awaited = NULL;
    flight->next = link->spare;
    link->spare = flight;
}

/* False: the transport will not let go of the buffer. */
static bool give_up(ra_link *link, ra_flight *flight) {
    bool free_buffer = !flight->request || link->ops.cancel(link->ctx, flight->request) == RA_OK;
    if (!free_buffer) link->counts.kept_buffers++;
    forget(link, flight);
    return free_buffer;
}

void ra_link_destroy(ra_link *link) {
    if (!link) return;
    ra_control_stop(link);
    ra_control_leave(link);
    while (link->flights) give_up(link, link->flights);
    if (link->ops.destroy) link->ops.destroy(link->ctx);
    free_link(link);
}

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
    snprintf(link->transport, sizeof link->transport, "%s", transport);
    snprintf(link->phase, sizeof link->phase, "start");
    link->timeout = 60;
    link->start_timeout = 600;
    link->created = ra_seconds();
    pthread_mutex_init(&link->mutex, NULL);
    pthread_mutex_init(&link->next, NULL);
    ra_cond_init(&link->wake);
    lock(link);
    status = ra_control_start(link);
    link->open = status == RA_OK;
    unlock(link);
    if (status == RA_OK) *out = link;
    else ra_link_destroy(link);
    return status;
}

int ra_link_rank(const ra_link *link) { return ra_link_is_solo(link) ? link->solo_rank : link->rank; }
int ra_link_size(const ra_link *link) { return ra_link_is_solo(link) ? link->solo_ranks : link->ranks; }
const char *ra_link_transport(const ra_link *link) { return link->transport; }

ra_status ra_link_set_timeout(ra_link *link, double timeout, double start_timeout) {
    if (!(timeout > 0) || !isfinite(timeout))
        return ra_fail(RA_INVALID, "timeout is %g seconds; it must be positive and finite", timeout);
    if (!(start_timeout > 0) || !isfinite(start_timeout)) {
        return ra_fail(RA_INVALID, "start_timeout is %g seconds; it must be positive and finite", start_timeout);
    }
    lock(link);
    link->timeout = timeout;
    link->start_timeout = start_timeout;
    link->next_beat = 0; /* the peers learn of it, and beat as often as it needs */
    pthread_cond_signal(&link->wake);
    ra_status status = ra_link_broken(link);
    unlock(link);
    return status;
}

double ra_link_timeout(const ra_link *link) {
    lock(link);
    const double timeout = link->timeout;
    unlock(link);
    return timeout;
}

double ra_link_start_timeout(const ra_link *link) {
    lock(link);
    const double timeout = link->start_timeout;
    unlock(link);
    return timeout;
}

void ra_link_set_mute(ra_link *link) {
    lock(link);
    link->mute = true;
    unlock(link);
}

void ra_link_set_checksum(ra_link *link, bool payload_crc) {
    lock(link);
    link->checksum = payload_crc;
    unlock(link);
}

ra_link_counts ra_link_read(const ra_link *link) {
    lock(link);
    ra_link_counts counts = link->counts;
    unlock(link);
    return counts;
}

/* -------------------------------------------------------------------------------------------------------------- posting */

static ra_status post(ra_link *link, ra_flight *flight, uint32_t crc) {
    size_t bytes = (size_t)(flight->payload + RA_LINK_HEADER);
    if (flight->receiving) {
        return link->ops.post_recv(link->ctx, flight->peer, flight->tag, flight->buf, bytes, &flight->request);
    }
    flight->sequence = link->peers[flight->peer].sequence++;
    ra_header header = {.flags = link->checksum ? RA_HEADER_PAYLOAD_CRC : 0,
                        .sequence = flight->sequence,
                        .step = flight->step,
                        .tag = flight->tag,
                        .length = flight->payload,
                        .source = link->rank,
                        .destination = flight->peer,
                        .payload_crc = crc,
                        .call = flight->call};
    ra_header_write(&header, flight->buf);
    return link->ops.post_send(link->ctx, flight->peer, flight->tag, flight->buf, bytes, &flight->request);
}

static ra_status start(ra_link *link, const ra_flight *wanted, uint32_t crc, ra_transfer *transfer) {
    int64_t bytes;
    RA_TRY(ra_link_broken(link));
    if (wanted->peer < 0 || wanted->peer >= link->ranks || wanted->payload < 0 ||
        !ra_add(wanted->payload, RA_LINK_HEADER, &bytes)) {
        return ra_fail(RA_INTERNAL, "cannot exchange %lld bytes with rank %d of %d", (long long)wanted->payload, wanted->peer,
                       link->ranks);
    }
    ra_flight *flight = link->spare ? link->spare : ra_alloc(sizeof *flight);
    if (!flight) {
        ra_fail(RA_NOMEM, "%s, step %lld: rank %d has no memory to note a message", link->phase, (long long)wanted->step,
                link->rank);
        return ra_link_break(link, RA_NOMEM, link->rank);
    }
    if (link->spare) link->spare = flight->next;
    *flight = *wanted;
    flight->call = link->call;
    link->step = flight->step;
    ra_status status = post(link, flight, crc);
    if (status != RA_OK) {
        flight->next = link->spare;
        link->spare = flight;
        ra_fail_context(status, "%s, step %lld, rank %d %s rank %d: ", link->phase, (long long)wanted->step, link->rank,
                        wanted->receiving ? "receiving from" : "sending to", wanted->peer);
        char sentence[RA_SENTENCE];
        snprintf(sentence, sizeof sentence, "%s", ra_last_error());
        ra_control_read(link); /* the peer may have said why */
        ra_fail(status, "%s", sentence);
        return ra_link_break(link, status, status == RA_PEER_LOST ? wanted->peer : link->rank);
    }
    flight->next = link->flights;
    if (link->flights) link->flights->previous = flight;
    link->flights = flight;
    ra_history_note(link, "posted", flight->peer, flight->receiving, flight->tag, flight->step, flight->payload);
    *transfer = (ra_transfer){.request = flight,
                              .buffer = flight->buf,
                              .payload = flight->payload,
                              .peer = flight->peer,
                              .receiving = flight->receiving,
                              .tag = flight->tag};
    return RA_OK;
}

ra_status ra_link_recv(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer) {
    return ra_link_recv_or_make(link, peer, tag, step, buf, payload, NULL, transfer);
}

ra_status ra_link_recv_or_make(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload,
                               const ra_maker *maker, ra_transfer *transfer) {
    ra_flight wanted = {.buf = buf, .payload = payload, .step = step, .tag = tag, .peer = peer, .receiving = true};
    *transfer = (ra_transfer){0};
    if (ra_link_is_solo(link)) return ra_solo_post(link, &wanted, maker, transfer);
    lock(link);
    ra_status status = start(link, &wanted, 0, transfer);
    unlock(link);
    return status;
}

ra_status ra_link_send(ra_link *link, int peer, uint64_t tag, int64_t step, void *buf, int64_t payload, ra_transfer *transfer) {
    ra_flight wanted = {.buf = buf, .payload = payload, .step = step, .tag = tag, .peer = peer};
    *transfer = (ra_transfer){0};
    if (ra_link_is_solo(link)) return ra_solo_post(link, &wanted, NULL, transfer);
    /* Outside the lock, because a large payload takes its time and the heart must beat. Only this thread changes `checksum`. */
    uint32_t crc = link->checksum && payload > 0 ? ra_payload_crc(buf, payload) : 0;
    lock(link);
    ra_status status = start(link, &wanted, crc, transfer);
    unlock(link);
    return status;
}

/* -------------------------------------------------------------------------------------------------------------- waiting */

/* Lets the transport work on a message for at most `seconds`, and notes its end. */
static void advance(ra_link *link, ra_flight *flight, double seconds) {
    int done = 0;
    size_t received = 0;
    ra_status status = link->ops.wait(link->ctx, flight->request, seconds, &done, &received);
    if (status == RA_OK && !done) return;
    ra_peer *peer = &link->peers[flight->peer];
    flight->request = NULL;
    flight->status = status;
    flight->received = received;
    if (status == RA_OK && flight->receiving) {
        peer->arrived = true;
        peer->heard = ra_seconds();
    } else if (status == RA_OK) {
        peer->sent[peer->sent_count % RA_SENT_LOG].tag = flight->tag;
        peer->sent[peer->sent_count++ % RA_SENT_LOG].sequence = flight->sequence;
    } else if (status == RA_PEER_LOST && !peer->lost) {
        peer->lost = true;
        peer->lost_at = ra_seconds();
    }
}

/* Is it the message that was to come? */
static ra_status check(ra_link *link, const ra_flight *flight) {
    if (flight->status != RA_OK || !flight->receiving) return flight->status;
    ra_header header, want = {.source = flight->peer,
                              .destination = link->rank,
                              .tag = flight->tag,
                              .length = flight->payload,
                              .call = flight->call};
    unlock(link); /* the payload's CRC takes its time */
    ra_status status = ra_header_check(flight->buf, flight->received, &want, &header);
    lock(link);
    if (status == RA_OK && !ra_seen_mark(&link->peers[flight->peer].seen, header.sequence)) {
        status = ra_fail(RA_PROTOCOL, "message number %llu came a second time", (unsigned long long)header.sequence);
    }
    return status;
}

/* Takes a finished and checked message off the list: counted, or the reason to break the link. */
static ra_status finish(ra_link *link, ra_flight *flight) {
    ra_status status = flight->status;
    ra_history_note(link, status == RA_OK ? "finished" : "failed", flight->peer, flight->receiving, flight->tag, flight->step,
                    flight->payload);
    if (status == RA_OK && flight->tag < RA_LINK_OWN_TAG) {
        *(flight->receiving ? &link->counts.bytes_received : &link->counts.bytes_sent) += flight->payload;
        *(flight->receiving ? &link->counts.messages_received : &link->counts.messages_sent) += 1;
    } else if (status != RA_OK) {
        ra_fail_context(status, "%s, step %lld, rank %d %s rank %d: ", link->phase, (long long)flight->step, link->rank,
                        flight->receiving ? "receiving from" : "sending to", flight->peer);
        return ra_link_break(link, status, flight->peer); /* stays on the list until the caller gives it up */
    }
    forget(link, flight);
    return RA_OK;
}

ra_wait ra_link_waits_for(const ra_link *link) {
    const ra_flight *awaited = link->awaited;
    if (!awaited) return (ra_wait){0};
    ra_wait wait = {.number = link->waits,
                    .tag = awaited->tag,
                    .sequence = awaited->sequence,
                    .step = awaited->step,
                    .blocker = link->blocker,
                    .seconds = ra_seconds() - link->awaited_since,
                    .peer = awaited->peer,
                    .receiving = awaited->receiving};
    memcpy(wait.phase, link->phase, sizeof wait.phase);
    return wait;
}

static ra_status wait_one(ra_link *link, ra_flight *flight) {
    bool checked = false;
    double ended = 0;
    char sentence[RA_SENTENCE] = "";
    double slice = link->timeout / 32;
    if (slice > 0.01) slice = 0.01;
    link->awaited = flight;
    link->awaited_since = ra_seconds();
    link->waits++;
    link->blocker = 0;
    link->step = flight->step;
    link->peers[flight->peer].missing = false;
    for (;;) {
        RA_TRY(ra_link_broken(link));
        if (flight->request) advance(link, flight, slice);
        /* A peer that is gone may have said why, or another may know: finish waits for that, control.c sets the limit. */
        if (!flight->request && flight->status != RA_PEER_LOST) {
            if (!checked) {
                flight->status = check(link, flight);
                checked = true;
                ended = ra_seconds();
                if (flight->status != RA_OK) snprintf(sentence, sizeof sentence, "%s", ra_last_error());
            }
            if (!ra_link_doubts(link, flight, ended)) {
                if (flight->status != RA_OK) ra_fail(flight->status, "%s", sentence);
                return finish(link, flight);
            }
        }
        if (ra_seconds() - link->serviced >= slice) ra_control_service(link);
        unlock(link);
        if (!flight->request) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        lock(link);
    }
}

ra_status ra_link_wait(ra_link *link, ra_transfer *transfers, int64_t count, const char *phase) {
    lock(link);
    double begin = ra_seconds();
    snprintf(link->phase, sizeof link->phase, "%s", phase);
    ra_status status = ra_link_broken(link);
    for (int64_t i = 0; i < count && status == RA_OK; i++) {
        if (!transfers[i].request) continue;
        status = wait_one(link, transfers[i].request);
        if (status == RA_OK) transfers[i].request = NULL;
    }
    link->awaited = NULL;
    link->counts.wait_seconds += ra_seconds() - begin;
    unlock(link);
    return status;
}

void ra_link_set_stalled(ra_link *link, double since) {
    lock(link);
    link->stalled_since = since;
    unlock(link);
}

bool ra_link_poll(ra_link *link) {
    if (link->ranks == 1) return true;
    if (pthread_mutex_trylock(&link->mutex) != 0) return true;
    if (link->status == RA_OK) {
        ra_flight *flight = link->polled ? link->polled : link->flights;
        if (flight && flight->request) advance(link, flight, 0);
        link->polled = flight ? flight->next : NULL;
        if (ra_seconds() - link->serviced > 0.005) ra_control_service(link);
    }
    bool whole = link->status == RA_OK;
    unlock(link);
    return whole;
}

bool ra_link_cancel(ra_link *link, ra_transfer *transfers, int64_t count) {
    bool all = true;
    lock(link);
    for (int64_t i = 0; i < count; i++) {
        if (transfers[i].request && !give_up(link, transfers[i].request)) all = false;
        transfers[i].request = NULL;
    }
    unlock(link);
    return all;
}
