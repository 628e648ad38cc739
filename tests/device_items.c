/* What a ring tells a GPU's kernels. Where segments straddle shards, rows that meet everything at home are computed without a
 * state and the others with one, each where it belongs; runs of a zigzag rank are joined; and sums that begin with an item are
 * not zeroed. On the stand-in module; plans are given a kernel that notes what it is told. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "device_case.h"
#include "plan/plan.h"
#include "ring/pass.h"
#include "ringattn_cuda.h"

enum { MOST_RANKS = 4, RANK_ROWS = 40, HEADS = 16, MOST_STEPS = 8 };

/* How many items met a row of a rank in forward and in backward: queries in steps without a state and in the others, keys in
 * the former alone. */
static int of_queries[MOST_RANKS][2][2][RANK_ROWS][HEADS], of_keys[MOST_RANKS][2][RANK_ROWS][HEADS];
static bool parted[MOST_RANKS];
static int64_t items_of_step[MOST_RANKS][2][MOST_STEPS], steps[MOST_RANKS][2];
static int64_t fresh_items[MOST_RANKS], unfit_items[MOST_RANKS], zeroed_bytes[MOST_RANKS];

static const ra_kernel *real;

static const ra_plan *plan_of(const ra_problem *problem) {
    return (const ra_plan *)(const void *)((const char *)problem - offsetof(ra_plan, problem));
}

/* (row, query head) pairs of an item, or those of keys. */
static void note_rows(const ra_item *item, bool queries, int64_t group, int m[RANK_ROWS][HEADS]) {
    const ra_item_rows *rows = queries ? &item->q : &item->k;
    const ra_item_loop *l = item->loop;
    for (int64_t i = 0; i < l[0].repeat * l[1].repeat * rows->count; i++) {
        const int64_t a = i % rows->count, turn = i / rows->count, i1 = turn % l[1].repeat, i0 = turn / l[1].repeat;
        const int64_t row = rows->row + a * rows->row_step + i0 * (queries ? l[0].q_row : l[0].k_row) +
                            i1 * (queries ? l[1].q_row : l[1].k_row);
        for (int64_t h = 0; h < item->heads.count * group; h++)
            m[row][(item->heads.start + h / group * item->heads.step) * group + h % group]++;
    }
}

/* A query meets each key of a fresh item, and no item before has added to its sums. Residues have keys of their own. */
static bool may_be_fresh(const ra_problem *p, const ra_item *items, const ra_item *item) {
    for (const ra_item *before = items; before < item; before++)
        if (before->dk_view.data == item->dk_view.data && (!before->fresh || before->k.row == item->k.row)) return false;
    return ra_item_whole(p, item);
}

static void note(const ra_problem *p, const ra_item *items, int64_t count, bool single, int pass) {
    const int rank = plan_of(p)->view.rank;
    for (const ra_item *item = items; item < items + count; item++) {
        fresh_items[rank] += item->fresh;
        unfit_items[rank] += item->fresh && (single || !may_be_fresh(p, items, item));
    }
    if (steps[rank][pass] < MOST_STEPS) items_of_step[rank][pass][steps[rank][pass]++] = count;
    for (const ra_item *item = items; item < items + count; item++) {
        note_rows(item, true, p->heads / p->kv_heads, of_queries[rank][pass][!single]);
        if (single) note_rows(item, false, 1, of_keys[rank][pass]);
    }
}

static ra_status forward(const ra_forward_step *step) {
    note(step->problem, step->items, step->item_count, step->single, 0);
    return real->forward(step);
}

static ra_status backward(const ra_backward_step *step) {
    note(step->problem, step->items, step->item_count, step->single, 1);
    return real->backward(step);
}

/* A queue does not say whose it is. Threads of ranks do not share one. */
static _Thread_local int rank_here;

static ra_status zero(const ra_queue *queue, void *memory, int64_t bytes) {
    zeroed_bytes[rank_here] += bytes;
    return real->device->zero(queue, memory, bytes);
}

/* The linker sends every call of ra_plan_create here. */
ra_status __real_ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan);
ra_status __wrap_ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan);
ra_status __wrap_ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan) {
    static ra_kernel noting[MOST_RANKS];
    static ra_device_ops devices[MOST_RANKS];
    const ra_status status = __real_ra_plan_create(comm, desc, plan);
    if (status != RA_OK) return status;
    const int rank = (*plan)->view.rank;
    noting[rank] = *real;
    noting[rank].forward = forward;
    noting[rank].backward = backward;
    devices[rank] = *real->device;
    devices[rank].zero = zero;
    noting[rank].device = &devices[rank];
    rank_here = rank;
    (*plan)->kernel = &noting[rank];
    parted[rank] = (*plan)->view.parted;
    return RA_OK;
}

