/* A rank played alone, so that a job too large for one machine can be measured and checked rank by rank. Its link is that of a
 * single rank; what its peers would send is made by whoever posts the receive. */
#include <string.h>

#include "core/status.h"
#include "transport/link_internal.h"

bool ra_link_is_solo(const ra_link *link) { return link->solo_ranks > 0; }

ra_status ra_link_create_solo(int rank, int ranks, ra_link **link) {
    ra_comm_ops ops;
    void *ctx;
    RA_TRY(ra_transport_self(&ops, &ctx));
    RA_TRY(ra_link_create(&ops, ctx, 0, 1, "solo", link));
    (*link)->solo_rank = rank;
    (*link)->solo_ranks = ranks;
    return RA_OK;
}

ra_status ra_solo_post(ra_link *link, const ra_flight *message, const ra_maker *maker, ra_transfer *transfer) {
    RA_TRY(ra_link_status(link));
    char *payload = ra_frame_payload(message->buf);
    if (!message->receiving) link->counts.bytes_sent += message->payload, link->counts.messages_sent++;
    else if (maker && maker->make) RA_TRY(maker->make(maker->arg, payload));
    else memset(payload, 0, (size_t)message->payload);
    *transfer = (ra_transfer){.buffer = message->buf,
                              .payload = message->payload,
                              .peer = message->peer,
                              .receiving = message->receiving,
                              .tag = message->tag};
    return RA_OK;
}
