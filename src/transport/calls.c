/* Which call a rank is in, and whether that is the call which its peers are in.
 *
 * Ranks agree on a plan when they make it; nothing keeps a program from using different ones afterwards. So every rank numbers
 * its calls and works out a digest of each: of the phase and of what it works on. The digest travels in the header of every
 * message of the call, and number and digest in every heartbeat. A rank that gets a message of another call does not use it.
 * A rank that hears of a call by its number looks up its own of that number: the two are the same, or both ranks are told.
 * Texts of what they work on travel in heartbeats, so that the field which differs is named. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/fields.h"
#include "core/status.h"
#include "transport/link_internal.h"

/* A rank that hears of a difference without its text asks for it: whoever gets the question compares, too. */
static void ask(ra_link *link) {
    link->asking = true;
    ra_control_beat(link);
}

static bool differs(const ra_link *link, const ra_mark *theirs) {
    if (theirs->number == 0 || theirs->number > link->calls || link->calls - theirs->number >= RA_CALL_LOG) return false;
    return theirs->digest != link->call_digests[theirs->number % RA_CALL_LOG];
}

void ra_link_begin(ra_link *link, const char *phase, const ra_subject *subject) {
    ra_link_lock(link);
    snprintf(link->phase, sizeof link->phase, "%s", phase);
    snprintf(link->call_phase, sizeof link->call_phase, "%s", phase);
    snprintf(link->call_text, sizeof link->call_text, "%.*s", (int)subject->bytes, subject->text);
    link->call = ra_fnv(subject->digest, phase, (int64_t)strlen(phase));
    link->call_digests[++link->calls % RA_CALL_LOG] = link->call;
    link->step = 0;
    link->calling = true;
    link->calling_since = ra_seconds();
    link->asking = false;
    bool same = true;
    for (int rank = 0; rank < link->ranks && same; rank++) same = !differs(link, &link->peers[rank].mark);
    if (!same) ask(link);
    ra_link_unlock(link);
}

void ra_link_end(ra_link *link) {
    ra_link_lock(link);
    link->calling = link->asking = false;
    link->stalled_since = 0;
    link->call = 0;
    ra_link_unlock(link);
}

ra_mark ra_link_mark(const ra_link *link) {
    ra_mark mark = {.number = link->calls,
                    .digest = link->call_digests[link->calls % RA_CALL_LOG],
                    .step = link->step,
                    .place = !link->calling ? RA_OUTSIDE : link->call ? RA_IN_CALL : RA_IN_AGREEMENT};
    memcpy(mark.phase, link->calling ? link->phase : link->call_phase, sizeof mark.phase);
    return mark;
}

/* "forward with scale 0x1p-1", or if the text is not known or does not reach as far as the difference, "forward of a plan with
 * digest 1234". */
static void describe(char *text, size_t room, const char *phase, const char *field, const char *value, uint64_t digest) {
    if (*field) snprintf(text, room, "%s with %s %s", phase, field, value);
    else snprintf(text, room, "%s (%016llx)", phase, (unsigned long long)digest);
}

void ra_link_compare(ra_link *link, int rank, const char *text) {
    const ra_mark *theirs = &link->peers[rank].mark;
    if (link->status != RA_OK || !differs(link, theirs)) return;
    bool latest = theirs->number == link->calls;
    char field[64] = "", values[2][64], told[2][160];
    if (latest && *text) ra_first_difference(link->call_text, text, field, values[0], values[1], sizeof field);
    describe(told[0], sizeof told[0], latest ? link->call_phase : "another", field, values[0],
             link->call_digests[theirs->number % RA_CALL_LOG]);
    describe(told[1], sizeof told[1], theirs->phase, field, values[1], theirs->digest);
    int low = rank < link->rank; /* all tell the lower rank first, and so the same */
    ra_fail(RA_DISAGREE, "ranks disagree on call %llu: it is %s on rank %d and %s on rank %d",
            (unsigned long long)theirs->number, told[low], low ? rank : link->rank, told[!low], low ? link->rank : rank);
    ra_link_break(link, RA_DISAGREE, rank);
}

