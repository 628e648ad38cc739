/* Tiles that share the packed keys of their slab: the emulated kernel of AMX with tiles, chunks, panels and slots so small
 * that a few hundred rows and keys have many of each, and some slabs too many keys for a slot. */
#define QUERIES 64
#define CHUNK 16384
#define PANEL 4096
#define SHARED 32768
#include "kernel_emulated_amx.h"

#include "kernel_case.h"

static ra_workers *workers_new(int count) {
    ra_workers *workers;
    assert_int_equal(ra_workers_create(count, &workers), RA_OK);
    return workers;
}

/* 700 rows are 11 tiles of a slab. At dimension 40 a panel has 64 keys, a chunk 256, a slot 512 at most. */
static const case_options one_slab = {
    .max_rows = 700, .rows = 700, .max_keys = 500, .keys = 500, .dim = 40, .amplitude = 1, .single = true};

/* Some slabs, of 3 tiles and more each. */
static const case_options many_places = {
    .max_rows = 130, .rows = 130, .max_keys = 200, .keys = 200, .dim = 40, .amplitude = 1, .several = true};

static void keys_of_a_place_are_packed_once(void **state) {
    (void)state;
    for (int workers = 1; workers <= 4; workers++) {
        ra_workers *w = workers_new(workers);
        for (int causal = 0; causal < 2; causal++) {
            case_options options = one_slab;
            options.causal = causal;
            options.forbid_limits = true;
            options.q_step = options.k_step = 1;
            kernel_case *c = case_new(20000, RA_BF16, &options);
            squares_packed = 0;
            case_forward(c, &emulated, w, true);
            assert_int_equal(squares_packed, (500 + 31) / 32);
            case_free(c);
        }
        ra_workers_destroy(w);
    }
}

/* One worker has one slot, which every slab leaves before the next comes. */
static void a_slot_serves_one_place_after_the_other(void **state) {
    (void)state;
    case_options options = many_places;
    options.forbid_limits = options.single = true;
    ra_workers *w = workers_new(1);
    int several = 0;
    for (uint64_t seed = 20100; seed < 20106; seed++) {
        kernel_case *c = case_new(seed, RA_BF16, &options);
        const ra_item *item = &c->items[0];
        const int64_t slabs = item->loop[0].repeat * item->loop[1].repeat * c->problem.batch * item->heads.count;
        several += slabs > 2;
        squares_packed = 0;
        case_forward(c, &emulated, w, true);
        assert_int_equal(squares_packed, slabs * ra_ceil_div(item->k.count, 32));
        case_free(c);
    }
    assert_true(several > 2);
    ra_workers_destroy(w);
}

static void places_with_more_keys_than_a_slot_are_packed_by_every_tile(void **state) {
    (void)state;
    ra_workers *w = workers_new(2);
    case_options options = one_slab;
    options.keys = options.max_keys = 520;
    options.forbid_limits = true;
    kernel_case *c = case_new(20200, RA_BF16, &options);
    squares_packed = 0;
    case_forward(c, &emulated, w, true);
    assert_true(squares_packed >= 700 / QUERIES * (520 / 32));
    const int64_t apart = ra_emulated_forward_scratch(&c->problem, 1);
    assert_int_equal(ra_emulated_forward_scratch(&c->problem, 2), 2 * apart);
    c->problem.keys = 512;
    assert_true(ra_emulated_forward_scratch(&c->problem, 1) >= apart + 2 * 512 * 64 * 2);
    case_free(c);
    ra_workers_destroy(w);
}

/* As in a ring with small buckets: K and V of 64 keys, of the slot (512 before) and of the worker (256: a chunk). */
static void scratch_is_no_larger_than_the_keys_of_an_item_ask_for(void **state) {
    (void)state;
    kernel_case *c = case_new(20200, RA_BF16, &one_slab);
    ra_problem many = c->problem, few = c->problem;
    many.keys = 512, few.keys = 64;
    const int64_t key = 2 * 64 * 2; /* bytes */
    assert_true(ra_emulated_forward_scratch(&many, 1) - ra_emulated_forward_scratch(&few, 1) >=
                key * (512 - 64) + key * (256 - 64));
    assert_true(ra_emulated_backward_scratch(&many, 1) - ra_emulated_backward_scratch(&few, 1) >= key * (256 - 64));
    case_free(c);
}

