/* The inside of a link, shared by link.c (messages), control.c (heartbeats), calls.c (which call a rank is in), judge.c
 * (verdicts), history.c (the post-mortem) and header.c (the frame). */
#ifndef RA_TRANSPORT_LINK_INTERNAL_H
#define RA_TRANSPORT_LINK_INTERNAL_H

#include <pthread.h>

#include "core/clock.h"
#include "transport/link.h"

/* ------------------------------------------------------------------------------------------------------------- header
 *
 *     0 magic 4 | version 2 | flags 2 | 8 sequence 8 | 16 step 8 | 24 tag 8 | 32 length 8 |
 *     40 source 4 | destination 4 | 48 payload crc 4 | 52 call 8 | 60 header crc 4
 *
 * little endian; the header crc covers the 60 bytes before it. */
typedef struct ra_header {
    uint16_t flags;
    uint64_t sequence; /* 0, 1, ... from source to destination; control messages have their own */
    int64_t step;
    uint64_t tag;
    int64_t length; /* of the payload */
    int32_t source, destination;
    uint32_t payload_crc; /* 0 without RA_HEADER_PAYLOAD_CRC */
    uint64_t call;        /* digest of the call that the message belongs to; 0: none */
} ra_header;

#define RA_HEADER_PAYLOAD_CRC 1u

uint32_t ra_payload_crc(const void *buf, int64_t length);
void ra_header_write(const ra_header *header, void *buf);
/* Reads and checks everything that a receiver knows: mark, version, crc, flags, and source, destination, tag, call, length (of
 * `want`) against what came (`received` bytes in all), and the payload's crc when there is one. RA_DISAGREE if only the call
 * and what follows from it differ, else RA_PROTOCOL; with a sentence. */
ra_status ra_header_check(const void *buf, size_t received, const ra_header *want, ra_header *header);

/* --------------------------------------------------------------------------------------------------------------- peers */

#define RA_SEEN_WINDOW 1024 /* sequence numbers that may be outstanding at once */

/* Which sequence numbers of a peer have come: all below `base`, and those whose bit (number % window) is set. */
typedef struct ra_seen {
    uint64_t base;
    uint64_t bits[RA_SEEN_WINDOW / 64];
} ra_seen;

bool ra_seen_has(const ra_seen *seen, uint64_t sequence);
/* True the first time; false for a number that came before or lies beyond the window. */
bool ra_seen_mark(ra_seen *seen, uint64_t sequence);

/* What a rank waits for, as it says in every beat. */
typedef struct ra_wait {
    uint64_t number;        /* of this wait on its rank, from 1; 0: the rank waits for nothing */
    uint64_t tag, sequence; /* of the message; the sequence of a message that it sends */
    int64_t step;
    uint64_t blocker; /* the wait in which `peer` said that it had not posted its half of the message; 0: it did not say so */
    double seconds;   /* since when */
    int32_t peer;
    uint32_t receiving;
    char phase[24];
} ra_wait;

/* Calls are numbered; an agreement (allgather) between them is not. */
typedef enum ra_place { RA_OUTSIDE = 0, RA_IN_CALL = 1, RA_IN_AGREEMENT = 2 } ra_place;

/* The call that a rank is in, or was in last, as it says in every beat. */
typedef struct ra_mark {
    uint64_t number; /* from 1; 0: none yet */
    uint64_t digest;
    int64_t step;
    uint32_t place; /* ra_place */
    char phase[24];
} ra_mark;

#define RA_CALL_LOG 64   /* calls that a rank remembers, to compare with peers that lag behind */
#define RA_CALL_TEXT 512 /* bytes of a call's subject that travel */

/* What a rank tells about its half of a message that a peer waits for. */
typedef enum ra_answer { RA_ANSWER_NOT_YET = 0, RA_ANSWER_POSTED = 1, RA_ANSWER_DONE = 2 } ra_answer;

#define RA_SENT_LOG 32

