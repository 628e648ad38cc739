/* Heartbeats and verdicts: how a rank that died is told from one that is slow, and how all survivors come to name the same one.
 *
 * Each rank keeps one small receive posted for every peer on a tag of its own. Over it travel
 *
 *     beat     every eighth of the timeout, busy or not: "alive; my timeout; which call I am in; what I wait for; my half of
 *              yours; answer at once, for I miss somebody"
 *     leaving  the rank destroys its link in peace
 *     verdict  the link is broken: status, culprit and the sentence that everybody will say
 *
 * A beat is sent from ra_link_wait, from ra_link_poll, and from a thread of the link's own: a rank may compute a single tile
 * for longer than the timeout, or be busy outside the library, and nobody may call it dead for that. The thread is asleep but
 * for a few wake-ups a second, and every call of the transport is made under the link's lock. (An eighth and not a quarter: a
 * rank that was stopped for 0.8 of the timeout just before its next beat has then still been silent for less than the timeout.)
 *
 * A peer that is silent for the timeout becomes the suspect. The suspicion goes to everybody at once, with a beat; whoever
 * hears it beats back at once. Who is still silent half a second later is named, and the verdict goes to all;
 * each rank that gets a first verdict adopts it and passes it on, so a verdict survives the death of its finder. A broken link
 * goes on beating, with the verdict instead of the beat, until it is destroyed.
 *
 * A transport may know that a peer lives which cannot beat, because beats need something there that is busy (in Python's
 * transports the lock of the interpreter). It then says so by an empty control message, which no peer ever sends.
 *
 * A message that a transport swallows leaves everybody alive and waiting. So a rank that waits asks after the message; the peer
 * answers from its list of latest sends; and what was sent long ago and never came is a verdict too. So are ranks that wait for
 * each other because the program is wrong: judge.c finds them in what all say that they wait for. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/log.h"
#include "core/size.h"
#include "core/status.h"
#include "core/thread.h"
#include "transport/link_internal.h"

enum { BEAT = 1, LEAVING = 2, VERDICT = 3 };
enum { INBOX = 0, BEAT_FRAME = 1, WORD_FRAME = 2, FRAMES = 3 };

typedef struct control {
    uint32_t kind;
    uint32_t asks;   /* the sender wants to hear from everybody at once */
    double timeout;  /* the sender's */
    uint32_t polled; /* the sender beats only from inside calls */
    uint32_t answer; /* about its half of the message for which the receiver waits in its wait of this number */
    uint64_t answered_wait;
    uint64_t answered_sequence;
    ra_wait wait;    /* what the sender waits for */
    ra_mark mark;    /* the call that it is in */
    double stalled;  /* seconds for which its device has waited for others */
    uint32_t status; /* of a verdict */
    int32_t culprit;
    char text[RA_CALL_TEXT]; /* of a beat: of what the call works on; of a verdict: the sentence */
} control;
static_assert(RA_SENTENCE <= RA_CALL_TEXT, "a verdict's sentence fits");

#define FRAME ((int64_t)(RA_LINK_HEADER + sizeof(control)))
#define LINGER 0.1 /* seconds that destroying a link gives its last words */
#define BURST 16   /* control messages read from one peer at a time */

static char *frame_of(ra_link *link, int peer, int which) { return link->frames + ((int64_t)peer * FRAMES + which) * FRAME; }

static int64_t frames_size(const ra_link *link) { return link->ranks * FRAMES * FRAME; }

static double beat_interval(const ra_link *link) {
    double shortest = link->timeout;
    for (int rank = 0; rank < link->ranks; rank++) {
        double timeout = link->peers[rank].timeout;
        if (timeout > 0 && timeout < shortest) shortest = timeout;
    }
    return shortest / 8;
}

void ra_control_beat(ra_link *link) {
    for (int rank = 0; rank < link->ranks; rank++) link->peers[rank].beat_due = rank != link->rank;
    link->next_beat = ra_seconds() + beat_interval(link);
}

static void mark_lost(ra_link *link, int rank) {
    ra_peer *peer = &link->peers[rank];
    if (peer->lost) return;
    peer->lost = true;
    peer->lost_at = ra_seconds();
}

