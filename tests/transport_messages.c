/* Messages over every transport that needs no launcher: what is sent arrives, once, whole, where it belongs. */
#include "transport_group.h"

#include "transport/crc32c.h"
#include "transport/link_internal.h"

/* ------------------------------------------------------------------------------------------------------------- the frame */

static const ra_header sample = {.flags = RA_HEADER_PAYLOAD_CRC,
                                 .sequence = 0x0102030405060708,
                                 .step = -3,
                                 .tag = 0x1112131415161718,
                                 .length = 5,
                                 .source = 3,
                                 .destination = 7};

static void write_sample(char *buf, ra_header header) {
    memcpy(buf + RA_LINK_HEADER, "hello", 5);
    header.payload_crc = ra_payload_crc(buf, 5);
    ra_header_write(&header, buf);
}

static void a_header_is_read_as_it_was_written(void **state) {
    (void)state;
    char buf[RA_LINK_HEADER + 5];
    ra_header header;
    write_sample(buf, sample);
    assert_int_equal(ra_header_check(buf, sizeof buf, &sample, &header), RA_OK);
    assert_true(header.sequence == sample.sequence && header.step == sample.step && header.tag == sample.tag);
    assert_true(header.length == 5 && header.source == 3 && header.destination == 7 && header.flags == sample.flags);
}

static void every_flipped_bit_of_a_message_is_caught(void **state) {
    (void)state;
    char buf[RA_LINK_HEADER + 5];
    ra_header header;
    int caught = 0;
    for (int bit = 0; bit < (int)sizeof buf * 8; bit++) {
        write_sample(buf, sample);
        buf[bit / 8] = (char)(buf[bit / 8] ^ (1 << (bit % 8)));
        assert_int_equal(ra_header_check(buf, sizeof buf, &sample, &header), RA_PROTOCOL);
        caught++;
    }
    print_message("%d flipped bits, all caught\n", caught);
}

/* The CRC is right here: the message is whole, and not the one that was asked for. */
static void every_header_field_that_differs_from_what_is_expected_is_caught(void **state) {
    (void)state;
    char buf[RA_LINK_HEADER + 5];
    ra_header header, wrong[5] = {sample, sample, sample, sample, sample};
    wrong[0].source = 4;
    wrong[1].destination = 0;
    wrong[2].tag++;
    wrong[3].length = 4;
    wrong[4].flags |= 2;
    for (int i = 0; i < 5; i++) {
        write_sample(buf, wrong[i]);
        assert_int_equal(ra_header_check(buf, sizeof buf, &sample, &header), RA_PROTOCOL);
    }
    const int other[] = {4, 5, 52, 59}; /* version and call */
    for (int i = 0; i < 4; i++) {
        write_sample(buf, sample);
        buf[other[i]]++;
        uint32_t crc = ra_crc32c(0, buf, 60);
        for (int byte = 0; byte < 4; byte++) buf[60 + byte] = (char)(crc >> (8 * byte));
        assert_int_equal(ra_header_check(buf, sizeof buf, &sample, &header), i < 2 ? RA_PROTOCOL : RA_DISAGREE);
    }
    write_sample(buf, sample);
    for (size_t received = 0; received <= sizeof buf + 1; received++) {
        ra_status expected = received == sizeof buf ? RA_OK : RA_PROTOCOL;
        assert_int_equal(ra_header_check(buf, received, &sample, &header), expected);
    }
}

static void a_sequence_number_counts_once_in_any_order(void **state) {
    (void)state;
    ra_seen seen = {0};
    for (uint64_t block = 0; block < 40; block++) {
        for (uint64_t i = 0; i < 100; i++) {
            uint64_t number = block * 100 + (i * 37) % 100;
            assert_false(ra_seen_has(&seen, number));
            assert_true(ra_seen_mark(&seen, number));
            assert_true(ra_seen_has(&seen, number));
            assert_false(ra_seen_mark(&seen, number));
        }
    }
    assert_int_equal(seen.base, 4000);
    assert_false(ra_seen_mark(&seen, 4000 + RA_SEEN_WINDOW));
    assert_true(ra_seen_mark(&seen, 4000 + RA_SEEN_WINDOW - 1));
}

/* ---------------------------------------------------------------------------------------------------------- every transport */

static group_kind kind_of(void **state) { return *(const group_kind *)*state; }

