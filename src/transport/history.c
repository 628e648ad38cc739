/* What a link did last, kept for the post-mortem that is logged when it breaks. */
#include "core/log.h"
#include "core/size.h"
#include "core/status.h"
#include "transport/link_internal.h"

#define SHOWN 12

void ra_history_note(ra_link *link, const char *what, int peer, bool receiving, uint64_t tag, int64_t step, int64_t bytes) {
    link->events[link->event_count++ % RA_EVENTS] = (ra_event){.time = ra_link_now(),
                                                               .what = what,
                                                               .peer = peer,
                                                               .receiving = receiving,
                                                               .tag = tag,
                                                               .step = step,
                                                               .bytes = bytes};
    ra_log(RA_LOG_TRACE, "rank %d, step %lld, %s: %s %s rank %d, tag %llu, %lld bytes", link->rank, (long long)step, link->phase,
           what, receiving ? "receive from" : "send to", peer, (unsigned long long)tag, (long long)bytes);
}

void ra_history_print(ra_link *link) {
    if (!ra_log_wanted(RA_LOG_WARN)) return;
    double now = ra_link_now();
    ra_log(RA_LOG_WARN, "rank %d, step %lld, %s: %s: %s", link->rank, (long long)link->step, link->phase,
           ra_status_name(link->status), link->sentence);
    for (int rank = 0; rank < link->ranks; rank++) {
        const ra_peer *peer = &link->peers[rank];
        if (rank == link->rank) continue;
        if (!peer->arrived) ra_log(RA_LOG_WARN, "rank %d: never heard of rank %d", link->rank, rank);
        else ra_log(RA_LOG_WARN, "rank %d: heard of rank %d %.3f s ago%s", link->rank, rank, now - peer->heard, peer->left ? ", left" : "");
    }
    for (const ra_flight *at = link->flights; at; at = at->next) {
        ra_log(RA_LOG_WARN, "rank %d: in flight: %s rank %d, step %lld, tag %llu, %lld bytes", link->rank,
               at->receiving ? "receive from" : "send to", at->peer, (long long)at->step, (unsigned long long)at->tag,
               (long long)at->payload);
    }
    uint64_t first = link->event_count > SHOWN ? link->event_count - SHOWN : 0;
    for (uint64_t i = first; i < link->event_count; i++) {
        const ra_event *event = &link->events[i % RA_EVENTS];
        ra_log(RA_LOG_WARN, "rank %d: %.3f s ago: %s %s rank %d, step %lld, tag %llu, %lld bytes", link->rank, now - event->time,
               event->what, event->receiving ? "receive from" : "send to", event->peer, (long long)event->step,
               (unsigned long long)event->tag, (long long)event->bytes);
    }
}