/* The transport failed on a control message. */
static void control_failed(ra_link *link, int rank, ra_status status) {
    if (status == RA_PEER_LOST) {
        mark_lost(link, rank);
    } else if (!link->peers[rank].left) {
        ra_fail_context(status, "%s, step %lld, rank %d, heartbeat of rank %d: ", link->phase, (long long)link->step,
                        link->rank, rank);
        ra_link_break(link, status, rank);
    }
}

/* -------------------------------------------------------------------------------------------------------------- sending */

static void answer(ra_link *link, int rank, control *message) {
    const ra_peer *peer = &link->peers[rank];
    const ra_wait *wait = &peer->wait;
    if (wait->number == 0 || wait->peer != link->rank || wait->seconds <= peer->timeout / 4) return;
    message->answered_wait = wait->number;
    for (const ra_flight *at = link->flights; at; at = at->next) {
        if (at->receiving == (wait->receiving != 0) || at->peer != rank || at->tag != wait->tag) continue;
        message->answer = at->request ? RA_ANSWER_POSTED : RA_ANSWER_DONE;
        message->answered_sequence = at->sequence;
        return;
    }
    if (!wait->receiving && ra_seen_has(&peer->seen, wait->sequence)) message->answer = RA_ANSWER_DONE;
    uint64_t known = peer->sent_count < RA_SENT_LOG ? peer->sent_count : RA_SENT_LOG;
    for (uint64_t i = 1; wait->receiving && i <= known; i++) { /* the latest first */
        uint64_t slot = (peer->sent_count - i) % RA_SENT_LOG;
        if (peer->sent[slot].tag != wait->tag) continue;
        message->answer = RA_ANSWER_DONE;
        message->answered_sequence = peer->sent[slot].sequence;
        return;
    }
}

static ra_status post(ra_link *link, int rank, int which, uint32_t kind, void **request) {
    ra_peer *peer = &link->peers[rank];
    control message = {.kind = kind,
                       .asks = link->suspect >= 0 || link->asking,
                       .timeout = link->timeout,
                       .polled = !link->threaded,
                       .status = (uint32_t)link->status,
                       .culprit = link->culprit};
    if (kind == VERDICT) memcpy(message.text, link->sentence, RA_SENTENCE);
    if (kind == BEAT) {
        message.wait = ra_link_waits_for(link);
        message.mark = ra_link_mark(link);
        message.stalled = link->stalled_since > 0 ? ra_seconds() - link->stalled_since : 0;
        memcpy(message.text, link->call_text, RA_CALL_TEXT);
        answer(link, rank, &message);
    }
    char *buf = frame_of(link, rank, which);
    memcpy(buf + RA_LINK_HEADER, &message, sizeof message);
    ra_header header = {.flags = RA_HEADER_PAYLOAD_CRC,
                        .sequence = peer->control_sequence++,
                        .step = link->step,
                        .tag = RA_CONTROL_TAG,
                        .length = sizeof message,
                        .source = link->rank,
                        .destination = rank,
                        .payload_crc = ra_payload_crc(buf, sizeof message)};
    ra_header_write(&header, buf);
    ra_status status = link->ops.post_send(link->ctx, rank, RA_CONTROL_TAG, buf, (size_t)FRAME, request);
    if (status != RA_OK) *request = NULL;
    return status;
}

/* Notices that an earlier control message is on its way, so that its frame is free again. */
static void reap(ra_link *link, int rank, void **request) {
    if (!*request) return;
    int done = 0;
    ra_status status = link->ops.wait(link->ctx, *request, 0, &done, NULL);
    if (status == RA_OK && !done) return;
    *request = NULL;
    if (status != RA_OK && link->status == RA_OK) control_failed(link, rank, status);
}

static void send_beats(ra_link *link) {
    for (int rank = 0; rank < link->ranks; rank++) {
        ra_peer *peer = &link->peers[rank];
        reap(link, rank, &peer->beat);
        reap(link, rank, &peer->word);
        if (!peer->beat_due || peer->beat || peer->left || peer->lost) continue;
        peer->beat_due = false;
        ra_status status = post(link, rank, BEAT_FRAME, link->status == RA_OK ? BEAT : VERDICT, &peer->beat);
        if (status != RA_OK && link->status == RA_OK) control_failed(link, rank, status);
    }
}

void ra_control_tell(ra_link *link) {
    if (!link->frames) return;
    for (int rank = 0; rank < link->ranks; rank++) {
        ra_peer *peer = &link->peers[rank];
        if (rank == link->rank || peer->word || peer->left) continue;
        post(link, rank, WORD_FRAME, link->status == RA_OK ? LEAVING : VERDICT, &peer->word);
    }
}