typedef struct ra_peer {
    uint64_t sequence; /* of the next message to it */
    ra_seen seen;

    bool arrived; /* anything ever came from it */
    double heard; /* when its last sign of life came */
    bool left;    /* it said that it leaves, in peace */
    bool lost;    /* the transport says that it is gone */
    double left_at, lost_at;
    double timeout; /* its own, as it said; 0: not yet known */
    bool polled;    /* it beats only from inside calls */

    /* Control messages: one receive posted, one heartbeat and one last word in flight; their frames lie in link->frames. */
    void *inbox, *beat, *word;
    bool beat_due;
    uint64_t control_sequence, control_seen; /* of the next to it; one past the latest from it */

    /* Messages that it may ask after: the latest finished sends to it. */
    struct {
        uint64_t tag, sequence;
    } sent[RA_SENT_LOG];
    uint64_t sent_count;
    bool asks;    /* it wants to hear from everybody at once */
    ra_wait wait; /* what it said last that it waits for, */
    ra_mark mark; /* which call it is in, */
    double stalled; /* and for how many seconds its device has waited for others */

    /* A message which it says it sent and which has not come. */
    bool missing;
    ra_answer missing_answer;
    uint64_t missing_sequence;
    double missing_since;
} ra_peer;

/* ------------------------------------------------------------------------------------------------------------- messages */

/* A message in flight; ra_transfer.request points to it. */
typedef struct ra_flight {
    struct ra_flight *next, *previous;
    void *request;    /* the transport's; NULL once finished */
    ra_status status; /* when finished */
    size_t received;
    char *buf;
    int64_t payload, step;
    uint64_t tag, sequence;
    uint64_t call; /* its digest */
    int32_t peer;
    bool receiving;
} ra_flight;

/* What happened lately, for the post-mortem. */
typedef struct ra_event {
    double time;
    const char *what; /* "posted", "finished", "heard", ... */
    int32_t peer;
    bool receiving;
    int64_t step, bytes;
    uint64_t tag;
} ra_event;

#define RA_EVENTS 32
#define RA_SENTENCE 344 /* bytes of a verdict's text, which travels */

struct ra_link {
    ra_comm_ops ops;
    void *ctx;
    int rank, ranks;
    int solo_rank, solo_ranks; /* of a rank played alone, whose link knows one rank; 0, 0: there are peers */
    char transport[16];
    pthread_mutex_t mutex; /* around everything below and around every call of ops; ra_link_lock takes it */
    pthread_mutex_t next;  /* of the thread that gets `mutex` next */

    double timeout, start_timeout, created;
    double call_timeout; /* 0: none */
    bool checksum;
    ra_peer *peers;
    char *frames;               /* of control messages: inbox, beat and word of each peer */
    ra_flight *flights, *spare; /* in flight; kept for reuse */
    ra_flight *polled;          /* the one that ra_link_poll looks at next */
    uint64_t gathers;           /* ra_link_allgather calls so far: their tags */
    ra_link_counts counts;

    double next_beat, serviced;
    int suspect; /* a peer that is silent for too long; -1: none */
    double suspected;
    const ra_flight *awaited; /* what ra_link_wait waits for now, and since when */
    double awaited_since;
    double stalled_since; /* the device waits for others (ra_link_set_stalled); 0: it does not */
    uint64_t waits, blocker; /* the number of this wait, and of the wait that keeps its peer from ending it (ra_wait) */
    bool calling;            /* between ra_link_begin and ra_link_end, or in an allgather */
    double calling_since;
    uint64_t calls;                     /* ra_link_begin so far: the number of the latest */
    uint64_t call_digests[RA_CALL_LOG]; /* of call number i at i % RA_CALL_LOG */
    uint64_t call;                      /* the digest of this one; 0: in none */
    char call_phase[24], call_text[RA_CALL_TEXT]; /* of the latest */
    bool asking; /* this rank wants to hear from everybody at once, to know which call they are in */
    bool mute;   /* no post-mortem */
    char phase[24];
    int64_t step;