enum { NAN_BYTES = 1 << 16 };
static char *nans; /* pinned, so that copies of it are enqueued */

/* The linker sends every call of ra_items_packed here. Sums that begin with items may hold anything, be it only NaN. */
bool __real_ra_items_packed(ra_pass *pass, const ra_piece *piece, char *packed, char *sums);
bool __wrap_ra_items_packed(ra_pass *pass, const ra_piece *piece, char *packed, char *sums);
bool __wrap_ra_items_packed(ra_pass *pass, const ra_piece *piece, char *packed, char *sums) {
    const ra_call *call = &pass->call;
    const bool begun = __real_ra_items_packed(pass, piece, packed, sums);
    int64_t left = begun ? ra_sums_bytes(call, piece) : 0;
    for (int64_t bytes; left > 0; left -= bytes, sums += bytes) {
        bytes = ra_min(left, NAN_BYTES);
        if (real->device->copies->copy(&call->queue, sums, nans, bytes) != RA_OK) abort();
    }
    return begun;
}

/* ---------------------------------------------------------------------------------------------------------------- cases */

/* Does the segment of a row lie inside the rank's shard, and is the row on its lattice? */
static bool at_home(const test_case *c, int64_t row) {
    const int64_t shard = c->desc.seq_q / c->ranks, w = c->segment_lengths[0], first = row / w * w;
    const int64_t last = ra_min(first + w, c->desc.seq_q) - 1;
    return first / shard == last / shard;
}
static bool takes_part(const test_case *c, int64_t row) { return row % c->segment_lengths[0] % c->dilation_rates[0] == 0; }

static void forget(void) {
    memset(of_queries, 0, sizeof of_queries);
    memset(of_keys, 0, sizeof of_keys);
    memset(parted, 0, sizeof parted);
    memset(steps, 0, sizeof steps);
    memset(fresh_items, 0, sizeof fresh_items);
    memset(unfit_items, 0, sizeof unfit_items);
    memset(zeroed_bytes, 0, sizeof zeroed_bytes);
}

/* Every row was met where it belongs, if the rank's pass is parted. */
static void rows_were_parted(const test_case *c, int rank) {
    const int64_t shard = c->desc.seq_q / c->ranks;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t n = 0; n < shard; n++)
            for (int64_t h = 0; h < c->desc.heads; h++) {
                const int64_t row = rank * shard + n;
                const int alone = of_queries[rank][pass][0][n][h], shared = of_queries[rank][pass][1][n][h];
                const bool used = takes_part(c, row), home = at_home(c, row);
                assert_int_equal(alone, used && home);
                if (used && !home) assert_true(shared > 0);
                else assert_int_equal(shared, 0);
                if (h < c->desc.kv_heads) assert_int_equal(of_keys[rank][pass][n][h], used && home);
            }
}

/* Shards of 32 rows, segments of 20: of the first and the last shard one segment is at home, and of those between. */
static void straddling_case(test_case *c) {
    test_case_init(c);
    c->desc.device = RA_DEVICE_CUDA;
    c->desc.dtype = RA_BF16;
    c->desc.seq_q = c->desc.seq_k = 96;
    c->desc.heads = 4;
    c->desc.kv_heads = 2;
    c->desc.branches = 1;
    c->segment_lengths[0] = 20;
    c->dilation_rates[0] = 1;
    c->ranks = 3;
    test_case_link(c);
}

/* Runs it and holds it against the reference. */
static void holds(test_case *c) {
    test_case_link(c);
    forget();
    test_data data = test_data_create(c);
    test_result result = test_run(c, &data);
    test_result_holds(c, &data, &result);
    for (int rank = 0; rank < c->ranks; rank++) assert_int_equal(unfit_items[rank], 0);
    test_result_free(&result);
    test_data_free(&data);
}

static void rows_at_home_have_no_state_and_the_others_have(void **state) {
    (void)state;
    for (int n = 0; n < 24; n++) {
        test_case c;
        straddling_case(&c);
        c.desc.schedule = n % 2 ? RA_SCHEDULE_GATHER : RA_SCHEDULE_RING;
        c.desc.dtype = (ra_dtype[]){RA_BF16, RA_F32, RA_F16}[n / 2 % 3];
        c.desc.causal = n / 6 % 2;
        c.dilation_rates[0] = n / 12 ? 3 : 1;
        c.desc.bucket = n % 4 ? 0 : 5;
        holds(&c);
        for (int rank = 0; rank < c.ranks; rank++) rows_were_parted(&c, rank);
    }
}

