#include "transport/host/mpi/messages.h"

#include <stdio.h>

#include "core/clock.h"
#include "transport/host/mpi/calls.h"

#define OWN_BIT (1 << RA_LINK_TAG_BITS)
#define PIECE ((size_t)4 << 20)

typedef struct request {
    struct request *following; /* in endpoint.receives */
    int count, matched, next;  /* pieces; the first that MPI does not have yet; the first that is not finished */
    char *buf;
    size_t bytes, received;
    int peer, tag;
    bool receiving, own; /* own: one of the link's own messages */
    bool too_long;
    int64_t size; /* of this allocation */
    MPI_Request pieces[];
} request;

typedef struct endpoint {
    ra_mpi_shared *shared;
    MPI_Comm comm; /* the duplicate of its opening */
    int opening;
    request *receives; /* of messages that are not the link's own, first posted first */
} endpoint;

static int mpi_tag(const endpoint *e, uint64_t tag) {
    int low = (int)(tag & (((uint64_t)1 << RA_LINK_TAG_BITS) - 1));
    return (e->opening << (RA_LINK_TAG_BITS + 1)) | (tag >= RA_LINK_OWN_TAG ? OWN_BIT : 0) | low;
}

static ra_status new_request(endpoint *e, int peer, uint64_t tag, char *buf, size_t bytes, bool receiving, request **out) {
    const ra_mpi_host *host = e->shared->host;
    int count = bytes == 0 ? 1 : (int)((bytes + PIECE - 1) / PIECE);
    int64_t size = (int64_t)(sizeof(request) + (size_t)count * sizeof(MPI_Request));
    if (ra_mpi_is_over()) return host->fail(RA_PEER_LOST, "MPI was finalized while a communicator was in use");
    request *r = host->alloc(size);
    if (!r) return host->fail(RA_NOMEM, "no memory for a request");
    *r = (request){.count = count,
                   .buf = buf,
                   .bytes = bytes,
                   .peer = peer,
                   .tag = mpi_tag(e, tag),
                   .receiving = receiving,
                   .own = tag >= RA_LINK_OWN_TAG,
                   .size = size};
    for (int i = 0; i < count; i++) r->pieces[i] = MPI_REQUEST_NULL;
    *out = r;
    return RA_OK;
}

static void free_request(endpoint *e, request *r) { e->shared->host->free(r, r->size); }

/* The i-th piece: where it begins, and its length. */
static size_t piece_of(const request *r, int i, size_t *length) {
    size_t begin = (size_t)i * PIECE;
    *length = r->bytes - begin < PIECE ? r->bytes - begin : PIECE;
    return begin;
}

/* Hands MPI the buffer for every piece that has come. Whatever a peer sends, MPI gets no message that is longer than its room:
 * Open MPI 4.1 would write past its end. With the lock held. */
static int match(endpoint *e, request *r) {
    while (r->matched < r->count && !r->too_long) {
        MPI_Message message;
        MPI_Status status;
        int there = 0, got = 0;
        size_t length, begin = piece_of(r, r->matched, &length);
        int error = MPI_Improbe(r->peer, r->tag, e->comm, &there, &message, &status);
        if (error != MPI_SUCCESS || !there) return error;
        MPI_Get_count(&status, MPI_BYTE, &got);
        if (got < 0 || (size_t)got > length) { /* left with MPI: the link is broken by this */
            r->too_long = true;
            r->received += got < 0 ? 0 : (size_t)got;
            break;
        }
        error = MPI_Imrecv(r->buf + begin, got, MPI_BYTE, &message, &r->pieces[r->matched]);
        if (error != MPI_SUCCESS) return error;
        r->matched++;
        r->received += (size_t)got;
        if ((size_t)got < length) r->count = r->matched; /* shorter than asked for: no piece follows */
    }
    return MPI_SUCCESS;
}

static void forget_receive(endpoint *e, request *r) {
    request **at = &e->receives;
    while (*at && *at != r) at = &(*at)->following;
    if (*at) *at = r->following;
}

static ra_status post_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    request *r = NULL;
    ra_status status = new_request(e, peer, tag, buf, bytes, true, &r);
    if (status != RA_OK) return status;
    if (!r->own) {
        pthread_mutex_lock(&ra_mpi_mutex);
        request **end = &e->receives;
        while (*end) end = &(*end)->following;
        *end = r;
        pthread_mutex_unlock(&ra_mpi_mutex);
    }
    *out = r;
    return RA_OK;
}

static ra_status post_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **out) {
    endpoint *e = ctx;
    request *r = NULL;
    ra_status status = new_request(e, peer, tag, (char *)(uintptr_t)buf, bytes, false, &r);
    if (status != RA_OK) return status;
    for (; r->matched < r->count; r->matched++) {
        size_t length, begin = piece_of(r, r->matched, &length);
        int error = MPI_SUCCESS;
        pthread_mutex_lock(&ra_mpi_mutex);
        bool over = atomic_load(&ra_mpi_closing); /* whoever waits for it is told */
        if (!over)
            error = MPI_Isend(r->buf + begin, (int)length, MPI_BYTE, peer, r->tag, e->comm, &r->pieces[r->matched]);
        pthread_mutex_unlock(&ra_mpi_mutex);
        if (over) break;
        /* Pieces that are on their way keep r: the link is broken by this, and nothing of it is used again. */
        if (error != MPI_SUCCESS) return ra_mpi_failed(e->shared->host, error, "MPI_Isend");
    }
    *out = r;
    return RA_OK;
}

