/* Verdicts: who is lost, by what a link knows of its peers. control.c gathers that, and tells the others.
 *
 * Ranks that wait for each other (one calls forward while the other makes a plan) are all alive, and MPI would let them wait
 * for ever. Every rank numbers its waits and says in each beat what it waits for. When x asks its peer y after a message and
 * y answers from inside its wait b that it has not posted its half, then x is blocked by that wait: a rank posts nothing
 * while it waits, so wait a of x ends after wait b of y. x tells everybody: "in wait a, blocked by wait b of y". A circle of
 * such statements
 *
 *     rank 0, wait 7 --> rank 2, wait 4 --> rank 1, wait 9 --> rank 0, wait 7
 *
 * could only end if each wait ended after itself. This needs no clock, however old the statements are and whatever is on its
 * way, and a rank that computes is in no circle. (A send may end without its receiver where a transport buffers it; that
 * takes no timeout.) The timeout is only the time after which it is said, and the lowest rank of the circle says it. */
#include <stdio.h>

#include "core/status.h"
#include "transport/link_internal.h"

#define SLOWEST 1e6 /* bytes a second: a transfer may take this long on top of four timeouts while both ends live */

static double limit_of(const ra_link *link, const ra_peer *peer) {
    if (!peer->arrived) return link->start_timeout;
    return peer->polled && link->start_timeout > link->timeout ? link->start_timeout : link->timeout;
}

/* A rank that only computes judges who can speak at any time: a peer that beats from inside calls alone may be through with
 * this one, and busy elsewhere or at its program's end. */
static bool is_judged(const ra_link *link, const ra_peer *peer) { return !peer->left && (link->flights || !peer->polled); }

/* The peer that has been silent for too long, and longest; -1: none. */
static int silent_peer(const ra_link *link, double now) {
    int worst = -1;
    double longest = 0;
    for (int rank = 0; rank < link->ranks; rank++) {
        const ra_peer *peer = &link->peers[rank];
        double silence = now - (peer->arrived ? peer->heard : link->created);
        if (rank == link->rank || !is_judged(link, peer) || silence <= limit_of(link, peer) || silence <= longest) continue;
        worst = rank;
        longest = silence;
    }
    return worst;
}

static void name(ra_link *link, ra_status status, int culprit, const char *what, double seconds, const char *rest) {
    ra_fail(status, "rank %d %s %.3g s%s (%s, step %lld; noticed by rank %d)", culprit, what, seconds, rest, link->phase,
            (long long)link->step, link->rank);
    ra_link_break(link, status, culprit);
}

static void judge_lost(ra_link *link, double now) {
    for (int rank = 0; rank < link->ranks && link->status == RA_OK; rank++) {
        const ra_peer *peer = &link->peers[rank];
        if (peer->lost && is_judged(link, peer) && now - peer->lost_at > RA_LINK_GRACE) {
            name(link, RA_PEER_LOST, rank, "is gone: its connection ended", now - peer->lost_at, " ago");
        }
    }
}

static void judge_awaited(ra_link *link, double now) {
    const ra_flight *awaited = link->awaited;
    if (!awaited || link->status != RA_OK) return;
    const ra_peer *peer = &link->peers[awaited->peer];
    if (peer->left && now - peer->left_at > RA_LINK_GRACE && now - link->awaited_since > RA_LINK_GRACE) {
        name(link, RA_PEER_LOST, awaited->peer, "has left the ring although it is still needed; nothing came from it for",
             now - link->awaited_since, "");
    } else if (peer->missing && awaited->receiving) {
        double patience = link->timeout;
        if (peer->missing_answer == RA_ANSWER_POSTED) patience = 4 * link->timeout + (double)awaited->payload / SLOWEST;
        if (now - peer->missing_since > patience) {
            name(link, RA_PROTOCOL, awaited->peer, "sent a message that was lost on its way: it has not arrived after",
                 now - peer->missing_since, "");
        }
    }
}

