/* What a link did last, kept for the post-mortem that is logged when it breaks. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/log.h"
#include "core/status.h"
#include "transport/link_internal.h"

enum { PEERS = 8, FLIGHTS = 8, EVENTS = 12 }; /* shown at most */

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
        .time = ra_seconds(), .what = what, .peer = peer, .receiving = receiving, .tag = tag, .step = step, .bytes = bytes};
    if (!ra_log_wanted(RA_LOG_TRACE)) return;
    char text[160];
    const ra_event *event = &link->events[(link->event_count - 1) % RA_EVENTS];
    ra_log(RA_LOG_TRACE, "rank %d, step %lld, %s: %s %s", link->rank, (long long)step, link->phase, what,
           describe(event, text, sizeof text));
}

/* One record of less than PIPE_BUF bytes is one write, so those of ranks that fail together do not mix. */
typedef struct record {
    char text[3800];
    size_t used;
} record;

static void add(record *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(record *r, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int wrote = vsnprintf(r->text + r->used, sizeof r->text - r->used, format, args);
    va_end(args);
    size_t left = sizeof r->text - r->used;
    if (wrote > 0) r->used += (size_t)wrote < left ? (size_t)wrote : left - 1;
}

/* The peers in order of how long they have been silent. */
static void add_peers(const ra_link *link, double now, record *r) {
    double below = INFINITY;
    int below_rank = -1;
    for (int shown = 0; shown < PEERS; shown++) {
        double longest = -INFINITY;
        int rank = -1;
        for (int i = 0; i < link->ranks; i++) {
            double silence = link->peers[i].arrived ? now - link->peers[i].heard : 1e30;
            if (i == link->rank || silence > below || (silence >= below && i <= below_rank) || silence <= longest) continue;
            longest = silence;
            rank = i;
        }
        if (rank < 0) return;
        if (!link->peers[rank].arrived) add(r, "\n    rank %d was never heard of", rank);
        else add(r, "\n    rank %d was heard %.3f s ago%s", rank, longest, link->peers[rank].left ? ", when it left" : "");
        below = longest;
        below_rank = rank;
    }
    if (link->ranks - 1 > PEERS) add(r, "\n    the other %d were heard since", link->ranks - 1 - PEERS);
}

void ra_history_print(ra_link *link) {
    bool communication = link->status == RA_PEER_LOST || link->status == RA_TIMEOUT || link->status == RA_PROTOCOL;
    ra_log_level level = communication ? RA_LOG_WARN : RA_LOG_INFO;
    if (link->ranks == 1 || link->mute || !ra_log_wanted(level)) return;
    record r = {.used = 0};
    char text[160];
    double now = ra_seconds();
    add(&r, "post-mortem of rank %d, step %lld, %s: %s: %s", link->rank, (long long)link->step, link->phase,
        ra_status_name(link->status), link->sentence);
    add_peers(link, now, &r);
    int shown = 0;
    for (const ra_flight *at = link->flights; at && shown < FLIGHTS; at = at->next, shown++) {
        ra_event event = {.peer = at->peer, .receiving = at->receiving, .tag = at->tag, .step = at->step, .bytes = at->payload};
        add(&r, "\n    in flight: %s%s", describe(&event, text, sizeof text), at == link->awaited ? " (waited for)" : "");
    }
    uint64_t first = link->event_count > EVENTS ? link->event_count - EVENTS : 0;
    for (uint64_t i = first; i < link->event_count; i++) {
        const ra_event *event = &link->events[i % RA_EVENTS];
        add(&r, "\n    %.3f s ago: %s %s", now - event->time, event->what, describe(event, text, sizeof text));
    }
    ra_log_text(level, r.text);
}
