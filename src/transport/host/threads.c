/* Ranks that are threads of one process, and `self`, which is the same with one rank.
 *
 * A hub is shared by its ranks. For each (receiver, sender) pair it keeps two queues: sends that wait for a receive, and
 * receives that wait for a send. When both halves of a match are posted, whichever rank first looks at its half copies,
 * straight from the sender's buffer to the receiver's, outside the lock. So a rank that only waits copies for one that is late
 * and has to compute.
 *
 *     waiting --post--> matched --look--> copying --memcpy done--> done        (lock taken for each arrow, not for the copy)
 *        |
 *        +-- cancelled, or its peer is gone: the request ends
 *
 * Messages up to EAGER bytes are copied when they are sent, into the receiver's buffer if it is there already. If not, they
 * belong to the hub from then on, so that a rank may say its last word and leave. A rank that is destroyed or aborts is `gone`:
 * requests that wait for it fail instead of waiting. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/size.h"
#include "core/status.h"
#include "transport/link.h"

#define EAGER 1024
#define SPARE ((int64_t)sizeof(request) + EAGER)
#define LOOKS 64 /* at what has changed, before a thread sleeps until something does: to be woken takes longer */

typedef enum state { WAITING, MATCHED, COPYING, DONE } state;

typedef struct request {
    struct request *next;
    struct request *match; /* of a matched one: the other half */
    int owner, peer;
    bool receiving;
    bool buffered; /* an eager send: the hub's own, nobody waits for it */
    state state;
    ra_status status; /* when done */
    uint64_t tag;
    char *buf;
    size_t bytes, received;
} request;

typedef struct queue {
    request *head, *tail;
} queue;

typedef struct pair {
    queue sends, receives;
} pair;

typedef struct hub hub;

typedef struct endpoint {
    hub *hub;
    int rank;
    bool gone;
    pthread_cond_t changed; /* a request of this rank has changed, or somebody is gone: */
    atomic_uint changes;    /* so many times */
} endpoint;

struct hub {
    pthread_mutex_t mutex;
    int ranks, alive;
    request *spare; /* of SPARE bytes each, for reuse */
    endpoint *endpoints;
    pair *pairs; /* [receiver * ranks + sender] */
};

static pair *pair_of(hub *h, int receiver, int sender) { return &h->pairs[(int64_t)receiver * h->ranks + sender]; }

static queue *queue_of(hub *h, const request *r) {
    pair *p = r->receiving ? pair_of(h, r->owner, r->peer) : pair_of(h, r->peer, r->owner);
    return r->receiving ? &p->receives : &p->sends;
}

static void append(queue *q, request *r) {
    r->next = NULL;
    if (q->tail) q->tail->next = r;
    else q->head = r;
    q->tail = r;
}

static void unlink_request(queue *q, request *r) {
    request *before = NULL;
    for (request *at = q->head; at; before = at, at = at->next) {
        if (at != r) continue;
        if (before) before->next = at->next;
        else q->head = at->next;
        if (q->tail == at) q->tail = before;
        return;
    }
}

static request *find(const queue *q, uint64_t tag) {
    for (request *at = q->head; at; at = at->next)
        if (at->tag == tag) return at;
    return NULL;
}

/* With the lock held, as all that follows. NULL: there is no memory. */
static request *new_request(hub *h, const request *wanted) {
    request *r = h->spare ? h->spare : ra_alloc(SPARE);
    if (!r) return NULL;
    if (h->spare) h->spare = r->next;
    *r = *wanted;
    if (r->buffered) {
        r->buf = (char *)(r + 1);
        if (r->bytes > 0) memcpy(r->buf, wanted->buf, r->bytes);
    }
    return r;
}

static void free_request(hub *h, request *r) {
    r->next = h->spare;
    h->spare = r;
}

static void tell(endpoint *e) {
    atomic_fetch_add(&e->changes, 1);
    pthread_cond_broadcast(&e->changed);
}

static void finish(hub *h, request *r, ra_status status) {
    r->state = DONE;
    r->status = status;
    tell(&h->endpoints[r->owner]);
}

/* Copies a matched pair and ends both. Drops the lock for a long copy. */
static void transfer(hub *h, request *receive, request *send) {
    const size_t bytes = send->bytes < receive->bytes ? send->bytes : receive->bytes;
    const bool lengthy = bytes > EAGER;
    receive->state = send->state = COPYING;
    if (lengthy) pthread_mutex_unlock(&h->mutex);
    if (bytes > 0) memcpy(receive->buf, send->buf, bytes);
    if (lengthy) pthread_mutex_lock(&h->mutex);
    receive->received = send->bytes;
    finish(h, receive, send->bytes > receive->bytes ? RA_PROTOCOL : RA_OK);
    if (send->buffered) free_request(h, send);
    else finish(h, send, RA_OK);
}

