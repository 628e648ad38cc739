/* What the ring, plan and API tests share: random cases, rounded data, ranks as threads, guard pages, and the verdict.
 *
 * A test builds a `test_case` (descriptor, ranks, transport), `test_data` for it (float64, but rounded to the case's dtype so
 * that the reference sees what the kernels see), runs it over p ranks with test_run, and holds the result against the
 * reference. */
#ifndef TESTS_SUPPORT_H
#define TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "reference/reference.h"
#include "ringattn.h"

/* ------------------------------------------------------------------------------------------------------- random */

typedef struct test_rng {
    uint64_t state;
} test_rng;

uint64_t rng_next(test_rng *rng);
int64_t rng_below(test_rng *rng, int64_t bound); /* 0 <= result < bound */
int64_t rng_pick(test_rng *rng, const int64_t *values, int64_t count);
bool rng_chance(test_rng *rng, int percent);
double rng_uniform(test_rng *rng); /* (0, 1) */
double rng_normal(test_rng *rng);

/* ------------------------------------------------------------------------------------------------------- cases */

#define TEST_MAX_BRANCHES 8
#define TEST_MAX_BATCH 4

typedef enum test_transport { TEST_SELF, TEST_THREADS, TEST_CUSTOM } test_transport;

/* How a rank's tensors lie in memory. */
typedef enum test_strides { TEST_BNHD, TEST_BHND, TEST_PADDED, TEST_STRIDES } test_strides;

typedef struct test_case {
    ra_attention_desc desc; /* its arrays are the ones below: call test_case_link after copying a case */
    int64_t segment_lengths[TEST_MAX_BRANCHES], dilation_rates[TEST_MAX_BRANCHES];
    int64_t key_begin[TEST_MAX_BATCH], key_end[TEST_MAX_BATCH];
    bool key_range;
    int ranks;
    test_transport transport;
    test_strides strides;
    bool backward, dlse;
    double amplitude; /* of q and k */
    uint64_t data_seed;
} test_case;

/* A small dense case: every field has a value; set what the test is about, then link. */
void test_case_init(test_case *c);
void test_case_link(test_case *c);
/* Any case at all, edge-biased; at most max_seq keys and max_ranks ranks. */
void test_case_random(test_case *c, test_rng *rng, int64_t max_seq, int max_ranks);
/* One line that says everything. */
const char *test_case_text(const test_case *c, char *buf, size_t bytes);

/* --------------------------------------------------------------------------------------------------------- data */

typedef struct test_data {
    double *q, *k, *v, *dout, *dlse; /* C order, as the reference wants them */
} test_data;

double test_round(ra_dtype dtype, double value); /* to the nearest element of the dtype */
void test_store(ra_dtype dtype, void *array, int64_t index, double value);
double test_load(ra_dtype dtype, const void *array, int64_t index);
ra_dtype test_state_dtype(ra_dtype dtype); /* of lse */

test_data test_data_create(const test_case *c);
void test_data_free(test_data *data);
ref_inputs test_inputs(const test_case *c, const test_data *data);
/* NaN into every k and v row that no query reads, and every q and dout row that has no key. Returns the rows poisoned. */
int64_t test_data_poison(const test_case *c, test_data *data);

/* A buffer between pages that fault; its end (right) or its beginning touches one of them. */
typedef struct test_buffer {
    void *ptr;
    void *base;
    size_t mapped;
} test_buffer;

test_buffer guard_alloc(size_t bytes, bool right);
void guard_free(test_buffer *buffer);

/* ---------------------------------------------------------------------------------------------------------- run */

/* Counts what goes over the custom transport; one a rank. */
typedef struct test_traffic {
    int64_t sent, received; /* payload bytes */
    int64_t messages;
    int64_t agreements; /* messages by which ranks come to agree, apart from those above; heartbeats are not counted */
} test_traffic;

/* p ranks, each with its communicator; each runs on a thread of its own. */
typedef struct test_ring {
    int ranks;
    test_transport transport;
    ra_comm **comms;
    test_traffic *traffic; /* custom transport only; live */
} test_ring;

void test_ring_open(test_ring *ring, int ranks, test_transport transport);
void test_ring_close(test_ring *ring);
/* Calls work(arg, rank) on p threads and waits for all. */
void test_ring_each(const test_ring *ring, void (*work)(void *arg, int rank), void *arg);
/* Ends the program with the case on stderr if test_unwatch does not come within 120 (RINGATTN_WATCHDOG) seconds. */
void test_watch(const test_case *c);
void test_unwatch(void);
/* The communicators of `ranks` ranks whose every message is counted in traffic[rank]. */
ra_status test_counting_comms(int ranks, ra_comm **comms, test_traffic *traffic);

typedef struct test_result {
    ra_status status; /* the first that is not RA_OK, by rank */
    char error[512];
    double *out, *lse, *dq, *dk, *dv;  /* global, C order */
    ra_rank_summary *ranks;            /* [p]: bytes_* and workspace_* as measured, by traffic and ra_plan_workspace */
    ra_stats_data *forward, *backward; /* [p] */
} test_result;

/* Plans and runs the case on the ring. Tensors lie between guard pages, outputs start as NaN. */
test_result test_run_on(const test_ring *ring, const test_case *c, const test_data *data);
/* The same on a ring of its own. */
test_result test_run(const test_case *c, const test_data *data);
void test_result_free(test_result *result);
/* Do two results hold the same bits? Names the first that differs. */
const char *test_difference(const test_case *c, const test_result *a, const test_result *b);

/* ------------------------------------------------------------------------------------------------------ verdict */

typedef struct test_errors {
    double out, lse, dq, dk, dv; /* max error over max m, divided by its bound: above 1 is wrong */
} test_errors;

/* Everything: makes data, runs, compares with the reference. Prints the case and fails the test if anything is off. */
void test_case_holds(const test_case *c);
void test_case_holds_on(const test_ring *ring, const test_case *c);
void test_result_holds(const test_case *c, const test_data *data, const test_result *result);
/* The same with the data given: a ring of its own, and the verdict. */
void test_data_holds(const test_case *c, const test_data *data);
/* test_case_holds for as many cases as test_cases says; draw fills the n-th, counted down to 1. */
void test_cases_hold(uint64_t seed, int64_t fast, int64_t slow, void (*draw)(test_case *c, test_rng *rng, int64_t n));
/* The same with NaN in every row that nobody reads. Returns the rows poisoned. */
int64_t test_poisoned_cases_hold(uint64_t seed, int64_t fast, int64_t slow,
                                 void (*draw)(test_case *c, test_rng *rng, int64_t n));
/* The largest errors so far in this program, for the log; a group's teardown. */
int test_print_worst(void **state);

bool test_long(void); /* RINGATTN_LONG=1 */
/* How many random cases: fast or (RINGATTN_LONG=1) slow, times RINGATTN_EFFORT percent. */
int64_t test_cases(int64_t fast, int64_t slow);
uint64_t test_seed(uint64_t seed); /* RINGATTN_SEED is mixed in */

#endif