bool ra_link_doubts(ra_link *link, const ra_flight *flight, double since) {
    const ra_mark *theirs = &link->peers[flight->peer].mark;
    if (link->call == 0 || (flight->status != RA_PROTOCOL && flight->status != RA_DISAGREE)) return false;
    if (theirs->number == link->calls && !differs(link, theirs)) return false;
    if (!link->asking) ask(link);
    return ra_seconds() - since < RA_LINK_GRACE;
}

/* ---------------------------------------------------------------------------------------------------------- call timeout */

ra_status ra_link_set_call_timeout(ra_link *link, double seconds) {
    if (!(seconds >= 0) || !isfinite(seconds))
        return ra_fail(RA_INVALID, "call_timeout is %g seconds; it must be positive, or 0 for none", seconds);
    ra_link_lock(link);
    link->call_timeout = seconds;
    ra_status status = ra_link_broken(link);
    ra_link_unlock(link);
    return status;
}

/* "rank 1 is in forward (call 3, step 2), waiting for rank 0", "rank 2 is between calls (its last was forward, call 2)". */
static void tell_mark(char *text, size_t room, int rank, const ra_mark *mark, const ra_wait *wait) {
    unsigned long long number = mark->number;
    char waits[48] = "";
    if (wait->number > 0) snprintf(waits, sizeof waits, ", waiting for rank %d", wait->peer);
    if (mark->place == RA_IN_CALL)
        snprintf(text, room, "rank %d is in %s (call %llu, step %lld)%s", rank, mark->phase, number,
                 (long long)mark->step, waits);
    else if (mark->place == RA_IN_AGREEMENT)
        snprintf(text, room, "rank %d is in %s (after call %llu)%s", rank, mark->phase, number, waits);
    else if (number > 0)
        snprintf(text, room, "rank %d is between calls (its last was %s, call %llu)", rank, mark->phase, number);
    else snprintf(text, room, "rank %d has made no call yet", rank);
}

void ra_link_overdue(ra_link *link, double now) {
    enum { SHOWN = 4 };
    double lasted = now - link->calling_since;
    if (!(link->call_timeout > 0) || !link->calling || lasted < link->call_timeout) return;
    if (!link->asking) ask(link);
    if (lasted < link->call_timeout + RA_LINK_GRACE + ra_link_turn(link, -1)) return;
    const ra_mark mine = ra_link_mark(link);
    char text[RA_SENTENCE];
    int shown = 0;
    size_t used = 0;
    /* Those who are elsewhere first: they are why. */
    for (int pass = 0; pass < 2; pass++)
        for (int rank = 0; rank < link->ranks; rank++) {
            const ra_peer *peer = &link->peers[rank];
            const ra_mark *mark = rank == link->rank ? &mine : &peer->mark;
            const ra_wait wait = rank == link->rank ? ra_link_waits_for(link) : peer->wait;
            bool here = mark->place == mine.place && mark->number == mine.number && strcmp(mark->phase, mine.phase) == 0;
            if (here != (pass == 1) || shown++ >= SHOWN) continue;
            char one[160];
            if (rank != link->rank && !peer->arrived) snprintf(one, sizeof one, "rank %d has not been heard of yet", rank);
            else tell_mark(one, sizeof one, rank, mark, &wait);
            int wrote = snprintf(text + used, sizeof text - used, "%s%s", shown > 1 ? "; " : "", one);
            used += (size_t)wrote < sizeof text - used ? (size_t)wrote : sizeof text - used - 1;
        }
    ra_fail(RA_TIMEOUT, "%s on rank %d lasted longer than the call timeout of %.3g s: %s%s", mine.phase, link->rank,
            link->call_timeout, text, shown > SHOWN ? "; ..." : "");
    ra_link_break(link, RA_TIMEOUT, -1);
}
