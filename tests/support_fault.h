/* For tests: a transport around another that counts what passes and does one thing wrong. */
#ifndef RA_TESTS_SUPPORT_FAULT_H
#define RA_TESTS_SUPPORT_FAULT_H

#include "ringattn.h"

typedef enum ra_fault_kind {
    RA_FAULT_NONE = 0,
    RA_FAULT_DELAY,     /* the operation finishes `seconds` late at the earliest */
    RA_FAULT_DROP,      /* a send seems to finish and never arrives; a receive never finishes */
    RA_FAULT_TRUNCATE,  /* a send loses its last `bytes` bytes */
    RA_FAULT_DUPLICATE, /* a send is sent twice */
    RA_FAULT_CORRUPT,   /* byte number `bytes` of a send is xored with `mask` */
    RA_FAULT_FAIL,      /* posting returns `status` */
    RA_FAULT_BREAK,     /* waiting returns `status` */
    RA_FAULT_FREEZE,    /* posting takes `seconds`, during which the rank does nothing at all, as if it were stopped */
    RA_FAULT_STOP,      /* from this operation on the rank is dead: nothing leaves, nothing comes */
    RA_FAULT_SIGNAL     /* raise(signal): a process that kills or stops itself */
} ra_fault_kind;

typedef struct ra_fault {
    ra_fault_kind kind;
    bool sends, receives; /* which operations count */
    bool control;         /* heartbeats and the like count instead of the caller's messages */
    int64_t nth;          /* the first operation that suffers, from 0 */
    int64_t repeat;       /* how many suffer; 0: one */
    double seconds;
    int64_t bytes;
    uint8_t mask;
    ra_status status;
    int signal;
} ra_fault;

/* What was handed to the transport below; the caller's messages with their headers, and the link's own. */
typedef struct ra_fault_counts {
    int64_t sends, receives, bytes_sent, bytes_received;
    int64_t own_sends, own_receives, own_bytes_sent, own_bytes_received;
    int64_t faults; /* operations that suffered */
    double struck;  /* when the first of them did, by ra_seconds */
} ra_fault_counts;

/* Takes ownership of inner_ctx, also when this fails. */
ra_status ra_transport_fault(const ra_comm_ops *inner, void *inner_ctx, const ra_fault *fault, ra_comm_ops *ops, void **ctx);
/* From any thread: changes the fault and counts its operations from 0. */
void ra_fault_set(void *ctx, const ra_fault *fault);
ra_fault_counts ra_fault_read(void *ctx);

#endif