double ra_link_turn(const ra_link *link, int but) {
    int before = link->rank - (but >= 0 && but < link->rank);
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
    } else if (silent >= 0 && now - link->suspected >= RA_LINK_GRACE + ra_link_turn(link, silent)) {
        const ra_peer *peer = &link->peers[silent];
        if (peer->arrived) name(link, RA_TIMEOUT, silent, "has been silent for", now - peer->heard, "");
        else name(link, RA_TIMEOUT, silent, "has not arrived within", link->start_timeout, "");
    }
}

/* The waits of a circle through this rank, from this rank on; 0: there is none, or another rank is to say it. */
static int circle(const ra_link *link, const ra_wait *own, const ra_wait **waits, int most) {
    const ra_wait *wait = own;
    for (int count = 0; count < link->ranks; count++) {
        if (count < most) waits[count] = wait;
        if (wait->blocker == 0 || wait->seconds < link->timeout) return 0;
        uint64_t blocker = wait->blocker;
        if (wait->peer == link->rank) return blocker == own->number ? count + 1 : 0;
        if (wait->peer < link->rank) return 0;
        wait = &link->peers[wait->peer].wait;
        if (wait->number != blocker) return 0;
    }
    return 0;
}

static void judge_circle(ra_link *link) {
    enum { SHOWN = 4 };
    const ra_wait own = ra_link_waits_for(link), *waits[SHOWN];
    int count = own.number > 0 ? circle(link, &own, waits, SHOWN) : 0;
    if (count == 0) return;
    char text[RA_SENTENCE];
    size_t used = 0;
    for (int i = 0, rank = link->rank; i < count && i < SHOWN; rank = waits[i++]->peer) {
        int wrote =
            snprintf(text + used, sizeof text - used, "%srank %d %s rank %d (%s, step %lld)", i ? ", " : "", rank,
                     waits[i]->receiving ? "for" : "to send to", waits[i]->peer, waits[i]->phase, (long long)waits[i]->step);
        used += (size_t)wrote < sizeof text - used ? (size_t)wrote : sizeof text - used - 1;
    }
    ra_fail(RA_TIMEOUT, "%d ranks have waited for each other for %.3g s: %s%s", count, own.seconds, text,
            count > SHOWN ? ", ..." : "");
    ra_link_break(link, RA_TIMEOUT, -1);
}

/* Who waits for a message of the link, or for its device while that waits for others, does nothing else: when all do, and have
 * done so for long, something between the devices is lost. Whoever is through with the call is not needed, and who has not
 * come to it yet may take its time. */
static void judge_stalled(ra_link *link, double now) {
    const double stalled = now - link->stalled_since;
    if (!(link->stalled_since > 0) || stalled < link->timeout + ra_link_turn(link, -1)) return;
    for (int rank = 0; rank < link->ranks; rank++) {
        const ra_peer *peer = &link->peers[rank];
        if (rank == link->rank || peer->left || peer->mark.number > link->calls) continue;
        if (peer->mark.number < link->calls) return;
        const double waited = peer->wait.number > 0 ? peer->wait.seconds : peer->stalled;
        if (peer->mark.place == RA_IN_CALL && waited < link->timeout) return;
    }
    ra_fail(RA_TIMEOUT,
            "all ranks are alive, and their devices have waited for each other for %.3g s (%s, step %lld; noticed by rank %d)",
            stalled, link->phase, (long long)link->step, link->rank);
    ra_link_break(link, RA_TIMEOUT, -1);
}

void ra_control_judge(ra_link *link) {
    double now = ra_seconds();
    judge_lost(link, now);
    judge_awaited(link, now);
    if (link->status == RA_OK) judge_silent(link, now);
    if (link->status == RA_OK && link->suspect < 0) judge_circle(link);
    if (link->status == RA_OK && link->suspect < 0) judge_stalled(link, now);
    if (link->status == RA_OK) ra_link_overdue(link, now);
}
