/* Ranks that agreed on their plans, and then use different ones, or stop calling: told who does what, never a wrong result and
 * never a wait for ever. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support.h"
#include "support_patience.h"

enum { RANKS = 3, ROWS = 8, DIM = 4, SIZE = RANKS * ROWS * DIM };

/* What one rank does after all have made the plans a (dense) and b (which differs from it in one field). */
typedef enum deed { FORWARD_A, FORWARD_B, BACKWARD_A, A_THEN_B, B_THEN_A, NOTHING } deed;

typedef struct trial {
    test_ring ring;
    void (*change)(ra_attention_desc *desc); /* makes b of a */
    deed deeds[RANKS];
    double call_timeout;
    ra_status status[RANKS];
    char error[RANKS][512];
} trial;

static void describe(ra_attention_desc *desc) {
    ra_attention_desc_init(desc);
    desc->seq_q = desc->seq_k = RANKS * ROWS;
    desc->heads = 1;
    desc->head_dim = DIM;
    desc->threads = 1;
    desc->schedule = RA_SCHEDULE_RING;
}

static void note(trial *t, int rank, ra_status status) {
    if (t->status[rank] != RA_OK || status == RA_OK) return;
    t->status[rank] = status;
    snprintf(t->error[rank], sizeof t->error[rank], "%s", ra_last_error());
}

static ra_status forward(ra_plan *plan, float *memory) {
    ra_tensor in = ra_tensor_bnhd(memory, ROWS, 1, DIM), out = ra_tensor_bnhd(memory + SIZE, ROWS, 1, DIM);
    return ra_forward(plan, &(ra_forward_args){.q = in, .k = in, .v = in, .out = out});
}

static ra_status backward(ra_plan *plan, float *memory) {
    ra_tensor in = ra_tensor_bnhd(memory, ROWS, 1, DIM), lse = ra_tensor_lse(memory + SIZE, ROWS, 1), grads[3];
    for (int i = 0; i < 3; i++) grads[i] = ra_tensor_bnhd(memory + (2 + i) * SIZE, ROWS, 1, DIM);
    return ra_backward(plan, &(ra_backward_args){.q = in,
                                                 .k = in,
                                                 .v = in,
                                                 .out = in,
                                                 .lse = lse,
                                                 .dout = in,
                                                 .dq = grads[0],
                                                 .dk = grads[1],
                                                 .dv = grads[2]});
}

static void work(void *arg, int rank) {
    trial *t = arg;
    ra_comm *comm = t->ring.comms[rank];
    ra_attention_desc a, b;
    ra_plan *plans[2] = {NULL, NULL};
    float *memory = calloc(5 * SIZE, sizeof *memory);
    describe(&a);
    describe(&b);
    if (t->change) t->change(&b);
    note(t, rank, ra_comm_set_timeout(comm, test_patience(), 60));
    note(t, rank, ra_comm_set_call_timeout(comm, t->call_timeout));
    note(t, rank, ra_plan_create(comm, &a, &plans[0]));
    note(t, rank, ra_plan_create(comm, &b, &plans[1]));
    deed chosen = t->deeds[rank];
    bool first_b = chosen == FORWARD_B || chosen == B_THEN_A;
    if (t->status[rank] == RA_OK && chosen == BACKWARD_A) note(t, rank, backward(plans[0], memory));
    else if (t->status[rank] == RA_OK && chosen != NOTHING) note(t, rank, forward(plans[first_b], memory));
    if (t->status[rank] == RA_OK && (chosen == A_THEN_B || chosen == B_THEN_A)) note(t, rank, forward(plans[!first_b], memory));
    /* Who needs nothing of the others is through before they know; but the next call tells. */
    for (int i = 0; i < 2000 && t->status[rank] == RA_OK; i++) {
        usleep(5000);
        note(t, rank, ra_comm_set_timeout(comm, test_patience(), 60));
    }
    ra_plan_destroy(plans[0]);
    ra_plan_destroy(plans[1]);
    free(memory);
}

static void run(trial *t) {
    test_case watched;
    test_case_init(&watched);
    test_ring_open(&t->ring, RANKS, TEST_THREADS);
    test_watch(&watched);
    test_ring_each(&t->ring, work, t);
    test_unwatch();
    test_ring_close(&t->ring);
}

static void all_say(const trial *t, ra_status status, const char *what) {
    for (int rank = 0; rank < RANKS; rank++) {
        if (t->status[rank] != status || !strstr(t->error[rank], what))
            fail_msg("rank %d of %d says %s, '%s', not '%s'", rank, RANKS, ra_status_name(t->status[rank]), t->error[rank],
                     what);
    }
}

