/* Every way a transport or a rank can fail, over threads and over sockets, with ranks that are threads: survivors return in
 * time, all with the same status and the same sentence, and the sentence names the right rank. A rank's thread is stopped by
 * the fault transport. (Real processes that are killed and stopped: transport_processes.c.) */
#include "transport_group.h"

#include "transport/link_internal.h"

static double timeout;

static bool names_rank(const char *sentence, int rank) {
    char name[16];
    int length = snprintf(name, sizeof name, "rank %d", rank);
    const char *at = strstr(sentence, name);
    while (at && at[length] >= '0' && at[length] <= '9') at = strstr(at + 1, name);
    return at != NULL;
}

/* A ring in which one rank suffers a fault; what everybody returned. */
typedef struct trial {
    group_kind kind;
    int ranks, victim;
    ra_fault fault;
    ring_job job;
    bool checksum;
    group g;
    rank_run runs[MOST_RANKS];
} trial;

static void trial_start(trial *t) {
    group_open(&t->g, t->kind, t->ranks, timeout);
    for (int rank = 0; rank < t->ranks; rank++) ra_link_set_checksum(t->g.links[rank], t->checksum);
    ra_fault_set(t->g.faults[t->victim], &t->fault);
    start_ranks(&t->g, t->runs, ring_body, &t->job);
}

static void trial_join(trial *t) { join_ranks(&t->g, t->runs); }