static void a_tile_that_finds_its_slot_in_use_packs_for_itself(void **state) {
    (void)state;
    enum { PANELS = 3 };
    ra_slot *slot = aligned_alloc(64, (size_t)ra_round_up(ra_slot_bytes(PANELS), 64));
    const ra_slab zero = {.number = 0}, four = {.number = 4};
    ra_slot_clear(slot, PANELS);
    for (int i = 0; i < PANELS; i++) assert_false(ra_panel_packed(slot, &zero, i));
    assert_true(ra_slot_enter(slot, &zero));
    assert_true(ra_slot_enter(slot, &zero));
    assert_true(ra_panel_take(slot, &zero, 1));
    assert_false(ra_panel_take(slot, &zero, 1));
    assert_false(ra_panel_packed(slot, &zero, 1));
    ra_panel_publish(slot, &zero, 1);
    assert_false(ra_panel_take(slot, &zero, 1));
    assert_true(ra_panel_packed(slot, &zero, 1));
    ra_slot_leave(slot);
    assert_false(ra_slot_enter(slot, &four));
    ra_slot_leave(slot);
    assert_true(ra_slot_enter(slot, &four));
    assert_false(ra_slot_enter(slot, &zero));
    for (int i = 0; i < PANELS; i++) assert_false(ra_panel_packed(slot, &four, i));
    assert_true(ra_panel_take(slot, &four, 1));
    free(slot);
}

/* Against float64, and bit by bit against one worker. */
static void forward_cases(const case_options *options, uint64_t first, int cases, void (*change)(kernel_case *c)) {
    for (uint64_t seed = first; seed < first + (uint64_t)case_share(cases); seed++) {
        double *out = NULL, *lse = NULL;
        for (int workers = 1; workers <= 4; workers++) {
            ra_workers *w = workers_new(workers);
            kernel_case *c = case_new(seed, RA_BF16, options);
            if (change) change(c);
            if (workers == 1) case_forward_reference(c);
            case_forward(c, &emulated, w, true);
            if (workers == 1) case_check_forward(c, emulated.name, seed, true);
            double *got_out = read_all(&c->out), *got_lse = read_all(&c->lse);
            const size_t rows = (size_t)(c->problem.batch * c->problem.rows_q * c->problem.heads);
            if (workers > 1) {
                assert_memory_equal(out, got_out, rows * (size_t)c->problem.head_dim * sizeof *out);
                assert_memory_equal(lse, got_lse, rows * sizeof *lse);
                free(out);
                free(lse);
            }
            out = got_out;
            lse = got_lse;
            case_free(c);
            ra_workers_destroy(w);
        }
        free(out);
        free(lse);
    }
}

/* Windows, key ranges, groups, several items and turns; slabs of one tile and of many. */
static void results_agree_with_float64_and_with_one_worker(void **state) {
    (void)state;
    forward_cases(&many_places, 21300, 6, NULL);
    forward_cases(&(case_options){.max_rows = 200, .max_keys = 700, .dim = 40, .amplitude = 1}, 21000, 12, NULL);
    forward_cases(&(case_options){.max_rows = 200, .max_keys = 500, .dim = 96, .amplitude = 1}, 21100, 4, NULL);
    forward_cases(&(case_options){.max_rows = 200, .max_keys = 500, .dim = 24, .amplitude = 1, .causal = true}, 21200, 4, NULL);
}

/* The rows from 300 on are the first to meet key 300: it is packed with keys that others meet. */
static void poison_key(kernel_case *c) {
    const int64_t row = c->items[0].k.row + 300 * c->items[0].k.row_step;
    guarded_set(&c->v[0], 0, row, 0, 3, c->problem.seed % 2 ? NAN : INFINITY);
    if (c->problem.seed % 2) guarded_set(&c->k[0], 0, row, 0, 5, NAN);
}
static void a_poisoned_key_in_a_shared_panel_reaches_only_rows_that_meet_it(void **state) {
    (void)state;
    case_options options = one_slab;
    options.causal = true;
    options.q_step = options.k_step = 1;
    scalar_tiles = 0;
    forward_cases(&options, 22000, 2, poison_key);
    assert_true(scalar_tiles > 0);
}

/* The step before may have packed other keys for a slab of the same number. */
static void marks_of_an_earlier_step_are_not_believed(void **state) {
    (void)state;
    scratch_word = 2; /* packed for slab 0 */
    case_options options = one_slab;
    options.forbid_limits = true;
    forward_cases(&options, 23000, 1, NULL);
    scratch_word = UINT64_MAX;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_of_a_place_are_packed_once),
        cmocka_unit_test(a_slot_serves_one_place_after_the_other),
        cmocka_unit_test(places_with_more_keys_than_a_slot_are_packed_by_every_tile),
        cmocka_unit_test(scratch_is_no_larger_than_the_keys_of_an_item_ask_for),
        cmocka_unit_test(a_tile_that_finds_its_slot_in_use_packs_for_itself),
        cmocka_unit_test(results_agree_with_float64_and_with_one_worker),
        cmocka_unit_test(a_poisoned_key_in_a_shared_panel_reaches_only_rows_that_meet_it),
        cmocka_unit_test(marks_of_an_earlier_step_are_not_believed),
    };
    return cmocka_run_group_tests_name("kernel_shared_keys", tests, NULL, NULL);
}
