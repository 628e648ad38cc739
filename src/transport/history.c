/* What a link did last, kept for the post-mortem that is logged when it breaks. */
#include <stdio.h>

#include "core/log.h"
#include "core/status.h"
#include "transport/link_internal.h"

#define SHOWN 12

/* "receive from rank 2, step 1, tag 7, 100 bytes", or for the link's own messages what they are. */
static const char *describe(const ra_event *event, char *text, size_t bytes) {
    const char *way = event->receiving ? "receive from" : "send to";
    if (event->tag == RA_CONTROL_TAG) {
        snprintf(text, bytes, "rank %d", event->peer);
    } else if (event->tag > RA_CONTROL_TAG) {
        snprintf(text, bytes, "%s rank %d, agreement %llu, %lld bytes", way, event->peer,
                 (unsigned long long)(event->tag - RA_CONTROL_TAG), (long long)event->bytes);
    } else {
        snprintf(text, bytes, "%s rank %d, step %lld, tag %llu, %lld bytes", way, event->peer, (long long)event->step,
                 (unsigned long long)event->tag, (long long)event->bytes);
    }
    return text;
}

void ra_history_note(ra_link *link, const char *what, int peer, bool receiving, uint64_t tag, int64_t step, int64_t bytes) {
    link->events[link->event_count++ % RA_EVENTS] = (ra_event){
        .time = ra_link_now(), .what = what, .peer = peer, .receiving = receiving, .tag = tag, .step = step, .bytes = bytes};
    if (!ra_log_wanted(RA_LOG_TRACE)) return;
    char text[160];
    const ra_event *event = &link->events[(link->event_count - 1) % RA_EVENTS];
    ra_log(RA_LOG_TRACE, "rank %d, step %lld, %s: %s %s", link->rank, (long long)step, link->phase, what,
           describe(event, text, sizeof text));
}

void ra_history_print(ra_link *link) {
    if (!ra_log_wanted(RA_LOG_WARN)) return;
    char text[160];
    double now = ra_link_now();
    ra_log(RA_LOG_WARN, "rank %d, step %lld, %s: %s: %s", link->rank, (long long)link->step, link->phase,
           ra_status_name(link->status), link->sentence);
    for (int rank = 0; rank < link->ranks; rank++) {
        const ra_peer *peer = &link->peers[rank];
        if (rank == link->rank) continue;
        if (!peer->arrived) {
            ra_log(RA_LOG_WARN, "rank %d: never heard of rank %d", link->rank, rank);
        } else {
            ra_log(RA_LOG_WARN, "rank %d: heard of rank %d %.3f s ago%s", link->rank, rank, now - peer->heard,
                   peer->left ? ", left" : "");
        }
    }
    for (const ra_flight *at = link->flights; at; at = at->next) {
        ra_event event = {.peer = at->peer, .receiving = at->receiving, .tag = at->tag, .step = at->step, .bytes = at->payload};
        ra_log(RA_LOG_WARN, "rank %d: in flight: %s", link->rank, describe(&event, text, sizeof text));
    }
    uint64_t first = link->event_count > SHOWN ? link->event_count - SHOWN : 0;
    for (uint64_t i = first; i < link->event_count; i++) {
        const ra_event *event = &link->events[i % RA_EVENTS];
        ra_log(RA_LOG_WARN, "rank %d: %.3f s ago: %s %s", link->rank, now - event->time, event->what,
               describe(event, text, sizeof text));
    }
}
