/* Replicated queries: K and V stay at home, every rank works out its share of all rows, and the shares are merged towards rank
 * 0 along a tree (plan/tree.h) and spread again along the same tree, so that all ranks end with the same bits.
 *
 * Ranks that differ in their configuration learn it from the first message, which says what call it belongs to, so a call
 * costs no exchange beyond the merge itself. */
#include "core/status.h"
#include "plan/tree.h"
#include "ring/pass.h"

static ra_status send(ra_call *call, int peer, char *frame, int64_t payload) {
    RA_TRY(ra_call_send(call, peer, frame, payload));
    return ra_call_wait(call);
}

static ra_status receive(ra_call *call, int peer, char *frame, int64_t payload) {
    RA_TRY(ra_call_recv(call, peer, frame, payload));
    return ra_call_wait(call);
}

ra_status ra_merge(ra_pass *pass) {
    ra_call *call = &pass->call;
    const ra_plan *plan = call->plan;
    const ra_tree tree = {plan->schedule, plan->view.rank, plan->view.ranks};
    const int64_t bytes = call->device->travelling_bytes(&plan->problem, pass->backward != NULL);
    char *mine = pass->travelling[0], *theirs = pass->travelling[1];
    int child, children = 0;
    RA_TRY(ra_pass_compute(pass, false));
    for (; (child = ra_tree_child(&tree, children)) >= 0; children++) {
        RA_TRY(receive(call, child, theirs, bytes));
        RA_TRY((pass->forward ? call->device->merge_states : call->device->merge_sums)(
            &call->queue, &plan->problem, ra_frame_payload(mine), ra_frame_payload(theirs)));
    }
    if (tree.rank > 0) {
        int parent = ra_tree_parent(&tree);
        RA_TRY(send(call, parent, mine, bytes));
        RA_TRY(receive(call, parent, mine, bytes));
    }
    while (children-- > 0) RA_TRY(send(call, ra_tree_child(&tree, children), mine, bytes)); /* the largest subtree first */
    return RA_OK;
}