enum { MANY = 60 };

static void many_body(rank_run *run) {
    ra_link *link = run->link;
    int peer = 1 - run->rank;
    static const int64_t sizes[] = {0, 1, 63, 1000, 1024, 1025, 5000, 70000};
    char *in[MANY], *out[MANY];
    ra_transfer transfers[2 * MANY] = {{0}};
    for (int i = 0; i < MANY; i++) {
        int64_t payload = sizes[i % 8];
        in[i] = calloc(1, (size_t)(RA_LINK_HEADER + payload));
        out[i] = calloc(1, (size_t)(RA_LINK_HEADER + payload));
        memset(out[i] + RA_LINK_HEADER, i + 100 * run->rank, (size_t)payload);
    }
    for (int n = 0; n < MANY; n++) { /* rank 0 posts its receives upwards, rank 1 downwards */
        int i = run->rank == 0 ? n : MANY - 1 - n;
        EXPECT(run, ra_link_recv(link, peer, (uint64_t)i, i, in[i], sizes[i % 8], &transfers[i]) == RA_OK);
    }
    for (int n = 0; n < MANY; n++) {
        int i = (n * 7) % MANY;
        EXPECT(run, ra_link_send(link, peer, (uint64_t)i, i, out[i], sizes[i % 8], &transfers[MANY + i]) == RA_OK);
        ra_link_poll(link);
    }
    EXPECT(run, ra_link_wait(link, transfers, 2 * MANY, "forward") == RA_OK);
    for (int i = 0; i < MANY; i++) {
        EXPECT(run, transfers[i].request == NULL && transfers[MANY + i].request == NULL);
        for (int64_t byte = 0; byte < sizes[i % 8]; byte++) EXPECT(run, in[i][RA_LINK_HEADER + byte] == (char)(i + 100 * peer));
        free(in[i]);
        free(out[i]);
    }
}

static void messages_in_flight_are_matched_by_tag_in_any_order_of_posting(void **state) {
    group g;
    group_open(&g, kind_of(state), 2, 10);
    run_ranks(&g, many_body, NULL);
    group_close(&g);
}

static void checksum_body(rank_run *run) {
    ra_link_set_checksum(run->link, true);
    ring_body(run);
    EXPECT(run, run->status == RA_OK);
}

static void rings_of_one_to_five_ranks_carry_payloads_of_any_size(void **state) {
    static const int64_t payloads[] = {0, 1, 960, 961, 4096, 1000003};
    int first = kind_of(state) == OVER_SOCKETS ? 2 : 1; /* sockets lead to others only */
    for (int ranks = first; ranks <= 5; ranks++) {
        for (int i = 0; i < 6; i++) {
            group g;
            ring_job job = {.steps = 7, .payload = payloads[i], .slow = -1};
            group_open(&g, kind_of(state), ranks, 10);
            run_ranks(&g, checksum_body, &job);
            group_close(&g);
        }
    }
}

static void gather_body(rank_run *run) {
    int64_t mine[3] = {run->rank, run->rank * 10, -run->rank}, all[3 * MOST_RANKS];
    for (int round = 0; round < 20; round++) {
        memset(all, 0xee, sizeof all);
        EXPECT(run, ra_link_allgather(run->link, mine, all, sizeof mine, "plan") == RA_OK);
        for (int rank = 0; rank < run->g->ranks; rank++)
            EXPECT(run, all[3 * rank] == rank && all[3 * rank + 1] == 10 * rank && all[3 * rank + 2] == -rank);
    }
    EXPECT(run, ra_link_allgather(run->link, NULL, NULL, 0, "plan") == RA_OK);
    EXPECT(run, ra_link_read(run->link).bytes_sent == 0);
}

static void an_allgather_gives_every_rank_the_bytes_of_all_in_rank_order(void **state) {
    for (int ranks = 1; ranks <= 6; ranks++) {
        if (kind_of(state) == OVER_SOCKETS && ranks == 1) continue;
        group g;
        group_open(&g, kind_of(state), ranks, 10);
        run_ranks(&g, gather_body, NULL);
        group_close(&g);
    }
}

