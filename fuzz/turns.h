/* Ranks that take turns on one thread: each has a stack of its own and runs until it would have to wait. A run costs no
 * thread and comes out the same every time, and ranks that wait for each other for ever are seen at once.
 *
 * The transport is that of threads underneath; only waiting is different: it lets the next rank run. */
#ifndef FUZZ_TURNS_H
#define FUZZ_TURNS_H

#include <sanitizer/common_interface_defs.h>
#include <stdlib.h>
#include <ucontext.h>

#include "group.h"
#include "transport/link.h"

#define TURNS_RANKS 4
#define TURNS_STACK (1 << 18)
#define TURNS_FRUITLESS 10000 /* waits in a row that bring nothing: everybody waits for somebody */

typedef struct turn {
    ucontext_t context;
    void *saved; /* the sanitizer's notes about the stack */
    rank_job job;
    rank_function body;
    ra_status status;
    bool over;
    void *inner; /* of the transport of threads */
    char stack[TURNS_STACK];
} turn;

static turn turns[TURNS_RANKS];
static ra_comm_ops turns_inner;
static int turns_fruitless;

/* The stack that deals the turns. */
static ucontext_t dealer;
static const void *dealer_stack;
static size_t dealer_stack_size;

static void turns_yield(turn *t) {
    __sanitizer_start_switch_fiber(t->over ? NULL : &t->saved, dealer_stack, dealer_stack_size);
    swapcontext(&t->context, &dealer);
    __sanitizer_finish_switch_fiber(t->saved, NULL, NULL);
}

static void turns_give(turn *t) {
    void *saved = NULL;
    __sanitizer_start_switch_fiber(&saved, t->stack, sizeof t->stack);
    swapcontext(&dealer, &t->context);
    __sanitizer_finish_switch_fiber(saved, NULL, NULL);
}

static void turns_main(int rank) {
    turn *t = &turns[rank];
    __sanitizer_finish_switch_fiber(NULL, &dealer_stack, &dealer_stack_size);
    t->status = t->body(&t->job);
    if (t->status != RA_OK) ra_comm_abort(t->job.comm, t->status, ra_last_error());
    t->over = true;
    turns_yield(t);
}

/* ----------------------------------------------------------------------------------------------------------- transport */

static ra_status turns_recv(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request) {
    return turns_inner.post_recv(((turn *)ctx)->inner, peer, tag, buf, bytes, request);
}

static ra_status turns_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request) {
    return turns_inner.post_send(((turn *)ctx)->inner, peer, tag, buf, bytes, request);
}

static ra_status turns_wait(void *ctx, void *request, double seconds, int *done, size_t *received) {
    turn *t = ctx;
    for (;;) {
        ra_status status = turns_inner.wait(t->inner, request, 0, done, received);
        if (status != RA_OK || *done) turns_fruitless = 0;
        if (status != RA_OK || *done || seconds <= 0) return status;
        if (++turns_fruitless > TURNS_FRUITLESS) abort();
        turns_yield(t);
    }
}

static ra_status turns_cancel(void *ctx, void *request) { return turns_inner.cancel(((turn *)ctx)->inner, request); }
static void turns_abort(void *ctx, ra_status status) { turns_inner.abort(((turn *)ctx)->inner, status); }
static void turns_destroy(void *ctx) { turns_inner.destroy(((turn *)ctx)->inner); }

/* --------------------------------------------------------------------------------------------------------------- group */

static ra_status turns_run(group *g, rank_function body, void *arg) {
    int left = g->ranks;
    turns_fruitless = 0;
    for (int i = 0; i < g->ranks; i++) {
        turn *t = &turns[i];
        t->over = false;
        t->saved = NULL;
        t->body = body;
        t->job = (rank_job){g, i, g->ranks, g->comms[i], arg};
        getcontext(&t->context);
        t->context.uc_stack.ss_sp = t->stack;
        t->context.uc_stack.ss_size = sizeof t->stack;
        t->context.uc_link = NULL;
        makecontext(&t->context, (void (*)(void))turns_main, 1, i);
    }
    for (int i = 0; left > 0; i = (i + 1) % g->ranks) {
        if (turns[i].over) continue;
        turns_give(&turns[i]);
        left -= turns[i].over;
    }
    for (int i = 0; i < g->ranks; i++)
        if (turns[i].status != RA_OK) return turns[i].status;
    return RA_OK;
}

static void turns_close(group *g) {
    for (int i = 0; i < g->ranks; i++) ra_comm_destroy(g->comms[i]);
}

/* comms: room for the communicators of `ranks` ranks, at most TURNS_RANKS. */
static ra_status turns_open(int ranks, ra_comm **comms, group *g) {
    static const ra_comm_ops ops = {.struct_size = sizeof ops,
                                    .flags = RA_COMM_CALLER_THREAD,
                                    .post_recv = turns_recv,
                                    .post_send = turns_send,
                                    .wait = turns_wait,
                                    .cancel = turns_cancel,
                                    .abort = turns_abort,
                                    .destroy = turns_destroy};
    void *inner[TURNS_RANKS];
    *g = (group){.ranks = ranks, .local = ranks, .comms = comms, .run = turns_run};
    if (ra_transport_threads(ranks, &turns_inner, inner) != RA_OK) abort();
    ra_status status = RA_OK;
    for (int i = 0; i < ranks && status == RA_OK; i++) {
        turns[i].inner = inner[i];
        status = ra_comm_custom(&ops, &turns[i], i, ranks, &comms[i]);
    }
    return status;
}

#endif