/* What one rank computes of the whole sequence, a row at home gets from its own rank. (By a kernel that does not look at how
 * many rows there are.) */
static void rows_at_home_have_the_bits_of_one_rank(void **state) {
    (void)state;
    setenv("RINGATTN_KERNEL", "scalar", 1);
    for (int n = 0; n < 8; n++) {
        test_case c;
        straddling_case(&c);
        c.desc.kernel = "cuda";
        c.desc.dtype = n % 2 ? RA_BF16 : RA_F32;
        c.desc.causal = n / 2 % 2;
        c.dilation_rates[0] = n / 4 ? 3 : 1;
        test_data data = test_data_create(&c);
        test_result ring = test_run(&c, &data);
        c.ranks = 1;
        test_result one = test_run(&c, &data);
        assert_int_equal(ring.status, RA_OK);
        assert_int_equal(one.status, RA_OK);
        c.ranks = 3;
        const int64_t dim = c.desc.head_dim, row = c.desc.heads * dim, keys = c.desc.kv_heads * dim;
        int64_t rows = 0;
        for (int64_t x = 0; x < c.desc.seq_q; x++) {
            if (!at_home(&c, x)) continue;
            rows++;
            assert_memory_equal(ring.out + x * row, one.out + x * row, (size_t)row * sizeof(double));
            assert_memory_equal(ring.dq + x * row, one.dq + x * row, (size_t)row * sizeof(double));
            assert_memory_equal(ring.dk + x * keys, one.dk + x * keys, (size_t)keys * sizeof(double));
            assert_memory_equal(ring.dv + x * keys, one.dv + x * keys, (size_t)keys * sizeof(double));
            for (int64_t h = 0; h < c.desc.heads; h++)
                assert_memory_equal(ring.lse + h * c.desc.seq_q + x, one.lse + h * c.desc.seq_q + x, sizeof(double));
        }
        assert_int_equal(rows, 20 + 20 + 16);
        test_result_free(&ring);
        test_result_free(&one);
        test_data_free(&data);
    }
    unsetenv("RINGATTN_KERNEL");
}

/* Rows at home of which a batch entry leaves out all pairs. A kernel may leave those as they are, and results begin as NaN. */
static void rows_at_home_without_a_pair_have_zeros(void **state) {
    (void)state;
    for (int n = 0; n < 8; n++) {
        test_case c;
        straddling_case(&c);
        c.desc.dtype = n % 2 ? RA_BF16 : RA_F32;
        c.desc.batch = 2;
        c.key_range = n < 4;
        c.key_begin[0] = 0, c.key_end[0] = 7;
        c.key_begin[1] = 45, c.key_end[1] = 96;
        if (n >= 4) c.desc.window_left = 0, c.desc.window_right = 0, c.desc.dilate_queries = n % 4 < 2, c.dilation_rates[0] = 3;
        holds(&c);
        for (int rank = 0; rank < c.ranks; rank++) assert_true(parted[rank]);
    }
}

/* Both runs of a rank before its own keys are one triangle. Both meet the first keys of an earlier rank, as one item; the
 * second run meets both runs of a later rank, which lie apart in a message. */
static void the_runs_of_a_zigzag_rank_are_joined(void **state) {
    (void)state;
    for (int gather = 0; gather < 2; gather++) {
        test_case c;
        test_case_init(&c);
        c.desc.device = RA_DEVICE_CUDA;
        c.desc.dtype = RA_BF16;
        c.desc.seq_q = c.desc.seq_k = 64;
        c.desc.causal = true;
        c.desc.layout = RA_LAYOUT_ZIGZAG;
        c.desc.schedule = gather ? RA_SCHEDULE_GATHER : RA_SCHEDULE_RING;
        c.ranks = 2;
        holds(&c);
        for (int rank = 0; rank < 2; rank++)
            for (int pass = 0; pass < 2; pass++) {
                assert_int_equal(steps[rank][pass], 2);
                assert_int_equal(items_of_step[rank][pass][0], 1);
                assert_int_equal(items_of_step[rank][pass][1], rank ? 1 : 2);
            }
    }
}