static void the_links_counts_equal_what_the_transport_was_handed(void **state) {
    group g;
    ring_job job = {.steps = 9, .payload = 12345, .slow = -1};
    group_open(&g, kind_of(state), 3, 10);
    run_ranks(&g, ring_body, &job);
    for (int rank = 0; rank < 3; rank++) {
        ra_link_counts counts = ra_link_read(g.links[rank]);
        ra_fault_counts handed = ra_fault_read(g.faults[rank]);
        assert_int_equal(counts.messages_sent, 9);
        assert_int_equal(counts.messages_received, 9);
        assert_int_equal(counts.bytes_sent, 9 * 12345);
        assert_int_equal(counts.bytes_received, 9 * 12345);
        assert_int_equal(handed.sends, 9);
        assert_int_equal(handed.bytes_sent, 9 * (12345 + RA_LINK_HEADER));
        assert_int_equal(handed.bytes_received, 9 * (12345 + RA_LINK_HEADER));
        assert_true(handed.own_sends >= 2);
        assert_true(counts.wait_seconds >= 0 && counts.wait_seconds < 5 * test_patience());
    }
    group_close(&g);
}

static void links_are_destroyed_in_any_order_without_waiting(void **state) {
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int i = 0; i < 6; i++) {
        group g;
        ring_job job = {.steps = 3, .payload = 100, .slow = -1};
        group_open(&g, kind_of(state), 3, 30);
        run_ranks(&g, ring_body, &job);
        double begin = seconds_now();
        for (int n = 0; n < 3; n++) ra_link_destroy(g.links[orders[i][n]]);
        assert_true(seconds_now() - begin < test_patience());
    }
    ra_link_destroy(NULL);
}

static void leaver_body(rank_run *run) {
    char a[RA_LINK_HEADER + 8] = {0}, b[RA_LINK_HEADER + 8];
    ra_transfer transfers[2] = {{0}};
    int ranks = run->g->ranks;
    if (run->rank == ranks - 1) {
        ra_link_destroy(run->link);
        run->g->links[run->rank] = NULL;
        return;
    }
    for (int step = 0; step < 40; step++) { /* the first two go on as if nothing had happened */
        EXPECT(run, ra_link_recv(run->link, 1 - run->rank, (uint64_t)step, step, a, 8, &transfers[0]) == RA_OK);
        EXPECT(run, ra_link_send(run->link, 1 - run->rank, (uint64_t)step, step, b, 8, &transfers[1]) == RA_OK);
        EXPECT(run, ra_link_wait(run->link, transfers, 2, "forward") == RA_OK);
        sleep_for(0.02);
    }
    if (run->rank == 1) return;
    EXPECT(run, ra_link_recv(run->link, ranks - 1, 99, 99, a, 8, &transfers[0]) == RA_OK ||
                    ra_link_status(run->link) == RA_PEER_LOST);
    EXPECT(run, ra_link_wait(run->link, transfers, 1, "forward") == RA_PEER_LOST);
    EXPECT(run, strstr(ra_last_error(), "rank 2 has left") != NULL);
    ra_link_cancel(run->link, transfers, 1);
}

static void a_rank_that_leaves_in_peace_fails_only_those_who_wait_for_it(void **state) {
    group g;
    group_open(&g, kind_of(state), 3, 0.3 * test_patience());
    run_ranks(&g, leaver_body, NULL);
    group_close(&g);
}

/* ------------------------------------------------------------------------------------------------------------------- single */

static void a_rank_may_send_to_itself(void **state) {
    (void)state;
    ra_comm_ops ops;
    void *ctx;
    ra_link *link;
    assert_int_equal(ra_transport_self(&ops, &ctx), RA_OK);
    assert_int_equal(ra_link_create(&ops, ctx, 0, 1, "self", &link), RA_OK);
    assert_string_equal(ra_link_transport(link), "self");
    assert_int_equal(ra_link_size(link), 1);
    static char in[RA_LINK_HEADER + 5000], out[RA_LINK_HEADER + 5000];
    for (int round = 0; round < 3; round++) {
        ra_transfer transfers[2];
        memset(out + RA_LINK_HEADER, round + 1, 5000);
        assert_int_equal(ra_link_recv(link, 0, 1, round, in, 5000, &transfers[0]), RA_OK);
        assert_int_equal(ra_link_send(link, 0, 1, round, out, 5000, &transfers[1]), RA_OK);
        assert_int_equal(ra_link_wait(link, transfers, 2, "forward"), RA_OK);
        assert_memory_equal(in + RA_LINK_HEADER, out + RA_LINK_HEADER, 5000);
    }
    int value = 7, all = 0;
    assert_int_equal(ra_link_allgather(link, &value, &all, sizeof value, "plan"), RA_OK);
    assert_int_equal(all, 7);
    ra_link_poll(link);
    ra_link_destroy(link);
}