    pthread_t thread; /* beats while the caller computes */
    bool threaded, stopping;
    pthread_cond_t wake;

    ra_event events[RA_EVENTS];
    uint64_t event_count;

    bool open;        /* ra_link_create has succeeded: from then on peers are told of failures */
    ra_status status; /* not RA_OK: broken */
    int culprit;      /* the rank that broke it */
    void (*broke)(void *arg); /* ra_link_on_break */
    void *broke_arg;
    char sentence[RA_SENTENCE];
};

#define RA_CONTROL_TAG RA_LINK_OWN_TAG
#define RA_LINK_GRACE 0.5 /* seconds between a suspicion and the verdict */

/* In turns: a thread that waits for messages unlocks and locks again at once, and the one that sleeps until it may lock would
 * mostly come too late. So whoever is to be next holds `next` meanwhile, and the first gets in line behind it. */
static inline void ra_link_lock(ra_link *link) {
    pthread_mutex_lock(&link->next);
    pthread_mutex_lock(&link->mutex);
    pthread_mutex_unlock(&link->next);
}
static inline void ra_link_unlock(ra_link *link) { pthread_mutex_unlock(&link->mutex); }

/* A message of a rank played alone: it is finished at once. */
ra_status ra_solo_post(ra_link *link, const ra_flight *message, const ra_maker *maker, ra_transfer *transfer);

/* All of these are called with the lock held. */

/* Starts control messages and the thread that beats; nothing for one rank. */
ra_status ra_control_start(ra_link *link);
/* Stops the thread; not with the lock held. */
void ra_control_stop(ra_link *link);
/* Says the last word (leaving in peace, or why the link is broken) and gives up all control messages. Bounded. */
void ra_control_leave(ra_link *link);
/* Reads control messages, beats when it is time, and judges the silent. May break the link. */
void ra_control_service(ra_link *link);
/* Only reads control messages: a verdict that has come takes precedence over this rank's own. */
void ra_control_read(ra_link *link);
/* Makes a heartbeat to every peer due at once. */
void ra_control_beat(ra_link *link);
/* Breaks the link if a peer that this rank waits for, or needs for its call, is lost (gone, left, or silent for too long), if
 * its message is lost, or if ranks or their devices wait for each other. */
void ra_control_judge(ra_link *link);
/* Puts the last word on its way to every peer. */
void ra_control_tell(ra_link *link);

/* Breaks the link, with the sentence recorded on this thread, unless it is broken already; tells the peers; returns why it is
 * broken and records the sentence. */
ra_status ra_link_break(ra_link *link, ra_status status, int culprit);
/* RA_OK, or why it is broken, with the sentence recorded. */
ra_status ra_link_broken(const ra_link *link);
/* What the rank waits for now, and which call it is in. */
ra_wait ra_link_waits_for(const ra_link *link);
ra_mark ra_link_mark(const ra_link *link);
/* Breaks the link if a peer's call differs from this rank's of the same number; `text` is of what the peer works on. */
void ra_link_compare(ra_link *link, int rank, const char *text);
/* May a message, found wrong at time `since`, be wrong because its sender is in another call? Then this rank asks, and waits a
 * while: an answer that names both calls is a better verdict than a wrong message. */
bool ra_link_doubts(ra_link *link, const ra_flight *flight, double since);
/* Breaks the link if the call that this rank is in has lasted longer than its call timeout. */
void ra_link_overdue(ra_link *link, double now);
/* Seconds for which this rank lets lower ranks, which come to the same verdict at the same time, say it first; rank `but` does
 * not count. */
double ra_link_turn(const ra_link *link, int but);

void ra_history_note(ra_link *link, const char *what, int peer, bool receiving, uint64_t tag, int64_t step, int64_t bytes);
/* The post-mortem, as one record of the log: a warning if communication failed, else (a rank gave up for a reason of its own)
 * only information. */
void ra_history_print(ra_link *link);

#endif