/* A query meets every key that comes in, so that nobody zeroes the sums that it leaves with. */
static void sums_of_a_zigzag_ring_begin_with_its_items(void **state) {
    (void)state;
    for (int n = 0; n < 16; n++) {
        test_case c;
        test_case_init(&c);
        c.desc.device = RA_DEVICE_CUDA;
        c.desc.dtype = n % 2 ? RA_BF16 : RA_F32;
        c.desc.seq_q = c.desc.seq_k = 16 * MOST_RANKS;
        c.desc.heads = 4;
        c.desc.kv_heads = 2;
        c.desc.causal = n / 2 % 2 == 0;
        c.desc.layout = RA_LAYOUT_ZIGZAG;
        c.desc.schedule = n / 4 % 2 ? RA_SCHEDULE_GATHER : RA_SCHEDULE_RING;
        c.desc.bucket = n < 8 ? 0 : 8;
        c.ranks = MOST_RANKS;
        holds(&c);
        for (int rank = 0; rank < c.ranks; rank++) {
            assert_in_range(fresh_items[rank], MOST_RANKS - 1, INT64_MAX);
            assert_int_equal(zeroed_bytes[rank], 0);
        }
    }
}

/* A window keeps queries from keys of a bucket (of other keys there are no sums); key ranges do in some batch entries. */
static void sums_of_keys_that_no_query_meets_are_zeroed(void **state) {
    (void)state;
    for (int n = 0; n < 8; n++) {
        test_case c;
        test_case_init(&c);
        c.desc.device = RA_DEVICE_CUDA;
        c.desc.seq_q = c.desc.seq_k = 16 * MOST_RANKS;
        c.desc.batch = 2;
        c.desc.schedule = n % 2 ? RA_SCHEDULE_GATHER : RA_SCHEDULE_RING;
        c.desc.layout = n / 2 % 2 ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
        c.key_range = n / 4;
        if (!c.key_range) c.desc.window_left = 5, c.desc.window_right = 2;
        c.key_begin[0] = 3, c.key_end[0] = 40;
        c.key_begin[1] = 20, c.key_end[1] = 64;
        c.ranks = MOST_RANKS;
        holds(&c);
        for (int rank = 0; rank < c.ranks && (c.key_range || n % 2 == 0); rank++)
            assert_in_range(zeroed_bytes[rank], 1, INT64_MAX);
    }
}

static void draw_case(test_case *c, test_rng *rng, int64_t n) {
    static const int64_t dtypes[] = {RA_F32, RA_BF16, RA_BF16, RA_F16};
    (void)n;
    device_case_random(c, rng, 40, MOST_RANKS);
    c->desc.dtype = (ra_dtype)rng_pick(rng, dtypes, 4);
    c->ranks = 2 + (int)rng_below(rng, MOST_RANKS - 1);
    c->transport = rng_chance(rng, 50) ? TEST_THREADS : TEST_CUSTOM;
    if (rng_chance(rng, 80)) c->desc.layout = RA_LAYOUT_CONTIGUOUS;
    c->desc.seq_k = c->ranks * (4 + rng_below(rng, 29));
    if (rng_chance(rng, 60)) c->desc.seq_q = c->desc.seq_k;
    c->desc.branches = 1 + rng_below(rng, 2);
    c->desc.combine = rng_chance(rng, 80) ? RA_COMBINE_HEADS : RA_COMBINE_MIX;
    c->desc.kv_heads = ra_max(c->desc.kv_heads, c->desc.branches);
    c->desc.heads = c->desc.kv_heads * (1 + rng_below(rng, 2));
    for (int64_t b = 0; b < c->desc.branches; b++) {
        c->segment_lengths[b] = 1 + rng_below(rng, c->desc.seq_k / c->ranks + 3);
        c->dilation_rates[b] = rng_chance(rng, 50) ? 1 : 1 + rng_below(rng, 4);
    }
    for (int64_t b = 0; c->key_range && b < c->desc.batch; b++) {
        c->key_begin[b] = rng_chance(rng, 40) ? 0 : rng_below(rng, c->desc.seq_k + 1);
        c->key_end[b] = c->key_begin[b] + rng_below(rng, c->desc.seq_k - c->key_begin[b] + 1);
    }
    test_case_link(c);
}