/* Looks at the next piece. *over: the message has ended, well (MPI_SUCCESS) or not. */
static int look(endpoint *e, request *r, bool *over) {
    int done = 0, error = MPI_SUCCESS;
    pthread_mutex_lock(&ra_mpi_mutex);
    if (!atomic_load(&ra_mpi_closing)) {
        if (r->receiving) error = match(e, r);
        /* The others begin as soon as they have come, too, and not when it is their turn to be waited for. */
        for (request *other = e->receives; other && error == MPI_SUCCESS && !r->own; other = other->following)
            if (other != r) match(e, other); /* whoever waits for it hears of an error again */
        if (error == MPI_SUCCESS && r->next < r->matched) error = MPI_Test(&r->pieces[r->next], &done, MPI_STATUS_IGNORE);
    }
    r->next += done;
    *over = error != MPI_SUCCESS || r->next == r->count || r->too_long;
    if (*over && r->receiving && !r->own) forget_receive(e, r);
    pthread_mutex_unlock(&ra_mpi_mutex);
    return error;
}

static ra_status too_long(const endpoint *e, const request *r) {
    char text[128];
    snprintf(text, sizeof text, "rank %d sent at least %zu bytes; %zu were expected", r->peer, r->received, r->bytes);
    return e->shared->host->fail(RA_PROTOCOL, text);
}

static ra_status wait_request(void *ctx, void *request_, double seconds, int *done, size_t *received) {
    endpoint *e = ctx;
    request *r = request_;
    const ra_mpi_host *host = e->shared->host;
    double moved = seconds > 0 ? ra_seconds() : 0, until = moved + seconds;
    *done = 0;
    if (ra_mpi_is_over()) return host->fail(RA_PEER_LOST, "MPI was finalized while a communicator was in use");
    for (;;) {
        bool over;
        int before = r->next, error = look(e, r, &over);
        if (over) {
            ra_status status = RA_OK;
            if (error != MPI_SUCCESS) status = ra_mpi_failed(host, error, r->receiving ? "receiving" : "sending");
            else if (r->too_long) status = too_long(e, r);
            if (received) *received = r->received;
            *done = status == RA_OK;
            if (r->next == r->matched) free_request(e, r); /* else pieces are on their way, and keep it */
            return status;
        }
        if (r->next > before) { /* a piece has come: look at the next at once */
            if (seconds > 0) moved = ra_seconds();
            continue;
        }
        if (seconds <= 0 || ra_seconds() >= until) return RA_OK;
        ra_mpi_relax(moved);
    }
}

/* A receive whose message has not come can be given up; a send cannot (Open MPI does not even try), nor can anything whose
 * bytes are on their way, unless it ends within a moment. Its request is left alone then: MPI goes on using it and the buffer.
 */
static ra_status cancel(void *ctx, void *request_) {
    endpoint *e = ctx;
    request *r = request_;
    if (ra_mpi_is_over()) return RA_OK;
    double begin = ra_seconds(), until = begin + 0.01;
    pthread_mutex_lock(&ra_mpi_mutex);
    forget_receive(e, r);
    pthread_mutex_unlock(&ra_mpi_mutex);
    while (r->next < r->matched) {
        int done = 0;
        pthread_mutex_lock(&ra_mpi_mutex);
        if (atomic_load(&ra_mpi_closing)) done = 1;
        else MPI_Test(&r->pieces[r->next], &done, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&ra_mpi_mutex);
        r->next += done;
        if (!done && ra_seconds() > until) return RA_ABORTED;
        if (!done) ra_mpi_relax(begin);
    }
    free_request(e, r);
    return RA_OK;
}

/* After any error MPI is not finalized. After one of communication the duplicate is not used again either; a rank that gave up
 * for a reason of its own leaves it as good as it was. */
static void abort_rank(void *ctx, ra_status status) {
    endpoint *e = ctx;
    pthread_mutex_lock(&ra_mpi_mutex);
    ra_mpi_anything_failed = true;
    if (status == RA_PEER_LOST || status == RA_TIMEOUT || status == RA_PROTOCOL) e->shared->failed = true;
    pthread_mutex_unlock(&ra_mpi_mutex);
}

static void destroy(void *ctx) {
    endpoint *e = ctx;
    const ra_mpi_host *host = e->shared->host;
    pthread_mutex_lock(&ra_mpi_mutex);
    bool last = --e->shared->open_now == 0 && e->shared->orphan;
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (last) host->free(e->shared, sizeof *e->shared);
    host->free(e, sizeof *e);
}

void *ra_mpi_endpoint(ra_mpi_shared *shared, uint32_t flags, ra_comm_ops *ops) {
    endpoint *e = shared->host->alloc(sizeof *e);
    pthread_mutex_lock(&ra_mpi_mutex);
    int opening = shared->openings++; /* on every rank, with memory or without */
    shared->open_now += e != NULL;
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (!e) return NULL;
    *e = (endpoint){.shared = shared, .comm = shared->comm, .opening = opening};
    *ops = (ra_comm_ops){.struct_size = sizeof(ra_comm_ops),
                         .flags = flags,
                         .post_recv = post_recv,
                         .post_send = post_send,
                         .wait = wait_request,
                         .cancel = cancel,
                         .abort = abort_rank,
                         .destroy = destroy};
    return e;
}