/* ------------------------------------------------------------------------------------------------------------ receiving */

static void take_answer(ra_link *link, int rank, const control *message) {
    ra_peer *peer = &link->peers[rank];
    const ra_flight *awaited = link->awaited;
    if (!awaited || awaited->peer != rank) {
        peer->missing = false;
        return;
    }
    bool about_this = message->answered_wait == link->waits, posted = about_this && message->answer != RA_ANSWER_NOT_YET;
    link->blocker = about_this && !posted ? message->wait.number : 0;
    bool missing = posted && awaited->receiving && !ra_seen_has(&peer->seen, message->answered_sequence);
    bool known = missing && peer->missing && peer->missing_sequence == message->answered_sequence &&
                 (uint32_t)peer->missing_answer == message->answer;
    if (!known) peer->missing_since = ra_seconds();
    peer->missing = missing;
    peer->missing_sequence = message->answered_sequence;
    peer->missing_answer = (ra_answer)message->answer;
}

static void take(ra_link *link, int rank, control *message) {
    ra_peer *peer = &link->peers[rank];
    peer->arrived = true;
    peer->heard = ra_seconds();
    message->text[RA_CALL_TEXT - 1] = 0;
    switch (message->kind) {
    case BEAT:
        if (message->timeout > 0) {
            peer->timeout = message->timeout;
            double next = peer->heard + beat_interval(link);
            if (link->next_beat > next) link->next_beat = next;
        }
        peer->polled = message->polled != 0;
        /* Everybody answers a new question at once, and only a new one: two that ask must not excite each other for ever. */
        if (message->asks && !peer->asks) link->next_beat = 0;
        peer->asks = message->asks != 0;
        peer->wait = message->wait;
        peer->wait.phase[sizeof peer->wait.phase - 1] = 0;
        peer->stalled = message->stalled;
        peer->mark = message->mark;
        peer->mark.phase[sizeof peer->mark.phase - 1] = 0;
        take_answer(link, rank, message);
        ra_link_compare(link, rank, message->text);
        break;
    case LEAVING:
        peer->left = true;
        peer->left_at = peer->heard;
        break;
    case VERDICT:
        if (link->status == RA_OK) {
            ra_history_note(link, "verdict by", rank, true, RA_CONTROL_TAG, link->step, 0);
            ra_link_break(link, ra_fail((ra_status)message->status, "%s", message->text), message->culprit);
        }
        break;
    default:
        ra_fail(RA_PROTOCOL, "rank %d got a control message of unknown kind %u from rank %d", link->rank, message->kind, rank);
        ra_link_break(link, RA_PROTOCOL, rank);
    }
}

static void post_inbox(ra_link *link, int rank) {
    ra_peer *peer = &link->peers[rank];
    ra_status status =
        link->ops.post_recv(link->ctx, rank, RA_CONTROL_TAG, frame_of(link, rank, INBOX), (size_t)FRAME, &peer->inbox);
    if (status == RA_OK) return;
    peer->inbox = NULL;
    if (link->status == RA_OK) control_failed(link, rank, status);
}

static void read_inbox(ra_link *link, int rank) {
    ra_peer *peer = &link->peers[rank];
    for (int i = 0; i < BURST && peer->inbox; i++) {
        int done = 0;
        size_t received = 0;
        ra_status status = link->ops.wait(link->ctx, peer->inbox, 0, &done, &received);
        if (status == RA_OK && !done) return;
        peer->inbox = NULL;
        if (status == RA_OK && received == 0 && peer->arrived) { /* the transport says: alive, but cannot beat */
            peer->heard = ra_seconds();
            post_inbox(link, rank);
            return;
        }
        ra_header want = {.tag = RA_CONTROL_TAG, .length = sizeof(control), .source = rank, .destination = link->rank}, header;
        char *buf = frame_of(link, rank, INBOX);
        if (status == RA_OK) status = ra_header_check(buf, received, &want, &header);
        if (status != RA_OK) {
            if (link->status == RA_OK) control_failed(link, rank, status);
            return;
        }
        if (header.sequence >= peer->control_seen) { /* else: repeated, and says nothing new */
            peer->control_seen = header.sequence + 1;
            control message;
            memcpy(&message, buf + RA_LINK_HEADER, sizeof message);
            take(link, rank, &message);
        }
        post_inbox(link, rank);
    }
}

