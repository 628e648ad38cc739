/* Ranks that are all alive and wait for each other for ever, because the program is wrong: told, with who waits for whom. And
 * ranks that only look like it: not told. */
#include "transport_mistakes.h"

#include <unistd.h>

static double timeout;

typedef struct trial {
    group_kind kind;
    mistake what;
    int ranks;
    group g;
    ra_comm *comms[MOST_RANKS];
    rank_run runs[MOST_RANKS];
} trial;

static void mistake_body(rank_run *run) {
    const trial *t = run->arg;
    note_failure(run, make_mistake(t->comms[run->rank], t->what, timeout));
}

static void trial_start(trial *t, double seconds, void (*body)(rank_run *run)) {
    group_open(&t->g, t->kind, t->ranks, seconds);
    for (int rank = 0; rank < t->ranks; rank++) assert_int_equal(ra_comm_from_link(t->g.links[rank], &t->comms[rank]), RA_OK);
    for (int rank = 0; rank < t->ranks; rank++) assert_int_equal(ra_comm_set_timeout(t->comms[rank], seconds, 30), RA_OK);
    start_ranks(&t->g, t->runs, body, t);
}

static void trial_close(trial *t) {
    for (int rank = 0; rank < t->g.ranks; rank++) ra_comm_destroy(t->comms[rank]);
}

static void trial_judge(const trial *t) {
    for (int rank = 0; rank < t->ranks; rank++) {
        const rank_run *run = &t->runs[rank];
        bool harmless = t->kind == OVER_SOCKETS && t->what == ALL_SEND; /* sockets keep what nobody has asked for yet */
        bool told = harmless ? run->status == RA_OK : mistake_told(t->what, t->ranks, run->status, run->sentence);
        if (!told || strcmp(run->sentence, t->runs[0].sentence) != 0) {
            fail_msg("%s, %d ranks, %s: rank %d returned %s after %.2f s: %s", group_names[t->kind], t->ranks,
                     mistake_names[t->what], rank, ra_status_name(run->status), run->seconds, run->sentence);
        }
    }
}

static void ranks_that_wait_for_each_other_are_told_who_waits_for_whom(void **state) {
    (void)state;
    enum { MOST = 64, AT_ONCE = 16 };
    static trial trials[MOST];
    int count = 0, told = 0;
    for (int kind = 0; kind < GROUP_KINDS; kind++)
        for (int what = 0; what < MISTAKES; what++)
            for (int ranks = what == TWO_WAIT ? 3 : 2; ranks <= 5; ranks++)
                trials[count++] = (trial){.kind = (group_kind)kind, .what = (mistake)what, .ranks = ranks};
    for (int begin = 0; begin < count; begin += AT_ONCE) { /* mostly asleep */
        int end = begin + AT_ONCE < count ? begin + AT_ONCE : count;
        for (int i = begin; i < end; i++) trial_start(&trials[i], timeout, mistake_body);
        for (int i = begin; i < end; i++) join_ranks(&trials[i].g, trials[i].runs);
        for (int i = begin; i < end; i++) trial_judge(&trials[i]);
        for (int i = begin; i < end; i++) told += trials[i].runs[0].status != RA_OK;
        for (int i = begin; i < end; i++) trial_close(&trials[i]);
    }
    print_message("%d deadlocks, all told\n", told);
}

static void the_sentence_shows_the_circle_in_order(void **state) {
    (void)state;
    trial t = {.what = ALL_RECEIVE, .ranks = 3};
    trial_start(&t, timeout, mistake_body);
    join_ranks(&t.g, t.runs);
    assert_non_null(strstr(t.runs[2].sentence, " s: rank 0 for rank 1 (forward, step 3), rank 1 for rank 2 (forward, step 3), "
                                               "rank 2 for rank 0 (forward, step 3)"));
    trial_close(&t);
}

/* Everybody sleeps now before posting and now before waiting, for up to three of its timeouts: the waits form chains that come
 * close to circles, and old statements meet new waits. */
static void hesitating_body(rank_run *run) {
    unsigned seed = 77u + (unsigned)run->rank;
    ra_status status = RA_OK;
    for (int step = 0; step < 12 && status == RA_OK; step++) {
        int from = (run->rank + 1) % run->g->ranks, to = (run->rank + run->g->ranks - 1) % run->g->ranks;
        char in[RA_LINK_HEADER + 2000], out[RA_LINK_HEADER + 2000] = {0};
        ra_transfer transfers[2] = {{0}};
        for (int half = 0; half < 2 && status == RA_OK; half++) {
            bool receiving = half == (step + run->rank) % 2; /* half of the ranks post their sends first, and late */
            seed = seed * 1103515245u + 12345u;
            if (seed >> 16 & 1) sleep_for(1.2 * timeout * (double)(seed >> 17 & 1023) / 1023);
            status = receiving ? ra_link_recv(run->link, from, 9, step, in, 2000, &transfers[0])
                               : ra_link_send(run->link, to, 9, step, out, 2000, &transfers[1]);
        }
        if (status == RA_OK) status = ra_link_wait(run->link, transfers, 2, "forward");
        if (status != RA_OK && !ra_link_cancel(run->link, transfers, 2)) sleep_for(1e9); /* their buffers may not go */
    }
    note_failure(run, status);
}

static void ranks_that_wait_for_a_rank_that_hesitates_for_three_timeouts_raise_no_alarm(void **state) {
    (void)state;
    trial trials[GROUP_KINDS] = {{.kind = OVER_THREADS}, {.kind = OVER_SOCKETS}, {.kind = OVER_CALLER_THREAD}};
    for (int i = 0; i < GROUP_KINDS; i++) {
        trials[i].ranks = 4;
        trial_start(&trials[i], 0.4 * timeout, hesitating_body);
    }
    for (int i = 0; i < GROUP_KINDS; i++) join_ranks(&trials[i].g, trials[i].runs);
    for (int i = 0; i < GROUP_KINDS; i++) {
        for (int rank = 0; rank < 4; rank++)
            if (trials[i].runs[rank].status != RA_OK) fail_msg("%s: %s", group_names[i], trials[i].runs[rank].sentence);
        trial_close(&trials[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_wait_for_each_other_are_told_who_waits_for_whom),
        cmocka_unit_test(the_sentence_shows_the_circle_in_order),
        cmocka_unit_test(ranks_that_wait_for_a_rank_that_hesitates_for_three_timeouts_raise_no_alarm),
    };
    alarm(600); /* a deadlock that is not told would last for ever */
    timeout = 0.5 * test_patience();
    return test_run_patiently("transport_deadlock", tests, sizeof tests / sizeof *tests, 0.2);
}
