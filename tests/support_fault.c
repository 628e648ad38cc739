#include "support_fault.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/status.h"
#include "transport/link_internal.h"

typedef struct fault_transport {
    ra_comm_ops inner;
    void *inner_ctx;
    pthread_mutex_t mutex; /* around what follows; not held during a call of inner */
    ra_fault fault;
    int64_t operation; /* that count, so far */
    bool stopped;
    ra_fault_counts counts;
} fault_transport;

typedef struct fault_request {
    void *inner, *twin; /* NULL: swallowed, or finished */
    char *copy;         /* of a corrupted message */
    int64_t copy_bytes;
    double ready;     /* not done before */
    ra_status status; /* not RA_OK: what waiting returns */
    bool swallowed;   /* never done, or for a dropped send: done at once */
    bool receiving, own;
} fault_request;

static void nap(double seconds) {
    if (seconds <= 0) return;
    nanosleep(&(struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)},
              NULL);
}

/* Counts the operation; the fault it suffers, or RA_FAULT_NONE. */
static ra_fault suffered(fault_transport *t, bool receiving, uint64_t tag) {
    bool own = tag >= RA_LINK_OWN_TAG;
    pthread_mutex_lock(&t->mutex);
    ra_fault fault = t->fault;
    bool counts = own == fault.control && (receiving ? fault.receives : fault.sends);
    int64_t number = counts ? t->operation++ : -1;
    bool hit = counts && number >= fault.nth && number - fault.nth < (fault.repeat > 0 ? fault.repeat : 1);
    if (hit && t->counts.faults++ == 0) t->counts.struck = ra_seconds();
    if (hit && fault.kind == RA_FAULT_STOP) t->stopped = true;
    if (!hit) fault.kind = RA_FAULT_NONE;
    if (t->stopped) fault.kind = RA_FAULT_STOP;
    pthread_mutex_unlock(&t->mutex);
    if (fault.kind == RA_FAULT_SIGNAL) raise(fault.signal);
    if (fault.kind == RA_FAULT_FREEZE) nap(fault.seconds); /* under the link's lock, so that its heart stops too */
    return fault;
}

static bool is_stopped(fault_transport *t) {
    pthread_mutex_lock(&t->mutex);
    bool stopped = t->stopped;
    pthread_mutex_unlock(&t->mutex);
    return stopped;
}

static void count(fault_transport *t, const fault_request *r, size_t bytes) {
    pthread_mutex_lock(&t->mutex);
    ra_fault_counts *c = &t->counts;
    *(r->receiving ? (r->own ? &c->own_receives : &c->receives) : (r->own ? &c->own_sends : &c->sends)) += 1;
    *(r->receiving ? (r->own ? &c->own_bytes_received : &c->bytes_received) : (r->own ? &c->own_bytes_sent : &c->bytes_sent)) +=
        (int64_t)bytes;
    pthread_mutex_unlock(&t->mutex);
}

static void free_request(fault_request *r) {
    if (r->copy) ra_free(r->copy, r->copy_bytes);
    ra_free(r, sizeof *r);
}

static ra_status new_request(const ra_fault *fault, bool receiving, uint64_t tag, fault_request **out) {
    if (fault->kind == RA_FAULT_FAIL) return ra_fail(fault->status, "a fault was injected");
    fault_request *r = ra_calloc(sizeof *r);
    if (!r) return ra_fail(RA_NOMEM, "no memory for a request");
    r->receiving = receiving;
    r->own = tag >= RA_LINK_OWN_TAG;
    if (fault->kind == RA_FAULT_DELAY) r->ready = ra_seconds() + fault->seconds;
    if (fault->kind == RA_FAULT_BREAK) r->status = fault->status;
    r->swallowed = fault->kind == RA_FAULT_STOP || fault->kind == RA_FAULT_DROP;
    *out = r;
    return RA_OK;
}

static ra_status post_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request) {
    fault_transport *t = ctx;
    ra_fault fault = suffered(t, true, tag);
    fault_request *r = NULL;
    RA_TRY(new_request(&fault, true, tag, &r));
    ra_status status = r->swallowed ? RA_OK : t->inner.post_recv(t->inner_ctx, peer, tag, buf, bytes, &r->inner);
    if (status != RA_OK) free_request(r);
    else *request = r;
    return status;
}