/* Copies a matched pair, of which r is one half. */
static void transfer_match(hub *h, request *r) {
    if (r->receiving) transfer(h, r, r->match);
    else transfer(h, r->match, r);
}

/* Both halves are posted. */
static void pair_up(hub *h, request *receive, request *send) {
    if (send->bytes <= EAGER) {
        transfer(h, receive, send);
        return;
    }
    receive->match = send;
    send->match = receive;
    receive->state = send->state = MATCHED;
    tell(&h->endpoints[receive->owner]);
    tell(&h->endpoints[send->owner]);
}

static ra_status check_peer(const endpoint *e, int peer) {
    if (peer >= 0 && peer < e->hub->ranks) return RA_OK;
    return ra_fail(RA_INTERNAL, "peer %d is not a rank of 0..%d", peer, e->hub->ranks - 1);
}

static ra_status post_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    hub *h = e->hub;
    const request wanted = {.owner = e->rank, .peer = peer, .tag = tag, .receiving = true, .buf = buf, .bytes = bytes};
    RA_TRY(check_peer(e, peer));
    pthread_mutex_lock(&h->mutex);
    request *r = new_request(h, &wanted);
    queue *sends = &pair_of(h, e->rank, peer)->sends;
    request *send = r ? find(sends, tag) : NULL;
    if (send) {
        unlink_request(sends, send);
        pair_up(h, r, send);
    } else if (r) {
        append(queue_of(h, r), r);
    }
    pthread_mutex_unlock(&h->mutex);
    *out = r;
    return r ? RA_OK : ra_fail(RA_NOMEM, "no memory for a receive request");
}

/* The hub keeps a small message for a receiver that has not asked for it yet. False: there is no memory. */
static bool keep(hub *h, const request *send) {
    if (h->endpoints[send->peer].gone) return true; /* nobody will */
    request kept = *send;
    kept.buffered = true;
    request *copy = new_request(h, &kept);
    if (copy) append(queue_of(h, copy), copy);
    return copy != NULL;
}

static ra_status post_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    hub *h = e->hub;
    const request wanted = {.owner = e->rank, .peer = peer, .tag = tag, .buf = (char *)(uintptr_t)buf, .bytes = bytes};
    RA_TRY(check_peer(e, peer));
    pthread_mutex_lock(&h->mutex);
    request *r = new_request(h, &wanted);
    queue *receives = &pair_of(h, peer, e->rank)->receives;
    request *receive = r ? find(receives, tag) : NULL;
    if (receive) {
        unlink_request(receives, receive);
        pair_up(h, receive, r);
    } else if (r && bytes > EAGER) {
        append(queue_of(h, r), r);
    } else if (r && keep(h, r)) {
        r->state = DONE;
    } else if (r) {
        free_request(h, r);
        r = NULL;
    }
    pthread_mutex_unlock(&h->mutex);
    *out = r;
    return r ? RA_OK : ra_fail(RA_NOMEM, "no memory for a send request");
}

/* Until something has changed, or it takes too long. Drops the lock meanwhile. */
static void look_for_change(endpoint *e) {
    const unsigned known = atomic_load(&e->changes);
    pthread_mutex_unlock(&e->hub->mutex);
    for (int looks = 0; looks < LOOKS && atomic_load(&e->changes) == known; looks++) sched_yield();
    pthread_mutex_lock(&e->hub->mutex);
}

static ra_status wait_request(void *ctx, void *request_, double seconds, int *done, size_t *received) {
    endpoint *e = ctx;
    hub *h = e->hub;
    request *r = request_;
    ra_status status = RA_OK;
    *done = 0;
    pthread_mutex_lock(&h->mutex);
    bool looked = false, timed = false;
    struct timespec deadline = {0};
    while (r->state != DONE) {
        if (r->state == MATCHED) {
            transfer_match(h, r);
            break;
        }
        if (r->state == WAITING && (h->endpoints[r->peer].gone || e->gone)) {
            unlink_request(queue_of(h, r), r);
            r->state = DONE;
            r->status = RA_PEER_LOST;
            break;
        }
        if (seconds <= 0) break;
        if (!looked) {
            look_for_change(e);
            looked = true;
            continue;
        }
        if (!timed) deadline = ra_seconds_ahead(seconds);
        timed = true;
        if (pthread_cond_timedwait(&e->changed, &h->mutex, &deadline) == ETIMEDOUT) seconds = 0;
    }
    if (r->state == DONE) {
        status = r->status;
        if (received) *received = r->received;
        *done = status == RA_OK;
    }
    if (status == RA_PEER_LOST) ra_fail(status, "rank %d has left", r->peer);
    if (status == RA_PROTOCOL) ra_fail(status, "rank %d sent %zu bytes; %zu were expected", r->peer, r->received, r->bytes);
    if (r->state == DONE) free_request(h, r);
    pthread_mutex_unlock(&h->mutex);
    return status;
}