static void wrong_arguments_are_refused(void **state) {
    (void)state;
    ra_comm_ops ops, holes;
    void *ctx;
    ra_link *link;
    char buf[RA_LINK_HEADER];
    ra_transfer transfer;
    assert_int_equal(ra_transport_threads(0, &ops, &ctx), RA_INVALID);
    assert_int_equal(ra_transport_self(&ops, &ctx), RA_OK);
    holes = ops;
    holes.wait = NULL;
    assert_int_equal(ra_link_create(&holes, ctx, 0, 1, "self", &link), RA_INVALID);
    assert_int_equal(ra_transport_self(&ops, &ctx), RA_OK);
    assert_int_equal(ra_link_create(&ops, ctx, 1, 1, "self", &link), RA_INVALID);
    assert_int_equal(ra_transport_self(&ops, &ctx), RA_OK);
    assert_int_equal(ra_link_create(&ops, ctx, 0, 1, "self", &link), RA_OK);
    const double bad[] = {0, -1, 1.0 / 0.0, 0.0 / 0.0};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(ra_link_set_timeout(link, bad[i], 1), RA_INVALID);
        assert_int_equal(ra_link_set_timeout(link, 1, bad[i]), RA_INVALID);
    }
    assert_int_equal(ra_link_recv(link, 1, 0, 0, buf, 0, &transfer), RA_INTERNAL);
    assert_int_equal(ra_link_send(link, -1, 0, 0, buf, 0, &transfer), RA_INTERNAL);
    assert_int_equal(ra_link_send(link, 0, 0, 0, buf, -1, &transfer), RA_INTERNAL);
    assert_int_equal(ra_link_send(link, 0, 0, 0, buf, INT64_MAX, &transfer), RA_INTERNAL);
    ra_link_destroy(link);
}

/* -------------------------------------------------------------------------------------------------------------------- suite */

static const struct {
    const char *name;
    CMUnitTestFunction test;
} over_every_transport[] = {
#define OVER_ALL(test)                                                                                                         \
    { #test, test }
    OVER_ALL(messages_in_flight_are_matched_by_tag_in_any_order_of_posting),
    OVER_ALL(rings_of_one_to_five_ranks_carry_payloads_of_any_size),
    OVER_ALL(an_allgather_gives_every_rank_the_bytes_of_all_in_rank_order),
    OVER_ALL(the_links_counts_equal_what_the_transport_was_handed),
    OVER_ALL(links_are_destroyed_in_any_order_without_waiting),
    OVER_ALL(a_rank_that_leaves_in_peace_fails_only_those_who_wait_for_it),
};

int main(void) {
    enum { COMMON = sizeof over_every_transport / sizeof over_every_transport[0], ALONE = 8 };
    static char names[COMMON * GROUP_KINDS][160];
    static group_kind kinds[GROUP_KINDS];
    struct CMUnitTest tests[ALONE + COMMON * GROUP_KINDS] = {
        cmocka_unit_test(a_header_is_read_as_it_was_written),
        cmocka_unit_test(every_flipped_bit_of_a_message_is_caught),
        cmocka_unit_test(every_header_field_that_differs_from_what_is_expected_is_caught),
        cmocka_unit_test(a_sequence_number_counts_once_in_any_order),
        cmocka_unit_test(a_rank_may_send_to_itself),
        cmocka_unit_test(wrong_arguments_are_refused),
    };
    int count = 0;
    for (int kind = 0; kind < GROUP_KINDS; kind++) {
        kinds[kind] = (group_kind)kind;
        for (int i = 0; i < COMMON; i++, count++) {
            snprintf(names[count], sizeof names[count], "%s, over %s", over_every_transport[i].name, group_names[kind]);
            tests[ALONE + count] = (struct CMUnitTest){
                .name = names[count], .test_func = over_every_transport[i].test, .initial_state = &kinds[kind]};
        }
    }
    return test_run_patiently("transport_messages", tests, sizeof tests / sizeof *tests, 0.3);
}
