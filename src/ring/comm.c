#include "ring/comm.h"

#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/status.h"
#include "geometry/config.h"
#include "ring/lane.h"
#include "ring/offload.h"

#define MOST_THREADS 512 /* ranks of one process: 1.5 GB, and seconds for them to meet */

static int64_t tag_bytes(const ra_comm *comm) { return (int64_t)sizeof(uint64_t) * comm->ranks; }

ra_status ra_comm_from_link(ra_link *link, ra_comm **result) {
    ra_comm *comm = ra_calloc(sizeof *comm);
    if (!comm) {
        ra_link_destroy(link);
        return ra_fail(RA_NOMEM, "no memory for a communicator");
    }
    comm->link = link;
    comm->process = getpid();
    comm->rank = ra_link_rank(link);
    comm->ranks = ra_link_size(link);
    comm->pool = ra_pool_create();
    comm->sent = ra_calloc(tag_bytes(comm));
    comm->received = ra_calloc(tag_bytes(comm));
    if (!comm->pool || !comm->sent || !comm->received) {
        ra_comm_destroy(comm);
        return ra_fail(RA_NOMEM, "no memory for a communicator");
    }
    *result = comm;
    return RA_OK;
}

/* Before anything else: a lock of the communicator may be held by a thread that is not in the child. */
static bool is_forked(const ra_comm *comm) { return comm->process != getpid(); }

ra_status ra_comm_usable(const ra_comm *comm) {
    if (is_forked(comm))
        return ra_fail(RA_INVALID, "the communicator belongs to process %ld, and a forked child cannot use it: make another",
                       (long)comm->process);
    return ra_link_status(comm->link);
}

static void dismiss_resting(ra_comm *comm) {
    for (int i = 0; i < RA_RESTING; i++) {
        ra_workers_destroy(comm->resting[i]);
        comm->resting[i] = NULL;
    }
}

ra_status ra_comm_workers(ra_comm *comm, int count) {
    if (comm->workers && ra_workers_count(comm->workers) == count) return RA_OK;
    int at = 0; /* the place of workers of this count, or a free one, or that of those who rested longest */
    while (at < RA_RESTING - 1 && comm->resting[at] && ra_workers_count(comm->resting[at]) != count) at++;
    ra_workers *found = comm->resting[at];
    if (found && ra_workers_count(found) != count) {
        ra_workers_destroy(found);
        found = NULL;
    }
    memmove(comm->resting + 1, comm->resting, (size_t)at * sizeof found);
    comm->resting[0] = comm->workers;
    comm->workers = found;
    if (found || ra_workers_create(count, &comm->workers) == RA_OK) return RA_OK;
    dismiss_resting(comm); /* perhaps they took the memory */
    return ra_workers_create(count, &comm->workers);
}

ra_status ra_comm_self(ra_comm **comm) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    *comm = NULL;
    ra_comm_ops ops;
    void *ctx;
    ra_link *link;
    RA_TRY(ra_transport_self(&ops, &ctx));
    RA_TRY(ra_link_create(&ops, ctx, 0, 1, "self", &link));
    return ra_comm_from_link(link, comm);
}

ra_status ra_comm_threads(int ranks, ra_comm **comms) {
    if (!comms) return ra_fail(RA_INVALID, "comms is NULL");
    if (ranks < 1 || ranks > MOST_THREADS)
        return ra_fail(RA_INVALID,
                       "ranks is %d, which is not in 1..%d: each rank of a process monitors all others, so that memory and "
                       "time grow with their square",
                       ranks, MOST_THREADS);
    for (int i = 0; i < ranks; i++) comms[i] = NULL;
    ra_comm_ops ops;
    void **ctxs = ra_calloc((int64_t)sizeof(void *) * ranks);
    if (!ctxs) return ra_fail(RA_NOMEM, "no memory for %d ranks", ranks);
    ra_status status = ra_transport_threads(ranks, &ops, ctxs);
    int made = 0;
    for (; status == RA_OK && made < ranks; made++) {
        ra_link *link;
        status = ra_link_create(&ops, ctxs[made], made, ranks, "threads", &link);
        if (status == RA_OK) status = ra_comm_from_link(link, &comms[made]);
        if (status != RA_OK) { /* this one is gone already; the later ones were never taken over */
            for (int i = made + 1; i < ranks; i++) ops.destroy(ctxs[i]);
            break;
        }
    }
    if (status == RA_OK) status = ra_together_create(comms, ranks);
    for (int i = 0; status != RA_OK && i < made; i++) {
        ra_comm_destroy(comms[i]);
        comms[i] = NULL;
    }
    ra_free(ctxs, (int64_t)sizeof(void *) * ranks);
    return status;
}

