/* A custom transport, as a caller would write one: the threads transport underneath, every message counted on the way. */
#include <stdlib.h>

#include "support.h"
#include "transport/link.h"

typedef struct counting {
    ra_comm_ops inner;
    void *ctx;
    test_traffic *traffic;
} counting;

typedef struct counted_request {
    void *inner;
    bool receiving;
} counted_request;

static ra_status counted_post(ra_status status, void *inner, bool receiving, void **request) {
    if (status != RA_OK) return status;
    counted_request *counted = malloc(sizeof *counted);
    if (!counted) return RA_NOMEM;
    *counted = (counted_request){inner, receiving};
    *request = counted;
    return RA_OK;
}

static ra_status counting_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request) {
    counting *self = ctx;
    void *inner = NULL;
    ra_status status = self->inner.post_recv(self->ctx, peer, tag, buf, bytes, &inner);
    return counted_post(status, inner, tag < RA_LINK_OWN_TAG, request);
}

static ra_status counting_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request) {
    counting *self = ctx;
    void *inner = NULL;
    ra_status status = self->inner.post_send(self->ctx, peer, tag, buf, bytes, &inner);
    if (status == RA_OK && tag < RA_LINK_OWN_TAG) { /* heartbeats and agreement are the link's own */
        self->traffic->sent += (int64_t)bytes - RA_LINK_HEADER;
        self->traffic->messages++;
    }
    if (status == RA_OK && tag > RA_LINK_OWN_TAG) self->traffic->agreements++;
    return counted_post(status, inner, false, request);
}

static ra_status counting_wait(void *ctx, void *request, double seconds, int *done, size_t *received) {
    counting *self = ctx;
    counted_request *counted = request;
    size_t bytes = 0;
    ra_status status = self->inner.wait(self->ctx, counted->inner, seconds, done, &bytes);
    if (received) *received = bytes;
    if (status == RA_OK && *done && counted->receiving) self->traffic->received += (int64_t)bytes - RA_LINK_HEADER;
    if (status != RA_OK || *done) free(counted);
    return status;
}

static ra_status counting_cancel(void *ctx, void *request) {
    counting *self = ctx;
    counted_request *counted = request;
    ra_status status = self->inner.cancel(self->ctx, counted->inner);
    free(counted);
    return status;
}

static void counting_abort(void *ctx, ra_status status) {
    counting *self = ctx;
    if (self->inner.abort) self->inner.abort(self->ctx, status);
}

static void counting_destroy(void *ctx) {
    counting *self = ctx;
    if (self->inner.destroy) self->inner.destroy(self->ctx);
    free(self);
}

ra_status test_counting_comms(int ranks, ra_comm **comms, test_traffic *traffic) {
    static const ra_comm_ops ops = {.struct_size = sizeof(ra_comm_ops),
                                    .post_recv = counting_recv,
                                    .post_send = counting_send,
                                    .wait = counting_wait,
                                    .cancel = counting_cancel,
                                    .abort = counting_abort,
                                    .destroy = counting_destroy};
    ra_comm_ops inner = {.struct_size = sizeof inner};
    void **ctxs = calloc((size_t)ranks, sizeof *ctxs);
    if (!ctxs) return RA_NOMEM;
    ra_status status = ra_transport_threads(ranks, &inner, ctxs);
    for (int rank = 0; rank < ranks; rank++) comms[rank] = NULL;
    for (int rank = 0; rank < ranks && ctxs[rank]; rank++) {
        counting *self = status == RA_OK ? malloc(sizeof *self) : NULL;
        if (!self) {
            inner.destroy(ctxs[rank]);
            if (status == RA_OK) status = RA_NOMEM;
            continue;
        }
        *self = (counting){inner, ctxs[rank], &traffic[rank]};
        status = ra_comm_custom(&ops, self, rank, ranks, &comms[rank]);
    }
    free(ctxs);
    if (status != RA_OK) {
        for (int rank = 0; rank < ranks; rank++) {
            ra_comm_destroy(comms[rank]);
            comms[rank] = NULL;
        }
    }
    return status;
}
