/* Plans take no time: their size does not depend on the length of the sequence, and nor does the work to make them. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "support.h"
#include "support_sanitized.h"

/* Of this process's own work: planning has one thread, and whatever else the machine does is not its time. */
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define SLOW_BUILD (TEST_SANITIZED ? 30 : 1)

static const struct pattern {
    const char *what;
    int64_t branches, w[3], r[3];
    bool causal, mix, every_query;
} patterns[] = {{"2048,4096,8192 at 1,2,4", 3, {2048, 4096, 8192}, {1, 2, 4}, false, false, false},
                {"dense causal", 0, {0}, {0}, true, false, false},
                {"2047", 1, {2047}, {1}, false, false, false},
                {"2047,4099 at 3,5 causal", 2, {2047, 4099}, {3, 5}, true, false, false},
                {"mix of 2048,4096,8192 at 1,2,4", 3, {2048, 4096, 8192}, {1, 2, 4}, true, true, false},
                {"mix of 2047,4099 at 2,3 causal", 2, {2047, 4099}, {2, 3}, true, true, false},
                {"mix of 2048,4096 at 2,4, every query", 2, {2048, 4096}, {2, 4}, true, true, true}};
#define PATTERNS ((int)(sizeof patterns / sizeof *patterns))

enum { MOST_RANKS = 4096 };
static ra_rank_summary summaries[MOST_RANKS];

/* Seconds to plan all ranks; the best of a few tries, unless it is hopeless. */
static double planning_time(const struct pattern *p, ra_layout layout, int ranks, int64_t n, double enough) {
    test_case c;
    test_case_init(&c);
    c.ranks = ranks;
    c.desc.layout = layout;
    c.desc.seq_q = c.desc.seq_k = n;
    c.desc.heads = c.desc.kv_heads = 12;
    c.desc.head_dim = 64;
    c.desc.branches = p->branches;
    c.desc.causal = p->causal;
    c.desc.combine = p->mix ? RA_COMBINE_MIX : RA_COMBINE_HEADS;
    c.desc.dilate_queries = !p->every_query;
    memcpy(c.segment_lengths, p->w, sizeof p->w);
    memcpy(c.dilation_rates, p->r, sizeof p->r);
    test_case_link(&c);
    double best = INFINITY;
    for (int attempt = 0; attempt < 5 && best >= enough && (attempt == 0 || best < 20 * enough); attempt++) {
        double start = seconds();
        for (int rank = 0; rank < ranks; rank++) summaries[rank].struct_size = sizeof *summaries;
        assert_int_equal(ra_plan_summaries(&c.desc, ranks, summaries), RA_OK);
        if (seconds() - start < best) best = seconds() - start;
    }
    return best;
}

static void a_billion_tokens_on_64_ranks_plan_in_under_a_tenth_of_a_second(void **state) {
    (void)state;
    double slowest = 0;
    for (int n = 0; n < 3; n++) {
        for (int layout = 0; layout < 3; layout++) {
            double time = planning_time(&patterns[n], (ra_layout)layout, 64, 1000000000, 0.1);
            print_message("%s, layout %d: %.1f ms for 64 ranks\n", patterns[n].what, layout, 1000 * time);
            slowest = time > slowest ? time : slowest;
        }
    }
    assert_true(slowest < 0.1 * SLOW_BUILD);
}

/* Patterns that nothing divides, and rows that are holes only if every branch says so: at no length does a plan walk the
 * rows. */
static void no_length_takes_long_to_plan(void **state) {
    (void)state;
    double slowest = 0;
    for (int n = 3; n < PATTERNS; n++) {
        for (int layout = 0; layout < 3; layout++) {
            double small = planning_time(&patterns[n], (ra_layout)layout, 64, 4000000, 0.1);
            double large = planning_time(&patterns[n], (ra_layout)layout, 64, 4000000000, 0.1);
            print_message("%s, layout %d: %.1f ms at n, %.1f ms at 1000 n\n", patterns[n].what, layout, 1000 * small,
                          1000 * large);
            slowest = small > slowest ? small : large > slowest ? large : slowest;
        }
    }
    assert_true(slowest < 0.5 * SLOW_BUILD);
}

/* Segments concern few ranks each: a rank looks at its own rings, not at those of all. */
static void segments_on_thousands_of_ranks_plan_in_under_a_second(void **state) {
    (void)state;
    const double time = planning_time(&patterns[0], RA_LAYOUT_CONTIGUOUS, MOST_RANKS, 1000000000, 1);
    print_message("%s: %.0f ms for %d ranks\n", patterns[0].what, 1000 * time, MOST_RANKS);
    assert_true(time < SLOW_BUILD);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_billion_tokens_on_64_ranks_plan_in_under_a_tenth_of_a_second),
        cmocka_unit_test(no_length_takes_long_to_plan),
        cmocka_unit_test(segments_on_thousands_of_ranks_plan_in_under_a_second),
    };
    return cmocka_run_group_tests_name("planning time", tests, NULL, NULL);
}