/* Always able to give the buffer back: a copy under way ends by itself, and one to come is made now. */
static ra_status cancel(void *ctx, void *request_) {
    endpoint *e = ctx;
    request *r = request_;
    pthread_mutex_lock(&e->hub->mutex);
    if (r->state == WAITING) unlink_request(queue_of(e->hub, r), r);
    else if (r->state == MATCHED) transfer_match(e->hub, r);
    else
        while (r->state != DONE) pthread_cond_wait(&e->changed, &e->hub->mutex);
    free_request(e->hub, r);
    pthread_mutex_unlock(&e->hub->mutex);
    return RA_OK;
}

/* From now on nobody waits for this rank. */
static void leave(endpoint *e) {
    if (e->gone) return;
    e->gone = true;
    for (int rank = 0; rank < e->hub->ranks; rank++) tell(&e->hub->endpoints[rank]);
}

static void abort_rank(void *ctx, ra_status status) {
    (void)status;
    endpoint *e = ctx;
    pthread_mutex_lock(&e->hub->mutex);
    leave(e);
    pthread_mutex_unlock(&e->hub->mutex);
}

static void free_all(request *list) {
    while (list) {
        request *next = list->next;
        ra_free(list, SPARE);
        list = next;
    }
}

static void free_hub(hub *h) {
    int64_t count = (int64_t)h->ranks * h->ranks;
    for (int64_t i = 0; i < count; i++) {
        free_all(h->pairs[i].sends.head);
        free_all(h->pairs[i].receives.head);
    }
    free_all(h->spare);
    for (int rank = 0; rank < h->ranks; rank++) pthread_cond_destroy(&h->endpoints[rank].changed);
    pthread_mutex_destroy(&h->mutex);
    ra_free(h->pairs, count * (int64_t)sizeof(pair));
    ra_free(h->endpoints, h->ranks * (int64_t)sizeof(endpoint));
    ra_free(h, sizeof(hub));
}

/* Removes what nobody will ever match or wait for: this rank's own requests, and small messages to it. */
static void purge(hub *h, queue *q, int owner, bool buffered) {
    queue kept = {0};
    for (request *at = q->head; at;) {
        request *next = at->next;
        if (buffered ? at->buffered : at->owner == owner && !at->buffered) free_request(h, at);
        else append(&kept, at);
        at = next;
    }
    *q = kept;
}

static void destroy(void *ctx) {
    endpoint *e = ctx;
    hub *h = e->hub;
    pthread_mutex_lock(&h->mutex);
    leave(e);
    for (int peer = 0; peer < h->ranks; peer++) {
        purge(h, &pair_of(h, e->rank, peer)->receives, e->rank, false);
        purge(h, &pair_of(h, e->rank, peer)->sends, e->rank, true);
        purge(h, &pair_of(h, peer, e->rank)->sends, e->rank, false);
    }
    bool last = --h->alive == 0;
    pthread_mutex_unlock(&h->mutex);
    if (last) free_hub(h);
}

ra_status ra_transport_threads(int ranks, ra_comm_ops *ops, void **ctxs) {
    int64_t count = (int64_t)ranks * ranks, endpoint_bytes = ranks * (int64_t)sizeof(endpoint);
    if (ranks < 1 || ranks > 32768) return ra_fail(RA_INVALID, "ranks is %d; it must lie in 1..32768", ranks);
    hub *h = ra_calloc(sizeof(hub));
    endpoint *endpoints = ra_calloc(endpoint_bytes);
    pair *pairs = ra_calloc(count * (int64_t)sizeof(pair));
    if (!h || !endpoints || !pairs) {
        ra_free(pairs, count * (int64_t)sizeof(pair));
        ra_free(endpoints, endpoint_bytes);
        ra_free(h, sizeof(hub));
        return ra_fail(RA_NOMEM, "no memory for %d ranks", ranks);
    }
    pthread_mutex_init(&h->mutex, NULL);
    for (int rank = 0; rank < ranks; rank++) {
        endpoints[rank] = (endpoint){.hub = h, .rank = rank};
        ra_cond_init(&endpoints[rank].changed);
        ctxs[rank] = &endpoints[rank];
    }
    h->ranks = h->alive = ranks;
    h->endpoints = endpoints;
    h->pairs = pairs;
    *ops = (ra_comm_ops){.struct_size = sizeof(ra_comm_ops),
                         .post_recv = post_recv,
                         .post_send = post_send,
                         .wait = wait_request,
                         .cancel = cancel,
                         .abort = abort_rank,
                         .destroy = destroy};
    return RA_OK;
}

ra_status ra_transport_self(ra_comm_ops *ops, void **ctx) { return ra_transport_threads(1, ops, ctx); }