void ra_control_read(ra_link *link) {
    if (!link->frames) return;
    for (int rank = 0; rank < link->ranks; rank++) read_inbox(link, rank);
}

void ra_control_service(ra_link *link) {
    if (!link->frames) return;
    double now = ra_seconds();
    link->serviced = now;
    ra_control_read(link);
    if (now >= link->next_beat) ra_control_beat(link);
    send_beats(link);
    /* A rank that is outside calls and waits for nothing judges nobody. */
    if (link->status == RA_OK && (link->flights || link->calling)) ra_control_judge(link);
    send_beats(link);
    if (link->status != RA_OK && link->broke) link->broke(link->broke_arg);
}

/* ----------------------------------------------------------------------------------------------------- beginning and end */

static void *beat_thread(void *arg) {
    ra_link *link = arg;
    ra_link_lock(link);
    while (!link->stopping) {
        double period = beat_interval(link) / 2;
        if (period > 0.25) period = 0.25;
        if (period < 0.002) period = 0.002;
        const struct timespec until = ra_seconds_ahead(period);
        pthread_cond_timedwait(&link->wake, &link->mutex, &until);
        if (!link->stopping) ra_control_service(link);
    }
    ra_link_unlock(link);
    return NULL;
}

ra_status ra_control_start(ra_link *link) {
    link->suspect = link->culprit = -1;
    if (link->ranks == 1) return RA_OK;
    link->frames = ra_calloc(frames_size(link));
    if (!link->frames) return ra_fail(RA_NOMEM, "no memory for the heartbeats of %d ranks", link->ranks);
    link->threaded = !(link->ops.flags & RA_COMM_CALLER_THREAD);
    for (int rank = 0; rank < link->ranks && link->status == RA_OK; rank++)
        if (rank != link->rank) post_inbox(link, rank);
    ra_control_service(link);
    if (link->status != RA_OK) {
        link->threaded = false;
        return ra_link_broken(link);
    }
    if (!link->threaded) return RA_OK;
    link->threaded = ra_thread_start(&link->thread, beat_thread, link);
    return link->threaded
               ? RA_OK
               : ra_link_break(link, ra_fail(RA_NOMEM, "rank %d cannot start its heartbeat thread", link->rank), link->rank);
}

void ra_control_stop(ra_link *link) {
    if (!link->threaded) return;
    ra_link_lock(link);
    link->stopping = true;
    pthread_cond_signal(&link->wake);
    ra_link_unlock(link);
    pthread_join(link->thread, NULL);
    link->threaded = false;
}

/* Frames that a transport may still write to, or read: kept, and within reach of a leak checker. */
static pthread_mutex_t kept_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct kept {
    struct kept *next;
    char *frames;
} * kept_frames;

static void keep(char *frames) {
    struct kept *entry = ra_alloc(sizeof *entry);
    if (!entry) return;
    pthread_mutex_lock(&kept_mutex);
    *entry = (struct kept){.next = kept_frames, .frames = frames};
    kept_frames = entry;
    pthread_mutex_unlock(&kept_mutex);
}

void ra_control_leave(ra_link *link) {
    if (!link->frames) return;
    if (link->status == RA_OK) ra_control_tell(link);
    double until = ra_seconds() + LINGER;
    for (bool pending = true; pending && ra_seconds() < until;) {
        pending = false;
        for (int rank = 0; rank < link->ranks; rank++) {
            ra_peer *peer = &link->peers[rank];
            reap(link, rank, &peer->word);
            pending |= peer->word && !peer->lost && rank != link->culprit;
        }
        if (pending) nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    int64_t stuck = 0;
    for (int rank = 0; rank < link->ranks; rank++) {
        ra_peer *peer = &link->peers[rank];
        void *requests[] = {peer->inbox, peer->beat, peer->word};
        for (int i = 0; i < FRAMES; i++) stuck += requests[i] && link->ops.cancel(link->ctx, requests[i]) != RA_OK;
    }
    if (stuck > 0) {
        ra_log(RA_LOG_INFO, "rank %d: %lld control buffers of requests that cannot be cancelled are kept", link->rank,
               (long long)stuck);
        link->counts.kept_buffers += stuck;
        keep(link->frames);
    } else {
        ra_free(link->frames, frames_size(link));
    }
    link->frames = NULL;
}