ra_status ra_comm_custom(const ra_comm_ops *ops, void *ctx, int rank, int ranks, ra_comm **comm) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    *comm = NULL;
    if (!ops) return ra_fail(RA_INVALID, "ops is NULL");
    if (ops->struct_size != sizeof *ops)
        return ra_fail(RA_INVALID, "ops.struct_size is %u; set it to sizeof(ra_comm_ops), which is %zu", ops->struct_size,
                       sizeof *ops);
    if (!ops->post_recv || !ops->post_send || !ops->wait || !ops->cancel)
        return ra_fail(RA_INVALID, "ops lacks post_recv, post_send, wait or cancel");
    if (ranks < 1 || ranks > RA_MAX_RANKS)
        return ra_fail(RA_INVALID, "ranks is %d, which is not in 1..%d", ranks, RA_MAX_RANKS);
    if (rank < 0 || rank >= ranks) return ra_fail(RA_INVALID, "rank is %d, which is not in 0..%d", rank, ranks - 1);
    ra_link *link;
    RA_TRY(ra_link_create(ops, ctx, rank, ranks, "custom", &link));
    return ra_comm_from_link(link, comm);
}

ra_status ra_comm_solo(int rank, int ranks, const ra_solo_ops *ops, ra_comm **comm) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    *comm = NULL;
    if (!ops || !ops->make_row) return ra_fail(RA_INVALID, "ops lacks make_row");
    if (ops->struct_size != sizeof *ops)
        return ra_fail(RA_INVALID, "ops.struct_size is %u; set it to sizeof(ra_solo_ops), which is %zu", ops->struct_size,
                       sizeof *ops);
    if (ranks < 1 || ranks > RA_MAX_RANKS)
        return ra_fail(RA_INVALID, "ranks is %d, which is not in 1..%d", ranks, RA_MAX_RANKS);
    if (rank < 0 || rank >= ranks) return ra_fail(RA_INVALID, "rank is %d, which is not in 0..%d", rank, ranks - 1);
    ra_link *link;
    RA_TRY(ra_link_create_solo(rank, ranks, &link));
    RA_TRY(ra_comm_from_link(link, comm));
    (*comm)->solo = *ops;
    return RA_OK;
}

ra_status ra_comm_set_cuda_maker(ra_comm *comm, ra_cuda_maker maker, void *ctx) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (!ra_link_is_solo(comm->link))
        return ra_fail(RA_INVALID, "comm has peers, and a maker is for a rank that runs alone (ra_comm_solo)");
    comm->device_maker = maker;
    comm->device_maker_ctx = ctx;
    return RA_OK;
}

int ra_comm_rank(const ra_comm *comm) { return comm ? comm->rank : -1; }
int ra_comm_size(const ra_comm *comm) { return comm ? comm->ranks : 0; }
const char *ra_comm_transport(const ra_comm *comm) { return comm ? ra_link_transport(comm->link) : ""; }

ra_status ra_comm_set_timeout(ra_comm *comm, double timeout, double start_timeout) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (!(timeout > 0)) return ra_fail(RA_INVALID, "timeout is %g, which is not above 0", timeout);
    if (!(start_timeout > 0)) return ra_fail(RA_INVALID, "start_timeout is %g, which is not above 0", start_timeout);
    if (is_forked(comm)) return ra_comm_usable(comm);
    return ra_link_set_timeout(comm->link, timeout, start_timeout);
}

ra_status ra_comm_set_call_timeout(ra_comm *comm, double seconds) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (is_forked(comm)) return ra_comm_usable(comm);
    return ra_link_set_call_timeout(comm->link, seconds);
}

ra_status ra_comm_set_tracer(ra_comm *comm, void (*event)(void *ctx, const ra_trace_event *event), void *ctx) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    comm->trace = event;
    comm->trace_ctx = ctx;
    return RA_OK;
}

ra_status ra_comm_allgather(ra_comm *comm, const void *mine, void *all, int64_t bytes) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (bytes < 0 || (bytes > 0 && (!mine || !all)))
        return ra_fail(RA_INVALID, bytes < 0 ? "bytes is negative" : "mine or all is NULL");
    RA_TRY(ra_comm_usable(comm));
    return ra_link_allgather(comm->link, mine, all, bytes, "gather");
}

void ra_comm_abort(ra_comm *comm, ra_status status, const char *reason) {
    if (comm && !is_forked(comm))
        ra_link_abort(comm->link, status == RA_OK ? RA_ABORTED : status, reason ? reason : "aborted by the caller");
}

void ra_comm_destroy(ra_comm *comm) {
    if (!comm || is_forked(comm)) return; /* a child's copy goes when the child does */
    const ra_sentence kept = ra_sentence_keep();
    ra_cache_clear(comm);
    ra_workers_destroy(comm->workers);
    dismiss_resting(comm);
    if (comm->sent) ra_free(comm->sent, tag_bytes(comm));
    if (comm->received) ra_free(comm->received, tag_bytes(comm));
    ra_link_destroy(comm->link);
    ra_lane_leave(comm);
    ra_offload_close(comm->offload);
    ra_pool_destroy(comm->pool);
    ra_pool_destroy(comm->device_pool);
    ra_free(comm, sizeof *comm);
    ra_sentence_restore(&kept);
}
