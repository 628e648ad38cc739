/* Replicated queries: K and V stay at home, every rank works out its share of all rows, and the shares are merged towards rank
 * 0 along a tree and spread again along the same tree, so that all ranks end with the same bits. The schedule gives the tree
 * its shape:
 *
 *     merge   binomial: 0 <- 1, 2 <- 3, then 0 <- 2, ...     log p steps
 *     ring    chain:    0 <- 1 <- 2 <- ... <- p-1            each rank talks to its neighbours only
 *     gather  star:     0 <- 1, 0 <- 2, ...                  one step, all of it at rank 0
 *
 * Ranks that differ in their configuration learn it from the first message, which says what call it belongs to, so a call
 * costs no exchange beyond the merge itself. */
#include "core/status.h"
#include "ring/accumulator.h"
#include "ring/pass.h"

typedef struct tree {
    ra_schedule shape;
    int rank, ranks;
} tree;

/* The i-th child, in the order of merging, or -1. */
static int child_of(const tree *t, int i) {
    int child = t->ranks;
    if (t->shape == RA_SCHEDULE_RING && i == 0) child = t->rank + 1;
    if (t->shape == RA_SCHEDULE_GATHER && t->rank == 0) child = i + 1;
    if (t->shape == RA_SCHEDULE_MERGE && i < 30 && t->rank % (2 << i) == 0) child = t->rank + (1 << i);
    return child < t->ranks ? child : -1;
}

static int parent_of(const tree *t) {
    if (t->shape == RA_SCHEDULE_RING) return t->rank - 1;
    if (t->shape == RA_SCHEDULE_GATHER) return 0;
    return t->rank & (t->rank - 1); /* without the lowest bit */
}

int64_t ra_merge_bytes(ra_schedule schedule, int rank, int ranks, int64_t state_bytes) {
    tree t = {schedule, rank, ranks};
    int children = 0;
    while (child_of(&t, children) >= 0) children++;
    return ra_sat_mul(children + (rank > 0), state_bytes);
}

static ra_status send(ra_call *call, int peer, char *message, int64_t payload) {
    RA_TRY(ra_call_send(call, peer, message, payload));
    return ra_call_wait(call);
}

static ra_status receive(ra_call *call, int peer, char *message, int64_t payload) {
    RA_TRY(ra_call_recv(call, peer, message, payload));
    return ra_call_wait(call);
}

/* Both messages are `bytes` behind their headers; `add` merges mine += theirs. */
static ra_status merge_and_spread(ra_call *call, char *mine, char *theirs, int64_t bytes,
                                  void (*add)(ra_call *, char *, const char *)) {
    ra_plan *plan = call->plan;
    tree t = {plan->schedule, plan->view.rank, plan->view.ranks};
    int child, children = 0;
    for (; (child = child_of(&t, children)) >= 0; children++) {
        RA_TRY(receive(call, child, theirs, bytes));
        add(call, mine + RA_LINK_HEADER, theirs + RA_LINK_HEADER);
    }
    if (t.rank > 0) {
        int parent = parent_of(&t);
        RA_TRY(send(call, parent, mine, bytes));
        RA_TRY(receive(call, parent, mine, bytes));
    }
    while (children-- > 0) RA_TRY(send(call, child_of(&t, children), mine, bytes)); /* the largest subtree first */
    return RA_OK;
}

static void add_state(ra_call *call, char *mine, const char *theirs) {
    ra_state_merge(&call->plan->config, call->plan->view.rows_q, call->plan->comm->workers, mine, theirs);
}

static int64_t numbers(const ra_plan *plan) { return plan->config.batch * plan->view.rows_q * plan->config.heads; }

ra_status ra_merge_forward(ra_forward_pass *pass) {
    const ra_plan *plan = pass->call.plan;
    RA_TRY(ra_forward_compute(pass));
    int64_t bytes = numbers(plan) * (plan->config.head_dim + 2) * (plan->config.dtype == RA_F64 ? 8 : 4);
    return merge_and_spread(&pass->call, pass->state[0], pass->state[1], bytes, add_state);
}

static void add_dq(ra_call *call, char *mine, const char *theirs) {
    const ra_plan *plan = call->plan;
    ra_sums_merge(&plan->config, numbers(plan) * plan->config.head_dim, plan->comm->workers, mine, theirs);
}

ra_status ra_merge_backward(ra_backward_pass *pass) {
    const ra_plan *plan = pass->call.plan;
    RA_TRY(ra_backward_compute(pass));
    int64_t bytes = numbers(plan) * plan->config.head_dim * pass->state_size;
    return merge_and_spread(&pass->call, pass->state[0], pass->state[1], bytes, add_dq);
}