static ra_status post_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request) {
    fault_transport *t = ctx;
    ra_fault fault = suffered(t, false, tag);
    fault_request *r = NULL;
    RA_TRY(new_request(&fault, false, tag, &r));
    if (fault.kind == RA_FAULT_TRUNCATE) bytes -= (size_t)fault.bytes < bytes ? (size_t)fault.bytes : bytes;
    if (fault.kind == RA_FAULT_CORRUPT && (size_t)fault.bytes < bytes) {
        r->copy_bytes = (int64_t)bytes;
        r->copy = ra_alloc(r->copy_bytes);
        if (!r->copy) {
            free_request(r);
            return ra_fail(RA_NOMEM, "no memory to damage a message");
        }
        memcpy(r->copy, buf, bytes);
        r->copy[fault.bytes] = (char)(r->copy[fault.bytes] ^ fault.mask);
        buf = r->copy;
    }
    ra_status status = r->swallowed ? RA_OK : t->inner.post_send(t->inner_ctx, peer, tag, buf, bytes, &r->inner);
    if (status == RA_OK && fault.kind == RA_FAULT_DUPLICATE) {
        status = t->inner.post_send(t->inner_ctx, peer, tag, buf, bytes, &r->twin);
        if (status != RA_OK) t->inner.cancel(t->inner_ctx, r->inner);
    }
    if (status != RA_OK) {
        free_request(r);
        return status;
    }
    if (!r->swallowed) count(t, r, bytes);
    *request = r;
    return RA_OK;
}

static ra_status wait_request(void *ctx, void *request, double seconds, int *done, size_t *received) {
    fault_transport *t = ctx;
    fault_request *r = request;
    *done = 0;
    bool never = is_stopped(t) || (r->swallowed && r->receiving);
    double early = r->ready - ra_seconds();
    if (never || early > 0) {
        nap(never || early > seconds ? seconds : early);
        return RA_OK;
    }
    ra_status status = r->status;
    size_t bytes = 0;
    if (status != RA_OK) {
        if (r->inner) t->inner.cancel(t->inner_ctx, r->inner);
        ra_fail(status, "a fault was injected");
    } else if (r->swallowed) {
        *done = 1;
    } else {
        status = t->inner.wait(t->inner_ctx, r->inner, seconds, done, &bytes);
    }
    if (status == RA_OK && !*done) return RA_OK;
    if (received) *received = bytes;
    if (status == RA_OK && r->receiving) count(t, r, bytes);
    /* The twin of a small message is on its way; that of a large one may wait for ever, and is given up with its buffer
     * intact. */
    int twin_done = 0;
    if (r->twin && t->inner.wait(t->inner_ctx, r->twin, 0, &twin_done, NULL) == RA_OK && !twin_done) {
        t->inner.cancel(t->inner_ctx, r->twin);
    }
    free_request(r);
    return status;
}

static ra_status cancel(void *ctx, void *request) {
    fault_transport *t = ctx;
    fault_request *r = request;
    ra_status status = RA_OK;
    if (r->twin) status = t->inner.cancel(t->inner_ctx, r->twin);
    if (r->inner) {
        ra_status second = t->inner.cancel(t->inner_ctx, r->inner);
        if (second != RA_OK) status = second;
    }
    if (status != RA_OK) r->copy = NULL; /* the transport below may still read it */
    free_request(r);
    return status;
}

static void abort_rank(void *ctx, ra_status status) {
    fault_transport *t = ctx;
    if (t->inner.abort && !is_stopped(t)) t->inner.abort(t->inner_ctx, status);
}

static void destroy(void *ctx) {
    fault_transport *t = ctx;
    if (t->inner.destroy) t->inner.destroy(t->inner_ctx);
    pthread_mutex_destroy(&t->mutex);
    ra_free(t, sizeof *t);
}

void ra_fault_set(void *ctx, const ra_fault *fault) {
    fault_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    t->fault = *fault;
    t->operation = 0;
    pthread_mutex_unlock(&t->mutex);
}

ra_fault_counts ra_fault_read(void *ctx) {
    fault_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    ra_fault_counts counts = t->counts;
    pthread_mutex_unlock(&t->mutex);
    return counts;
}

ra_status ra_transport_fault(const ra_comm_ops *inner, void *inner_ctx, const ra_fault *fault, ra_comm_ops *ops, void **ctx) {
    fault_transport *t = ra_calloc(sizeof *t);
    if (!t) {
        if (inner->destroy) inner->destroy(inner_ctx);
        return ra_fail(RA_NOMEM, "no memory for the fault transport");
    }
    *t =
        (fault_transport){.inner = *inner, .inner_ctx = inner_ctx, .fault = fault ? *fault : (ra_fault){.kind = RA_FAULT_NONE}};
    pthread_mutex_init(&t->mutex, NULL);
    *ctx = t;
    *ops = (ra_comm_ops){.struct_size = sizeof(ra_comm_ops),
                         .flags = inner->flags,
                         .post_recv = post_recv,
                         .post_send = post_send,
                         .wait = wait_request,
                         .cancel = cancel,
                         .abort = abort_rank,
                         .destroy = destroy};
    return RA_OK;
}
