/* Programs whose ranks wait for each other, for tests over every transport: what each rank does, and what all must say. */
#ifndef TESTS_TRANSPORT_MISTAKES_H
#define TESTS_TRANSPORT_MISTAKES_H

#include "transport_group.h"

#include "ring/comm.h"

typedef enum mistake {
    ALL_RECEIVE,      /* each waits for a message of the rank above, which nobody sends */
    ALL_SEND,         /* each waits until the rank above has received, and nobody receives */
    TWO_WAIT,         /* ranks 0 and 1 wait for each other, rank 2 computes, the others wait for it */
    PLAN_AND_FORWARD, /* rank 0 makes another plan while the others go forward */
    MISTAKES
} mistake;

static const char *const mistake_names[MISTAKES] = {"all receive", "all send", "two wait for each other", "a plan and a pass"};

static inline ra_status wait_alone(ra_link *link, int peer, bool receiving, int64_t payload) {
    char *buf = calloc(1, (size_t)(RA_LINK_HEADER + payload));
    ra_transfer transfer = {0};
    ra_status status = receiving ? ra_link_recv(link, peer, 5, 3, buf, payload, &transfer)
                                 : ra_link_send(link, peer, 5, 3, buf, payload, &transfer);
    if (status == RA_OK) status = ra_link_wait(link, &transfer, 1, "forward");
    if (!ra_link_cancel(link, &transfer, 1)) keep_for_ever(buf);
    else free(buf);
    return status;
}

static inline ra_status plan_and_forward(ra_comm *comm, int rank) {
    enum { ROWS = 16, DIM = 8 };
    static float zeros[ROWS * DIM];
    float out[ROWS * DIM];
    ra_attention_desc desc;
    ra_plan *plan = NULL, *other = NULL;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = ROWS * ra_comm_size(comm);
    desc.heads = 1;
    desc.head_dim = DIM;
    desc.threads = 1;
    desc.schedule = RA_SCHEDULE_RING;
    ra_status status = ra_plan_create(comm, &desc, &plan);
    ra_tensor none = ra_tensor_bnhd(zeros, ROWS, 1, DIM);
    ra_forward_args args = {.q = none, .k = none, .v = none, .out = ra_tensor_bnhd(out, ROWS, 1, DIM)};
    desc.causal = true;
    if (status == RA_OK) status = rank == 0 ? ra_plan_create(comm, &desc, &other) : ra_forward(plan, &args);
    ra_plan_destroy(other);
    ra_plan_destroy(plan);
    return status == RA_OK ? RA_OK : ra_link_status(comm->link); /* the sentence, whatever came after it */
}

static inline ra_status make_mistake(ra_comm *comm, mistake what, double timeout) {
    int rank = ra_comm_rank(comm), ranks = ra_comm_size(comm);
    switch (what) {
    case ALL_RECEIVE: return wait_alone(comm->link, (rank + 1) % ranks, true, 100);
    case ALL_SEND: return wait_alone(comm->link, (rank + 1) % ranks, false, 1 << 20);
    case TWO_WAIT:
        if (rank == 2) sleep_for(2 * timeout);
        return wait_alone(comm->link, rank < 2 ? 1 - rank : rank == 2 ? 0 : 2, true, 100);
    default: return plan_and_forward(comm, rank);
    }
}

/* Whether this is what a rank must return: how many wait for each other, and rank 0 among them. With a plan and a pass that
 * is the shortest way round, by what was too long to be sent unasked. */
static inline bool mistake_told(mistake what, int ranks, ra_status status, const char *text) {
    const char *after = strstr(text, " ranks have waited for each other for ");
    int count = atoi(text);
    if (status != RA_TIMEOUT || !after || !strstr(text, what == ALL_SEND ? "rank 0 to send to rank " : "rank 0 for rank "))
        return false;
    if (what == PLAN_AND_FORWARD) return count >= 2 && count <= ranks && strstr(text, "(plan, ") && strstr(text, "(forward, ");
    return count == (what == TWO_WAIT ? 2 : ranks);
}

#endif