/* All other modes: windows, key ranges, offsets, unequal lengths, dropout, and what is never parted. */
static void every_mode_matches_the_reference(void **state) {
    (void)state;
    test_rng rng = {test_seed(61)};
    int64_t apart = 0, fresh = 0, zeroed = 0;
    const int64_t count = test_cases(150, 3000);
    for (int64_t n = count; n > 0; n--) {
        test_case c;
        draw_case(&c, &rng, n);
        forget();
        test_case_holds(&c);
        for (int rank = 0; rank < c.ranks; rank++) {
            apart += parted[rank];
            assert_int_equal(unfit_items[rank], 0);
            fresh += fresh_items[rank] > 0;
            zeroed += zeroed_bytes[rank] > 0;
        }
    }
    print_message("%lld cases, %lld ranks with rows of both kinds, %lld with fresh sums, %lld with zeroed ones\n",
                  (long long)count, (long long)apart, (long long)fresh, (long long)zeroed);
    assert_true(apart >= count / 4 && fresh >= count / 4 && zeroed >= count / 4);
}

/* Two ranks of 32 rows, one forward pass: rows at home take a step, and so do those that straddle, before and after an exchange
 * that takes as long as two. */
enum { STEP_MS = 60, COPY_MS = 2 * STEP_MS, SHARD = 32, DIM = 8 };

static void forward_of_two(void *arg, int rank) {
    static uint16_t q[2][SHARD * DIM], out[2][SHARD * DIM];
    const test_ring *ring = arg;
    test_case c;
    straddling_case(&c);
    c.desc.seq_q = c.desc.seq_k = 2 * SHARD;
    c.desc.heads = c.desc.kv_heads = 1;
    ra_plan *plan = NULL;
    assert_int_equal(ra_plan_create(ring->comms[rank], &c.desc, &plan), RA_OK);
    const ra_tensor x = ra_tensor_bnhd(q[rank], SHARD, 1, DIM);
    const ra_forward_args args = {
        .q = x, .k = x, .v = x, .out = ra_tensor_bnhd(out[rank], SHARD, 1, DIM), .stream = out[rank]};
    assert_int_equal(ra_forward(plan, &args), RA_OK);
    assert_int_equal(ra_cuda_synchronize(out[rank]), RA_OK);
    ra_plan_destroy(plan);
}

static void rows_at_home_do_not_hold_back_the_first_message(void **state) {
    (void)state;
    test_ring ring;
    char text[16];
    test_ring_open(&ring, 2, TEST_THREADS);
    test_ring_each(&ring, forward_of_two, &ring); /* plans and workspaces are there */
    assert_true(parted[0] && parted[1]);
    snprintf(text, sizeof text, "%d", STEP_MS);
    setenv("RINGATTN_STAND_IN_STEP_MS", text, 1);
    snprintf(text, sizeof text, "%d", COPY_MS);
    setenv("RINGATTN_STAND_IN_COPY_MS", text, 1);
    const double beside = 3e-3 * STEP_MS, limit = beside + 0.75e-3 * STEP_MS;
    double took = INFINITY;
    for (int i = 0; i < 30 && took >= limit; i++) { /* again on a busy machine */
        const double start = ra_seconds();
        test_ring_each(&ring, forward_of_two, &ring);
        took = fmin(took, ra_seconds() - start);
    }
    unsetenv("RINGATTN_STAND_IN_COPY_MS");
    unsetenv("RINGATTN_STAND_IN_STEP_MS");
    print_message("%.0f ms, of which steps take %.0f\n", 1e3 * took, 1e3 * beside);
    assert_true(took >= beside);
    assert_true(took < limit);
    test_ring_close(&ring);
}

int main(void) {
    setenv("RINGATTN_MODULE_PATH", STAND_IN, 1);
    const ra_problem any = {.dtype = RA_F32, .heads = 1, .kv_heads = 1, .head_dim = 8};
    if (ra_kernel_find("cuda", RA_DEVICE_CUDA, &any, &real) != RA_OK) return 1;
    const ra_memory *pinned = real->device->copies->pinned;
    nans = pinned->alloc(NAN_BYTES);
    if (!nans) return 1;
    memset(nans, 0xff, NAN_BYTES); /* NaN in every type */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_at_home_have_no_state_and_the_others_have),
        cmocka_unit_test(rows_at_home_have_the_bits_of_one_rank),
        cmocka_unit_test(rows_at_home_without_a_pair_have_zeros),
        cmocka_unit_test(rows_at_home_do_not_hold_back_the_first_message),
        cmocka_unit_test(the_runs_of_a_zigzag_rank_are_joined),
        cmocka_unit_test(sums_of_a_zigzag_ring_begin_with_its_items),
        cmocka_unit_test(sums_of_keys_that_no_query_meets_are_zeroed),
        cmocka_unit_test(every_mode_matches_the_reference),
    };
    const int failed = cmocka_run_group_tests_name("items of stand-in GPUs", tests, NULL, test_print_worst);
    pinned->free(nans, NAN_BYTES);
    return failed;
}