/* All ranks but `except` failed with the same sentence. */
static void assert_same_verdict(const trial *t, int except) {
    const rank_run *first = &t->runs[except == 0 ? 1 : 0];
    for (int rank = 0; rank < t->ranks; rank++) {
        if (rank == except) continue;
        if (t->runs[rank].status != first->status || strcmp(t->runs[rank].sentence, first->sentence) != 0) {
            fail_msg("rank %d says \"%s\", rank %d says \"%s\"", first->rank, first->sentence, rank, t->runs[rank].sentence);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- dead and
 * slow */

static void a_rank_that_stops_at_any_step_is_named_by_all_survivors_within_the_timeout_and_a_second(void **state) {
    enum { MOST = 64 };
    static trial trials[MOST];
    int count = 0, differing = 0, survivors = 0;
    group_kind kind = *(const group_kind *)*state;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int victim = 0; victim < ranks; victim++)
            for (int step = 0; step < 4; step++)
                trials[count++] = (trial){.kind = kind,
                                          .ranks = ranks,
                                          .victim = victim,
                                          .fault = {.kind = RA_FAULT_STOP, .sends = true, .nth = step},
                                          .job = {.steps = 9, .payload = 3000, .slow = -1, .compute = 0.01}};
    for (int begin = 0; begin < count; begin += 18) { /* mostly asleep, so many at a time */
        int end = begin + 18 < count ? begin + 18 : count;
        for (int i = begin; i < end; i++) trial_start(&trials[i]);
        for (int i = begin; i < end; i++) trial_join(&trials[i]);
        for (int i = begin; i < end; i++) {
            trial *t = &trials[i];
            const rank_run *first = &t->runs[t->victim == 0 ? 1 : 0];
            const double struck = ra_fault_read(t->g.faults[t->victim]).struck;
            for (int rank = 0; rank < t->ranks; rank++) {
                if (rank == t->victim) continue;
                const rank_run *run = &t->runs[rank];
                survivors++;
                differing += strcmp(run->sentence, first->sentence) != 0;
                if (run->status != RA_TIMEOUT || !names_rank(run->sentence, t->victim) ||
                    !strstr(run->sentence, "forward, step ") || run->ended - struck > timeout + 1) {
                    fail_msg("%d ranks, rank %d stopped at step %lld: rank %d returned %s after %.2f s: %s", t->ranks,
                             t->victim, (long long)t->fault.nth, rank, ra_status_name(run->status),
                             run->ended - struck, run->sentence);
                }
            }
            group_close(&t->g);
        }
    }
    print_message("%d stops, all named; %d survivors of %d with a sentence of their own\n", count, differing, survivors);
}

static void wait_for_all(rank_run *run) {
    int all[MOST_RANKS];
    if (run->link) note_failure(run, ra_link_allgather(run->link, &run->rank, all, sizeof run->rank, "plan"));
}

/* Rank 1 of three falls silent for `seconds` while no message is in flight. */
static void fall_silent(group *g, bool in_a_call, double seconds) {
    const ra_fault silence = {.kind = RA_FAULT_STOP, .sends = true, .receives = true, .control = true};
    run_ranks(g, wait_for_all, NULL);
    for (int rank = 0; rank < 3 && in_a_call; rank++) ra_link_begin(g->links[rank], "forward", &(ra_subject){.text = ""});
    ra_fault_set(g->faults[1], &silence);
    for (double until = seconds_now() + seconds; seconds_now() < until; sleep_for(0.01)) {
        bool whole = false;
        for (int rank = 0; rank < 3; rank += 2) whole |= ra_link_poll(g->links[rank]);
        if (!whole) return;
    }
}

static void a_rank_that_falls_silent_in_a_call_is_named_by_those_that_only_compute(void **state) {
    group g;
    group_open(&g, *(const group_kind *)*state, 3, timeout);
    fall_silent(&g, true, timeout + 1);
    for (int rank = 0; rank < 3; rank += 2) {
        assert_int_equal(ra_link_status(g.links[rank]), RA_TIMEOUT);
        assert_non_null(strstr(ra_last_error(), "rank 1 has been silent for"));
        assert_non_null(strstr(ra_last_error(), "(forward, step 0; noticed by rank"));
    }
    group_close(&g);
}

/* It may be busy, or at its program's end; and one that beats only from inside calls may be so during a call of others. */
static void a_silent_rank_harms_nobody_who_needs_nothing_of_it(void **state) {
    (void)state;
    for (int kind = 0; kind < GROUP_KINDS; kind++) {
        group g;
        group_open(&g, (group_kind)kind, 3, timeout);
        fall_silent(&g, kind == OVER_CALLER_THREAD, 2 * timeout + RA_LINK_GRACE);
        for (int rank = 0; rank < 3; rank++) assert_int_equal(ra_link_status(g.links[rank]), RA_OK);
        group_close(&g);
    }
}

static void a_rank_that_is_through_with_a_call_and_leaves_harms_nobody(void **state) {
    group g;
    group_open(&g, *(const group_kind *)*state, 3, timeout);
    run_ranks(&g, wait_for_all, NULL);
    for (int rank = 0; rank < 3; rank++) ra_link_begin(g.links[rank], "forward", &(ra_subject){.text = ""});
    ra_link_end(g.links[1]);
    ra_link_destroy(g.links[1]);
    g.links[1] = NULL;
    sleep_for(2 * timeout + RA_LINK_GRACE);
    for (int rank = 0; rank < 3; rank += 2) {
        ra_link_poll(g.links[rank]);
        if (ra_link_status(g.links[rank]) != RA_OK) fail_msg("rank %d: %s", rank, ra_last_error());
    }
    group_close(&g);
}

static void run_all(rank_run *run) {
    note_failure(run, pass_around(run->link, run->arg));
    EXPECT(run, run->status == RA_OK);
}

static void a_rank_that_computes_one_step_for_ten_times_the_timeout_raises_no_alarm(void **state) {
    group g;
    ring_job job = {.steps = 3, .payload = 100, .slow = 1, .slow_seconds = 10 * timeout / 2};
    group_open(&g, *(const group_kind *)*state, 3, timeout / 2);
    run_ranks(&g, run_all, &job);
    group_close(&g);
}

/* Without a heart of its own a rank is granted the start timeout. */
static void a_rank_that_may_not_have_a_thread_is_granted_the_start_timeout(void **state) {
    (void)state;
    group g;
    ring_job job = {.steps = 3, .payload = 100, .slow = 1, .slow_seconds = 5 * timeout};
    group_open(&g, OVER_CALLER_THREAD, 3, timeout);
    for (int rank = 0; rank < 3; rank++) assert_int_equal(ra_link_set_timeout(g.links[rank], timeout, 30 * timeout), RA_OK);
    run_ranks(&g, run_all, &job);
    group_close(&g);
}

static void a_rank_whose_every_operation_takes_most_of_the_timeout_raises_no_alarm(void **state) {
    static trial trials[6];
    group_kind kind = *(const group_kind *)*state;
    for (int i = 0; i < 6; i++) {
        bool control = i >= 3;
        trials[i] = (trial){.kind = kind,
                            .ranks = 3,
                            .victim = i % 3,
                            .fault = {.kind = RA_FAULT_DELAY,
                                      .sends = true,
                                      .receives = true,
                                      .control = control,
                                      .repeat = INT64_MAX,
                                      .seconds = 0.8 * timeout},
                            .job = {.steps = 4, .payload = 2000, .slow = -1}};
        trial_start(&trials[i]);
    }
    for (int i = 0; i < 6; i++) {
        trial_join(&trials[i]);
        for (int rank = 0; rank < 3; rank++)
            if (trials[i].runs[rank].status != RA_OK) fail_msg("rank %d: %s", rank, trials[i].runs[rank].sentence);
        group_close(&trials[i].g);
    }
}

/* -------------------------------------------------------------------------------------------------------------------
 * arrival */

static void a_rank_that_never_arrives_is_named_after_the_start_timeout(void **state) {
    (void)state;
    ra_comm_ops ops;
    void *ctxs[3];
    group g = {.ranks = 3};
    rank_run runs[MOST_RANKS];
    assert_int_equal(ra_transport_threads(3, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < 3; rank++) {
        if (rank == 1) continue;
        assert_int_equal(ra_link_create(&ops, ctxs[rank], rank, 3, "threads", &g.links[rank]), RA_OK);
        assert_int_equal(ra_link_set_timeout(g.links[rank], timeout / 3, 2 * timeout), RA_OK);
    }
    start_ranks(&g, runs, wait_for_all, NULL);
    join_ranks(&g, runs);
    for (int rank = 0; rank < 3; rank += 2) {
        assert_int_equal(runs[rank].status, RA_TIMEOUT);
        assert_non_null(strstr(runs[rank].sentence, "rank 1 has not arrived"));
        assert_true(runs[rank].seconds > 1.6 * timeout && runs[rank].seconds < 1.9 * test_patience());
    }
    group_close(&g);
    ops.destroy(ctxs[1]);
}

static void a_rank_that_arrives_late_but_within_the_start_timeout_is_waited_for(void **state) {
    (void)state;
    ra_comm_ops ops;
    void *ctxs[3];
    group g = {.ranks = 3};
    rank_run runs[MOST_RANKS];
    assert_int_equal(ra_transport_threads(3, &ops, ctxs), RA_OK);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(ra_link_create(&ops, ctxs[rank], rank, 3, "threads", &g.links[rank]), RA_OK);
        assert_int_equal(ra_link_set_timeout(g.links[rank], timeout / 3, 20), RA_OK);
    }
    start_ranks(&g, runs, wait_for_all, NULL);
    sleep_for(4 * timeout);
    assert_int_equal(ra_link_create(&ops, ctxs[2], 2, 3, "threads", &g.links[2]), RA_OK);
    assert_int_equal(ra_link_set_timeout(g.links[2], timeout / 3, 20), RA_OK);
    rank_run late = {.g = &g, .rank = 2, .link = g.links[2]};
    wait_for_all(&late);
    join_ranks(&g, runs);
    assert_int_equal(late.status, RA_OK);
    for (int rank = 0; rank < 2; rank++) assert_int_equal(runs[rank].status, RA_OK);
    group_close(&g);
}

/* -------------------------------------------------------------------------------------------------------- damaged messages */

static void run_damage(trial *t, ra_status expected, const char *text) {
    trial_start(t);
    trial_join(t);
    int next = (t->victim + 1) % t->ranks;
    assert_same_verdict(t, -1);
    for (int rank = 0; rank < t->ranks; rank++) {
        const rank_run *run = &t->runs[rank];
        if (run->status != expected || !strstr(run->sentence, text) || !names_rank(run->sentence, t->victim) ||
            run->seconds > 2 * test_patience()) {
            fail_msg("rank %d returned %s after %.2f s (receiver %d): %s", rank, ra_status_name(run->status), run->seconds,
                     next, run->sentence);
        }
    }
    assert_int_equal(ra_fault_read(t->g.faults[t->victim]).faults, 1);
    group_close(&t->g);
}

static trial damage(group_kind kind, ra_fault fault) {
    fault.sends = true;
    fault.nth = 2;
    return (trial){.kind = kind,
                   .ranks = 3,
                   .victim = 1,
                   .fault = fault,
                   .checksum = true,
                   .job = {.steps = 5, .payload = 500, .slow = -1}};
}

static void a_message_with_any_header_byte_flipped_breaks_the_ring_with_the_senders_name(void **state) {
    static const uint8_t masks[] = {0x01, 0x80, 0xff};
    for (int byte = 0; byte < RA_LINK_HEADER; byte++) {
        trial t =
            damage(*(const group_kind *)*state, (ra_fault){.kind = RA_FAULT_CORRUPT, .bytes = byte, .mask = masks[byte % 3]});
        run_damage(&t, RA_PROTOCOL, "receiving from rank 1: ");
    }
    print_message("%d header bytes flipped in flight, all caught\n", RA_LINK_HEADER);
}

static void a_damaged_payload_is_caught_by_its_checksum(void **state) {
    for (int64_t byte = 0; byte < 500; byte += 83) {
        trial t = damage(*(const group_kind *)*state,
                         (ra_fault){.kind = RA_FAULT_CORRUPT, .bytes = RA_LINK_HEADER + byte, .mask = 4});
        run_damage(&t, RA_PROTOCOL, "the payload is damaged");
    }
}

static void a_truncated_message_is_caught(void **state) {
    static const int64_t cuts[] = {1, 499, 500, 501, 563, 564};
    for (int i = 0; i < 6; i++) {
        trial t = damage(*(const group_kind *)*state, (ra_fault){.kind = RA_FAULT_TRUNCATE, .bytes = cuts[i]});
        run_damage(&t, RA_PROTOCOL, "bytes; 564 were expected");
    }
}

static void a_message_that_gets_lost_is_found_although_everybody_lives(void **state) {
    trial t = damage(*(const group_kind *)*state, (ra_fault){.kind = RA_FAULT_DROP});
    run_damage(&t, RA_PROTOCOL, "lost on its way");
}

/* The ring's tags differ from step to step, so the repeated message must be asked for again to be seen. */
static void same_tag_body(rank_run *run) {
    char in[RA_LINK_HEADER + 8], out[RA_LINK_HEADER + 8] = {0};
    ra_status status = RA_OK;
    for (int step = 0; step < 5 && status == RA_OK; step++) {
        ra_transfer transfers[2] = {{0}};
        status = ra_link_recv(run->link, 1 - run->rank, 7, step, in, 8, &transfers[0]);
        if (status == RA_OK) status = ra_link_send(run->link, 1 - run->rank, 7, step, out, 8, &transfers[1]);
        if (status == RA_OK) status = ra_link_wait(run->link, transfers, 2, "forward");
        if (status != RA_OK && !ra_link_cancel(run->link, transfers, 2)) EXPECT(run, false);
    }
    note_failure(run, status);
}

static void a_repeated_message_is_caught(void **state) {
    trial t = {.kind = *(const group_kind *)*state,
               .ranks = 2,
               .victim = 1,
               .fault = {.kind = RA_FAULT_DUPLICATE, .sends = true, .nth = 1}};
    group_open(&t.g, t.kind, 2, timeout);
    ra_fault_set(t.g.faults[1], &t.fault);
    start_ranks(&t.g, t.runs, same_tag_body, NULL);
    trial_join(&t);
    assert_same_verdict(&t, -1);
    assert_int_equal(t.runs[0].status, RA_PROTOCOL);
    assert_non_null(strstr(t.runs[0].sentence, "receiving from rank 1: message number 1 came a second time"));
    group_close(&t.g);
}

static void a_message_that_is_too_long_is_caught(void **state) {
    group g;
    group_open(&g, *(const group_kind *)*state, 2, timeout);
    static char in[RA_LINK_HEADER + 4000], out[RA_LINK_HEADER + 4001];
    ra_transfer receive, send;
    assert_int_equal(ra_link_recv(g.links[0], 1, 1, 0, in, 4000, &receive), RA_OK);
    assert_int_equal(ra_link_send(g.links[1], 0, 1, 0, out, 4001, &send), RA_OK);
    assert_int_equal(ra_link_wait(g.links[1], &send, 1, "forward"), RA_OK);
    assert_int_equal(ra_link_wait(g.links[0], &receive, 1, "forward"), RA_PROTOCOL);
    ra_link_cancel(g.links[0], &receive, 1);
    group_close(&g);
}

static void a_damaged_heartbeat_is_caught(void **state) {
    trial t = damage(*(const group_kind *)*state, (ra_fault){.kind = RA_FAULT_CORRUPT, .bytes = RA_LINK_HEADER + 4, .mask = 1});
    t.fault.control = true;
    t.fault.nth = 0;
    t.job.compute = 0.1;
    run_damage(&t, RA_PROTOCOL, "heartbeat of rank 1: the payload is damaged");
}

static void a_lost_heartbeat_harms_nobody_and_neither_does_a_repeated_one(void **state) {
    static trial trials[2];
    for (int i = 0; i < 2; i++) {
        trials[i] = damage(*(const group_kind *)*state, (ra_fault){.kind = i == 0 ? RA_FAULT_DROP : RA_FAULT_DUPLICATE});
        trials[i].fault.control = true;
        trials[i].job.compute = 0.1;
        trial_start(&trials[i]);
    }
    for (int i = 0; i < 2; i++) {
        trial_join(&trials[i]);
        for (int rank = 0; rank < 3; rank++)
            if (trials[i].runs[rank].status != RA_OK) fail_msg("rank %d: %s", rank, trials[i].runs[rank].sentence);
        assert_int_equal(ra_fault_read(trials[i].g.faults[1]).faults, 1);
        group_close(&trials[i].g);
    }
}

/* --------------------------------------------------------------------------------------------- errors that a rank makes
 * itself */

static void a_rank_whose_transport_fails_tells_the_others_and_all_say_the_same(void **state) {
    static const ra_fault_kind kinds[] = {RA_FAULT_FAIL, RA_FAULT_BREAK};
    static const ra_status statuses[] = {RA_NOMEM, RA_DEVICE, RA_INTERNAL};
    int count = 0;
    for (int ranks = 2; ranks <= 4; ranks++) {
        for (int victim = 0; victim < ranks; victim++) {
            for (int nth = 0; nth < 8; nth++, count++) { /* receives and sends of four steps */
                ra_fault fault = {
                    .kind = kinds[count % 2], .sends = true, .receives = true, .nth = nth, .status = statuses[count % 3]};
                trial t = {.kind = *(const group_kind *)*state,
                           .ranks = ranks,
                           .victim = victim,
                           .fault = fault,
                           .job = {.steps = 9, .payload = 3000, .slow = -1}};
                trial_start(&t);
                trial_join(&t);
                assert_same_verdict(&t, -1);
                assert_int_equal(t.runs[0].status, fault.status);
                assert_true(names_rank(t.runs[0].sentence, victim));
                for (int rank = 0; rank < ranks; rank++) assert_true(t.runs[rank].seconds < test_patience());
                group_close(&t.g);
            }
        }
    }
    print_message("%d failing operations, all told\n", count);
}

static void wait_for_nothing(rank_run *run) {
    char buf[RA_LINK_HEADER + 8];
    ra_transfer transfer;
    EXPECT(run, ra_link_recv(run->link, 1 - run->rank, 1, 0, buf, 8, &transfer) == RA_OK); /* never sent */
    note_failure(run, ra_link_wait(run->link, &transfer, 1, "forward"));
    EXPECT(run, ra_link_cancel(run->link, &transfer, 1));
}

static void abort_body(rank_run *run) {
    if (run->rank < 2) {
        wait_for_nothing(run);
        return;
    }
    sleep_for(0.1);
    ra_link_abort(run->link, RA_IO, "the disk is full");
    note_failure(run, ra_link_status(run->link));
}

static void an_abort_ends_the_waiting_of_all_with_its_status_and_reason(void **state) {
    trial t = {.kind = *(const group_kind *)*state, .ranks = 3};
    group_open(&t.g, t.kind, 3, 30);
    start_ranks(&t.g, t.runs, abort_body, NULL);
    trial_join(&t);
    assert_same_verdict(&t, -1);
    for (int rank = 0; rank < 3; rank++) {
        assert_string_equal(t.runs[rank].complaint, "");
        assert_int_equal(t.runs[rank].status, RA_IO);
        assert_string_equal(t.runs[rank].sentence, "rank 2 gave up: the disk is full");
        assert_true(t.runs[rank].seconds < test_patience());
    }
    group_close(&t.g);
}

/* A rank that waits holds its link's lock, but for a moment after each slice of 10 ms: that moment must do. */
static void other_threads_are_let_in_while_a_rank_waits(void **state) {
    enum { CALLS = 50 };
    group g;
    rank_run runs[MOST_RANKS];
    group_open(&g, *(const group_kind *)*state, 2, 30);
    start_ranks(&g, runs, wait_for_nothing, NULL);
    sleep_for(0.05);
    const double begin = seconds_now();
    for (int call = 0; call < CALLS; call++) ra_link_read(g.links[call % 2]);
    const double each = (seconds_now() - begin) / CALLS;
    ra_link_abort(g.links[0], RA_IO, "the disk is full");
    join_ranks(&g, runs);
    for (int rank = 0; rank < 2; rank++) {
        assert_string_equal(runs[rank].complaint, "");
        assert_int_equal(runs[rank].status, RA_IO);
    }
    print_message("a call of another thread took %.1f ms\n", 1e3 * each);
    assert_true(each < 0.015 * test_patience());
    group_close(&g);
}

static void an_error_sticks_to_the_link(void **state) {
    group g;
    char buf[RA_LINK_HEADER + 8] = {0}, all[16];
    ra_transfer transfer;
    group_open(&g, *(const group_kind *)*state, 2, 30);
    ra_link_abort(g.links[0], RA_OK, NULL); /* RA_OK is no reason: it counts as RA_ABORTED */
    for (int round = 0; round < 2; round++) {
        assert_int_equal(ra_link_status(g.links[0]), RA_ABORTED);
        assert_int_equal(ra_link_recv(g.links[0], 1, 1, 0, buf, 8, &transfer), RA_ABORTED);
        assert_null(transfer.request);
        assert_int_equal(ra_link_send(g.links[0], 1, 1, 0, buf, 8, &transfer), RA_ABORTED);
        assert_int_equal(ra_link_wait(g.links[0], NULL, 0, "forward"), RA_ABORTED);
        assert_int_equal(ra_link_allgather(g.links[0], buf, all, 8, "plan"), RA_ABORTED);
        ra_link_poll(g.links[0]);
        assert_string_equal(ra_last_error(), "rank 0 gave up: no reason given");
        ra_link_abort(g.links[0], RA_IO, "a second reason"); /* the first stays */
    }
    double until = seconds_now() + 5 * test_patience();
    while (ra_link_status(g.links[1]) == RA_OK && seconds_now() < until) { /* told although it waits for nothing */
        ra_link_poll(g.links[1]);
        sleep_for(0.01);
    }
    assert_int_equal(ra_link_status(g.links[1]), RA_ABORTED);
    assert_string_equal(ra_last_error(), "rank 0 gave up: no reason given");
    group_close(&g);
}

static void a_rank_that_is_destroyed_in_the_middle_fails_its_peers_instead_of_hanging_them(void **state) {
    group g;
    group_open(&g, *(const group_kind *)*state, 3, 30);
    ra_link_destroy(g.links[1]);
    g.links[1] = NULL;
    for (int rank = 0; rank < 3; rank += 2) {
        char buf[RA_LINK_HEADER + 8];
        ra_transfer transfer = {0};
        double begin = seconds_now();
        ra_status status = ra_link_recv(g.links[rank], 1, 1, 0, buf, 8, &transfer);
        if (status == RA_OK) status = ra_link_wait(g.links[rank], &transfer, 1, "forward");
        assert_int_equal(status, RA_PEER_LOST);
        assert_true(names_rank(ra_last_error(), 1));
        assert_true(seconds_now() - begin < 2 * test_patience());
        ra_link_cancel(g.links[rank], &transfer, 1);
    }
    group_close(&g);
}

static void a_buffer_that_the_transport_will_not_give_back_is_reported_and_counted(void **state) {
    (void)state;
    ra_comm_ops ops;
    void *ctxs[2];
    ra_link *link;
    assert_int_equal(sockets_create(2, &ops, ctxs), RA_OK);
    assert_int_equal(ra_link_create(&ops, ctxs[0], 0, 2, "sockets", &link), RA_OK); /* rank 1 has none: nobody reads */
    int64_t payload = 8 << 20;                                                      /* more than a socket holds */
    char *buf = calloc(1, (size_t)(RA_LINK_HEADER + payload));
    ra_transfer transfer;
    assert_int_equal(ra_link_send(link, 1, 1, 0, buf, payload, &transfer), RA_OK);
    ra_link_abort(link, RA_ABORTED, "enough");
    assert_false(ra_link_cancel(link, &transfer, 1));
    assert_int_equal(ra_link_read(link).kept_buffers, 1);
    ra_link_destroy(link);
    free(buf); /* safe only because its socket is closed by now */
    socket_destroy(ctxs[1]);
}

/* -------------------------------------------------------------------------------------------------------------- post-mortem */

typedef struct records {
    int count[MOST_RANKS], others, level;
    char text[4096]; /* of rank 0 */
} records;

static void keep_record(void *ctx, ra_log_level level, const char *line) { /* one at a time */
    records *r = ctx;
    int rank = -1;
    if (sscanf(line, "post-mortem of rank %d,", &rank) == 1 && rank >= 0 && rank < MOST_RANKS) r->count[rank]++;
    else r->others++;
    r->level = (int)level;
    if (rank == 0) snprintf(r->text, sizeof r->text, "%s", line);
}

static records break_a_ring(group_kind kind, ra_fault_kind fault) {
    records r = {.others = 0};
    trial t = {.kind = kind,
               .ranks = 3,
               .victim = 2,
               .fault = {.kind = fault, .sends = true, .nth = 2, .status = RA_NOMEM},
               .job = {.steps = 9, .payload = 700, .slow = -1, .compute = 0.01}};
    ra_set_logger(keep_record, &r, RA_LOG_INFO);
    trial_start(&t);
    trial_join(&t);
    for (int rank = 0; rank < 3; rank++) ra_link_abort(t.g.links[rank], RA_IO, "once more"); /* says nothing new */
    group_close(&t.g);
    ra_set_logger(NULL, NULL, RA_LOG_NONE);
    return r;
}

static void every_rank_of_a_broken_ring_leaves_one_post_mortem_with_rank_step_phase_and_the_last_messages(void **state) {
    records r = break_a_ring(*(const group_kind *)*state, RA_FAULT_STOP);
    assert_int_equal(r.count[0] + r.count[1], 2);
    assert_int_equal(r.count[0], 1);
    assert_int_equal(r.level, RA_LOG_WARN);
    assert_int_equal(strncmp(r.text, "post-mortem of rank 0, step ", 28), 0);
    static const char *const parts[] = {", forward: RA_TIMEOUT: rank 2 has been silent for ",
                                        "\n    rank 2 was heard ",
                                        "\n    rank 1 was heard ",
                                        "\n    in flight: receive from rank 2, step ",
                                        " (waited for)",
                                        " s ago: posted receive from rank 2, step ",
                                        " s ago: finished send to rank 1, step "};
    for (int i = 0; i < 7; i++)
        if (!strstr(r.text, parts[i])) fail_msg("no \"%s\" in: %s", parts[i], r.text);
}

static void a_rank_that_gives_up_for_a_reason_of_its_own_is_no_warning(void **state) {
    records r = break_a_ring(*(const group_kind *)*state, RA_FAULT_FAIL);
    for (int rank = 0; rank < 3; rank++) assert_int_equal(r.count[rank], 1);
    assert_int_equal(r.level, RA_LOG_INFO);
    assert_int_equal(r.others, 0);
}

/* -------------------------------------------------------------------------------------------------------------------- suite */

static const struct {
    const char *name;
    CMUnitTestFunction test;
} over_both[] = {
#define OVER_BOTH(test)                                                                                                        \
    { #test, test }
    OVER_BOTH(a_rank_that_stops_at_any_step_is_named_by_all_survivors_within_the_timeout_and_a_second),
    OVER_BOTH(a_rank_that_falls_silent_in_a_call_is_named_by_those_that_only_compute),
    OVER_BOTH(a_rank_that_is_through_with_a_call_and_leaves_harms_nobody),
    OVER_BOTH(a_rank_that_computes_one_step_for_ten_times_the_timeout_raises_no_alarm),
    OVER_BOTH(a_rank_whose_every_operation_takes_most_of_the_timeout_raises_no_alarm),
    OVER_BOTH(a_message_with_any_header_byte_flipped_breaks_the_ring_with_the_senders_name),
    OVER_BOTH(a_damaged_payload_is_caught_by_its_checksum),
    OVER_BOTH(a_truncated_message_is_caught),
    OVER_BOTH(a_message_that_gets_lost_is_found_although_everybody_lives),
    OVER_BOTH(a_repeated_message_is_caught),
    OVER_BOTH(a_message_that_is_too_long_is_caught),
    OVER_BOTH(a_damaged_heartbeat_is_caught),
    OVER_BOTH(a_lost_heartbeat_harms_nobody_and_neither_does_a_repeated_one),
    OVER_BOTH(a_rank_whose_transport_fails_tells_the_others_and_all_say_the_same),
    OVER_BOTH(an_abort_ends_the_waiting_of_all_with_its_status_and_reason),
    OVER_BOTH(other_threads_are_let_in_while_a_rank_waits),
    OVER_BOTH(an_error_sticks_to_the_link),
    OVER_BOTH(a_rank_that_is_destroyed_in_the_middle_fails_its_peers_instead_of_hanging_them),
    OVER_BOTH(every_rank_of_a_broken_ring_leaves_one_post_mortem_with_rank_step_phase_and_the_last_messages),
    OVER_BOTH(a_rank_that_gives_up_for_a_reason_of_its_own_is_no_warning),
};

int main(void) {
    enum { BOTH = sizeof over_both / sizeof over_both[0], ALONE = 5 };
    static char names[BOTH * 2][160];
    static group_kind kinds[2] = {OVER_THREADS, OVER_SOCKETS};
    struct CMUnitTest tests[ALONE + BOTH * 2] = {
        cmocka_unit_test(a_rank_that_never_arrives_is_named_after_the_start_timeout),
        cmocka_unit_test(a_rank_that_arrives_late_but_within_the_start_timeout_is_waited_for),
        cmocka_unit_test(a_rank_that_may_not_have_a_thread_is_granted_the_start_timeout),
        cmocka_unit_test(a_silent_rank_harms_nobody_who_needs_nothing_of_it),
        cmocka_unit_test(a_buffer_that_the_transport_will_not_give_back_is_reported_and_counted),
    };
    int count = 0;
    for (int kind = 0; kind < 2; kind++) {
        for (int i = 0; i < BOTH; i++, count++) {
            snprintf(names[count], sizeof names[count], "%s, over %s", over_both[i].name, group_names[kinds[kind]]);
            tests[ALONE + count] =
                (struct CMUnitTest){.name = names[count], .test_func = over_both[i].test, .initial_state = &kinds[kind]};
        }
    }
    timeout = 0.3 * test_patience();
    return test_run_patiently("transport_faults", tests, ALONE + BOTH * 2, 0.3);
}