#define CHANGE(name, statement)                                                                                                \
    static void change_##name(ra_attention_desc *desc) { statement; }

CHANGE(scale, desc->scale = 0.25)
CHANGE(causal, desc->causal = true)
CHANGE(bucket, desc->bucket = 3)
CHANGE(window, desc->window_left = 2)
CHANGE(schedule, desc->schedule = RA_SCHEDULE_GATHER)
CHANGE(segment, static const int64_t segments[] = {ROWS}; static const int64_t rates[] = {1}; desc->segment_lengths = segments;
       desc->dilation_rates = rates; desc->branches = 1)
CHANGE(shape, desc->seq_q = desc->seq_k = ROWS)

static void ranks_that_forward_different_plans_are_told_field_and_both_values(void **state) {
    (void)state;
    static const struct {
        const char *field;
        void (*change)(ra_attention_desc *desc);
    } changes[] = {{"scale 0x1p-1 ", change_scale},    {"window_right -1 ", change_causal},
                   {"bucket 0 ", change_bucket},       {"window_left -1 ", change_window},
                   {"schedule 1 ", change_schedule},   {"segment_lengths ", change_segment},
                   {"seq_q 24 ", change_shape}};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        for (int odd = 0; odd < RANKS; odd++) {
            trial t = {.change = changes[i].change};
            t.deeds[odd] = FORWARD_B;
            run(&t);
            all_say(&t, RA_DISAGREE, "ranks disagree on call 1: it is forward with ");
            all_say(&t, RA_DISAGREE, changes[i].field);
            char rank[32];
            snprintf(rank, sizeof rank, "on rank %d", odd);
            all_say(&t, RA_DISAGREE, rank);
        }
}

static void a_forward_and_a_backward_pass_are_told(void **state) {
    (void)state;
    for (int odd = 0; odd < RANKS; odd++) {
        trial t = {.deeds = {FORWARD_A, FORWARD_A, FORWARD_A}};
        t.deeds[odd] = BACKWARD_A;
        run(&t);
        all_say(&t, RA_DISAGREE, "forward");
        all_say(&t, RA_DISAGREE, "backward");
    }
}

static void two_plans_used_in_another_order_are_told(void **state) {
    (void)state;
    for (int odd = 0; odd < RANKS; odd++) {
        trial t = {.change = change_scale, .deeds = {A_THEN_B, A_THEN_B, A_THEN_B}};
        t.deeds[odd] = B_THEN_A;
        run(&t);
        all_say(&t, RA_DISAGREE, "ranks disagree on call ");
    }
}

static void a_rank_that_never_calls_is_told_after_the_call_timeout_with_what_each_rank_was_in(void **state) {
    (void)state;
    for (int odd = 0; odd < RANKS; odd++) {
        trial t = {.deeds = {FORWARD_A, FORWARD_A, FORWARD_A}, .call_timeout = 0.3 * test_patience()};
        t.deeds[odd] = NOTHING;
        run(&t);
        char what[64];
        snprintf(what, sizeof what, "call timeout of %.3g s: rank %d has made no call yet; ", t.call_timeout, odd);
        all_say(&t, RA_TIMEOUT, what);
        for (int rank = 0; rank < RANKS; rank++) {
            snprintf(what, sizeof what, "; rank %d is in forward (call 1, step ", rank);
            if (rank != odd) all_say(&t, RA_TIMEOUT, what);
        }
    }
}

static void a_call_timeout_must_be_a_number_of_seconds_or_none(void **state) {
    (void)state;
    ra_comm *comm = NULL;
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    assert_int_equal(ra_comm_set_call_timeout(NULL, 1), RA_INVALID);
    assert_int_equal(ra_comm_set_call_timeout(comm, -1), RA_INVALID);
    assert_int_equal(ra_comm_set_call_timeout(comm, 1.0 / 0.0), RA_INVALID);
    assert_non_null(strstr(ra_last_error(), "call_timeout"));
    assert_int_equal(ra_comm_set_call_timeout(comm, 0), RA_OK);
    assert_int_equal(ra_comm_set_call_timeout(comm, 0.5), RA_OK);
    ra_comm_destroy(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_forward_different_plans_are_told_field_and_both_values),
        cmocka_unit_test(a_forward_and_a_backward_pass_are_told),
        cmocka_unit_test(two_plans_used_in_another_order_are_told),
        cmocka_unit_test(a_rank_that_never_calls_is_told_after_the_call_timeout_with_what_each_rank_was_in),
        cmocka_unit_test(a_call_timeout_must_be_a_number_of_seconds_or_none),
    };
    return test_run_patiently("attack_calls", tests, sizeof tests / sizeof *tests, 0.3);
}
