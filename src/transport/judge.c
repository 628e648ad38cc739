/* Verdicts: who is lost, by what a link knows of its peers. control.c gathers that, and tells the others. */
#include "core/status.h"
#include "transport/link_internal.h"

#define SLOWEST 1e6 /* bytes a second: a transfer may take this long on top of four timeouts while both ends live */

static double limit_of(const ra_link *link, const ra_peer *peer) {
    if (!peer->arrived) return link->start_timeout;
    return peer->polled && link->start_timeout > link->timeout ? link->start_timeout : link->timeout;
}

/* The peer that has been silent for too long, and longest; -1: none. */
static int silent_peer(const ra_link *link, double now) {
    int worst = -1;
    double longest = 0;
    for (int rank = 0; rank < link->ranks; rank++) {
        const ra_peer *peer = &link->peers[rank];
        double silence = now - (peer->arrived ? peer->heard : link->created);
        if (rank == link->rank || peer->left || silence <= limit_of(link, peer) || silence <= longest) continue;
        worst = rank;
        longest = silence;
    }
    return worst;
}

static void name(ra_link *link, ra_status status, int culprit, const char *what, double seconds) {
    ra_fail(status, "rank %d %s %.3g s (%s, step %lld; noticed by rank %d)", culprit, what, seconds, link->phase,
            (long long)link->step, link->rank);
    ra_link_break(link, status, culprit);
}

static void judge_lost(ra_link *link, double now) {
    for (int rank = 0; rank < link->ranks && link->status == RA_OK; rank++) {
        const ra_peer *peer = &link->peers[rank];
        if (peer->lost && !peer->left && now - peer->lost_at > RA_LINK_GRACE) {
            name(link, RA_PEER_LOST, rank, "is gone: its connection ended", now - peer->lost_at);
        }
    }
}

static void judge_awaited(ra_link *link, double now) {
    const ra_flight *awaited = link->awaited;
    if (!awaited || link->status != RA_OK) return;
    const ra_peer *peer = &link->peers[awaited->peer];
    if (peer->left && now - peer->left_at > RA_LINK_GRACE && now - link->awaited_since > RA_LINK_GRACE) {
        name(link, RA_PEER_LOST, awaited->peer, "has left the ring, and was waited for another", now - link->awaited_since);
    } else if (peer->missing && awaited->receiving) {
        double patience = link->timeout;
        if (peer->missing_answer == RA_ANSWER_SENDING) patience = 4 * link->timeout + (double)awaited->payload / SLOWEST;
        if (now - peer->missing_since > patience) {
            name(link, RA_PROTOCOL, awaited->peer, "sent a message that was lost on its way: it has not come after",
                 now - peer->missing_since);
        }
    }
}

/* Those who wait all come to the same end at the same time: in order of rank, the first one's verdict spares the others
 * theirs. */
static double turn_of(const ra_link *link, int silent) {
    int before = link->rank - (silent < link->rank);
    return 0.025 * (before < 10 ? before : 10);
}

static void judge_silent(ra_link *link, double now) {
    int silent = silent_peer(link, now);
    if (silent != link->suspect) {
        link->suspect = silent;
        link->suspected = now;
        if (silent >= 0) {
            ra_history_note(link, "suspected", silent, true, RA_CONTROL_TAG, link->step, 0);
            ra_control_beat(link);
        }
    } else if (silent >= 0 && now - link->suspected >= RA_LINK_GRACE + turn_of(link, silent)) {
        const ra_peer *peer = &link->peers[silent];
        if (peer->arrived) name(link, RA_TIMEOUT, silent, "has been silent for", now - peer->heard);
        else name(link, RA_TIMEOUT, silent, "has not arrived within", link->start_timeout);
    }
}

void ra_control_judge(ra_link *link) {
    double now = ra_link_now();
    judge_lost(link, now);
    judge_awaited(link, now);
    if (link->status == RA_OK) judge_silent(link, now);
}
