/* Tiles that take turns where they add to dq. Whether a worker waits for its turn, keeps dq for later, or has no turns to take,
 * the sums are the same bit by bit. Comes behind an emulated kernel with small tiles. */
#include "kernel_case.h"

static const case_options one_slab = {
    .max_rows = 460, .rows = 460, .max_keys = 330, .keys = 330, .dim = 40, .amplitude = 1, .single = true};

/* An infinity in the second to last row of all heads. */
static void poison(const guarded *g, const ra_item_rows *rows) {
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t head = 0; head < g->heads; head++)
            guarded_set(g, b, rows->row + (rows->count - 2) * rows->row_step, head, 0, INFINITY);
}

typedef enum poisoned { NOTHING, A_KEY, A_QUERY } poisoned;

/* Against float64, and bit by bit against one worker, which has no turns to take. */
static void backward_cases(const case_options *options, uint64_t first, int cases, poisoned what) {
    for (uint64_t seed = first; seed < first + (uint64_t)case_share(cases); seed++) {
        kernel_case *c = case_new(seed, RA_BF16, options);
        if (what == A_KEY) poison(&c->k[0], &c->items[0].k);
        if (what == A_QUERY) poison(&c->dout, &c->items[0].q);
        case_forward_reference(c);
        case_backward_reference(c);
        const guarded *of[3] = {&c->dq, &c->dk[0], &c->dv[0]};
        double *alone[3] = {0};
        for (int workers = 1; workers <= 4; workers++) {
            ra_workers *w;
            assert_int_equal(ra_workers_create(workers, &w), RA_OK);
            case_backward(c, &emulated, w);
            ra_workers_destroy(w);
            case_check_backward(c, emulated.name, seed);
            for (int i = 0; i < 3; i++) {
                double *got = read_all(of[i]);
                if (workers > 1) {
                    const int64_t count = of[i]->batches * of[i]->rows * of[i]->heads * of[i]->dim;
                    assert_memory_equal(alone[i], got, (size_t)count * sizeof *got);
                    free(alone[i]);
                }
                alone[i] = got; /* the same bits */
            }
        }
        for (int i = 0; i < 3; i++) free(alone[i]);
        case_free(c);
    }
}

static void all_cases(void) {
    case_options dense = one_slab, causal = one_slab, several = one_slab;
    dense.forbid_limits = true;
    causal.causal = true, causal.q_step = causal.k_step = 1;
    several.rows = several.max_rows = 200, several.keys = several.max_keys = 300;
    several.several = true, several.single = false;
    backward_cases(&dense, 30000, 1, NOTHING);
    backward_cases(&causal, 30100, 2, NOTHING);
    backward_cases(&one_slab, 30200, 2, NOTHING);
    backward_cases(&several, 30300, 4, NOTHING);
}

static void workers_that_wait_for_their_turn_sum_alike(void **state) {
    (void)state;
    all_late = false;
    all_cases();
}

static void workers_whose_turn_is_always_late_sum_alike(void **state) {
    (void)state;
    all_late = true;
    late = 0;
    all_cases();
    assert_true(late > 100);
}

/* Tiles that are not finite are given up when some of their rows are in the queue, or their sums in a worker's own rooms. */
static void what_is_kept_comes_before_what_is_given_up(void **state) {
    (void)state;
    case_options dense = one_slab;
    dense.forbid_limits = true;
    for (int mode = 0; mode < 4; mode++) {
        all_late = mode % 2;
        scalar_tiles = 0;
        backward_cases(&dense, 30400, 1, mode < 2 ? A_KEY : A_QUERY);
        assert_true(scalar_tiles > 0);
    }
}

/* Goes on when another tile has begun, too. */
static atomic_int begun, met;
static void meet_another(const ra_backward_step *step, const ra_slab *slab, int64_t begin, int64_t end, int64_t first,
                         int64_t last, void *scratch) {
    (void)step, (void)slab, (void)begin, (void)end, (void)first, (void)last, (void)scratch;
    atomic_fetch_add(&begun, 1);
    for (time_t start = time(NULL); atomic_load(&begun) < 2 && time(NULL) - start < 30;) sched_yield();
    if (atomic_load(&begun) == 2) atomic_fetch_add(&met, 1);
}

static void a_tile_begins_before_the_one_above_it_is_done(void **state) {
    (void)state;
    kernel_case *c;
    for (uint64_t seed = 30500;; seed++) {
        c = case_new(seed, RA_BF16, &one_slab);
        if (c->item_count == 1 && ra_slabs(&c->problem, &c->items[0]) == 1 && c->problem.heads == c->problem.kv_heads &&
            c->problem.left == RA_NO_LIMIT && c->problem.right == RA_NO_LIMIT && !c->problem.key_begin && !c->problem.key_end)
            break;
        case_free(c);
    }
    ra_workers *w;
    assert_int_equal(ra_workers_create(2, &w), RA_OK);
    const ra_item *item = &c->items[0];
    ra_cpu_backward(&(ra_backward_step){.problem = &c->problem, .items = item, .item_count = 1, .workers = w},
                    &(ra_backward_tiles){.tile = meet_another, .rows = (item->q.count + 1) / 2, .keys = item->k.count});
    ra_workers_destroy(w);
    case_free(c);
    assert_int_equal(begun, 2);
    assert_int_equal(met, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_that_wait_for_their_turn_sum_alike),
        cmocka_unit_test(workers_whose_turn_is_always_late_sum_alike),
        cmocka_unit_test(what_is_kept_comes_before_what_is_given_up),
        cmocka_unit_test(a_tile_begins_before_the_one_above_it_is_done),
    };
    return cmocka_run_group_tests_name("kernel_turns, " EMULATED_NAME, tests, NULL, NULL);
}
