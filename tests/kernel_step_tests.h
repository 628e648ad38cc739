/* Steps of a kernel against float64 and against the same kernel: a whole test program, for every kernel of the table that runs
 * here, or for those that KERNEL_AT gives (kernel_emulated.h). */
#ifndef RA_TESTS_KERNEL_STEP_TESTS_H
#define RA_TESTS_KERNEL_STEP_TESTS_H

#include "kernel_case.h"

static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16, RA_F64};

static ra_workers *workers_new(int count) {
    ra_workers *workers;
    assert_int_equal(ra_workers_create(count, &workers), RA_OK);
    return workers;
}

static void forward_cases(const case_options *options, uint64_t first, int cases) {
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < (options->two_types ? 2 : 4); t++)
        for (int n = 0; KERNEL_AT(0, dtypes[t]) && n < case_share(cases); n++) {
            const uint64_t seed = first + (uint64_t)n;
            kernel_case *c = case_new(seed, dtypes[t], options);
            case_forward_reference(c);
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                const bool lse = !c->single || n % 4 != 0;
                case_forward(c, KERNEL_AT(i, dtypes[t]), workers, lse);
                case_check_forward(c, KERNEL_AT(i, dtypes[t])->name, seed, lse);
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* Backward of every kernel against float64. */
static void check_backward_and_free(kernel_case *c, ra_dtype dtype, uint64_t seed, ra_workers *workers) {
    if (!c->want_out) case_forward_reference(c);
    case_backward_reference(c);
    for (int i = 0; KERNEL_AT(i, dtype); i++) {
        case_backward(c, KERNEL_AT(i, dtype), workers);
        case_check_backward(c, KERNEL_AT(i, dtype)->name, seed);
    }
    case_free(c);
}

static void backward_cases(const case_options *options, uint64_t first, int cases) {
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < (options->two_types ? 2 : 4); t++)
        for (int n = 0; KERNEL_AT(0, dtypes[t]) && n < case_share(cases); n++) {
            const uint64_t seed = first + (uint64_t)n;
            kernel_case *c = case_new(seed, dtypes[t], options);
            check_backward_and_free(c, dtypes[t], seed, workers);
        }
    ra_workers_destroy(workers);
}

static void forward_agrees_with_float64_on_random_items(void **state) {
    (void)state;
    forward_cases(&(case_options){.max_rows = 80, .max_keys = 200, .amplitude = 1}, 1, 60);
}

static void forward_agrees_with_float64_on_scores_of_tens(void **state) {
    (void)state;
    forward_cases(&(case_options){.max_rows = 40, .max_keys = 200, .amplitude = 12}, 1000, 30);
}

static void forward_agrees_with_float64_over_many_key_blocks(void **state) {
    (void)state;
    forward_cases(&(case_options){.max_rows = 6, .max_keys = 1500, .amplitude = 1}, 2000, 15);
}

/* Later blocks of keys outdo earlier ones by far, so that running maxima must be renewed. */
static void let_scores_grow(kernel_case *c) {
    for (int n = 0; n < c->item_count; n++)
        for (int64_t b = 0; b < c->problem.batch; b++)
            for (int64_t row = 0; row < c->rows_k; row++)
                for (int64_t head = 0; head < c->k[n].heads; head++)
                    if (c->k[n].used[guarded_at(&c->k[n], b, row, head, 0)])
                        guarded_set(&c->k[n], b, row, head, 0, (double)row / 4 / c->problem.scale);
    for (int64_t b = 0; b < c->problem.batch; b++)
        for (int64_t row = 0; row < c->problem.rows_q; row++)
            for (int64_t head = 0; head < c->problem.heads; head++)
                if (c->q.used[guarded_at(&c->q, b, row, head, 0)]) guarded_set(&c->q, b, row, head, 0, row % 3 == 0 ? -1 : 1);
}

/* Errors grow with the scores. */
static void forward_follows_scores_that_grow_without_bound(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (uint64_t seed = 2500; KERNEL_AT(0, dtypes[t]) && seed < 2500 + (uint64_t)case_share(12); seed++) {
            kernel_case *c = case_new(seed, dtypes[t], &(case_options){.max_rows = 20, .max_keys = 700, .amplitude = 1});
            let_scores_grow(c);
            case_forward_reference(c);
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                const ra_kernel *kernel = KERNEL_AT(i, dtypes[t]);
                case_forward(c, kernel, workers, true);
                const int64_t rows = c->problem.batch * c->problem.rows_q * c->problem.heads;
                double *out = read_all(&c->out);
                check_error(kernel->name, seed, "out",
                            ref_compare(out, c->want_out, c->m_out, rows * c->problem.head_dim, dtypes[t]),
                            ref_bound(dtypes[t], false, 10) * fmax(1, c->max_score / 40), c);
                free(out);
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* Makes the elements in use tiny. */
static void make_tiny(const guarded *g, double factor) {
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t row = 0; row < g->rows; row++)
            for (int64_t head = 0; head < g->heads; head++)
                for (int64_t d = 0; d < g->dim; d++)
                    if (g->used[guarded_at(g, b, row, head, d)])
                        guarded_set(g, b, row, head, d, factor * guarded_get(g, b, row, head, d));
}

/* Scores of one sign a row, up to `size` large, and never two alike: each row has one key with all of the weight. They
 * are large by q, or by the scale. */
static void make_vast(kernel_case *c, double size, bool by_scale) {
    const int64_t values = c->problem.dtype == RA_BF16 ? 64 : 512; /* as many as all types have bits for, from 3/4 to 1 */
    double factor = 1000;
    if (by_scale) c->problem.scale = size / factor;
    else factor = fmin(size / c->problem.scale, 3.3e38); /* the product that the scale multiplies is finite, too */
    for (int n = 0; n < c->item_count; n++)
        for (int64_t b = 0; b < c->problem.batch; b++)
            for (int64_t row = 0; row < c->rows_k; row++)
                for (int64_t head = 0; head < c->k[n].heads; head++)
                    if (c->k[n].used[guarded_at(&c->k[n], b, row, head, 0)])
                        guarded_set(&c->k[n], b, row, head, 0,
                                    ldexp((double)(3 * values + row * 37 % (values - 1)) / (double)(4 * values), -n));
    make_tiny(&c->q, 0x1p-10);
    for (int64_t b = 0; b < c->problem.batch; b++)
        for (int64_t row = 0; row < c->problem.rows_q; row++)
            for (int64_t head = 0; head < c->problem.heads; head++)
                if (c->q.used[guarded_at(&c->q, b, row, head, 0)])
                    guarded_set(&c->q, b, row, head, 0, row % 3 == 0 ? -factor : factor);
}

/* Up to the largest finite float. Backward gets the lse that the kernel's forward wrote. */
static void vast_scores_are_right(void **state) {
    (void)state;
    static const double sizes[] = {8e6, 1.5e9, 7e9, 3e12, 1e20, 1e30, 3.3e38};
    const int size_count = (int)(sizeof sizes / sizeof *sizes);
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (int n = 0; KERNEL_AT(0, dtypes[t]) && n < case_share(6 * size_count); n++) {
            const uint64_t seed = 17000 + (uint64_t)n;
            const int64_t keys = dtypes[t] == RA_BF16 ? 20 : 168; /* rows of K step by up to 3 */
            case_options options = {.max_rows = 70, .max_keys = keys, .amplitude = 1, .forbid_limits = n % 2 == 0};
            options.few = n / 2 % 3 == 0;
            kernel_case *c = case_new(seed, dtypes[t], &options);
            make_vast(c, sizes[n % size_count], dtypes[t] == RA_F16 || n / 3 % 2);
            case_forward_reference(c);
            case_backward_reference(c);
            c->max_score = 1; /* nothing about these weights is inexact */
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                case_forward(c, KERNEL_AT(i, dtypes[t]), workers, true);
                case_check_forward(c, KERNEL_AT(i, dtypes[t])->name, seed, true);
                if (dtypes[t] == RA_F16 && c->problem.scale > 1e4) continue; /* gradients too large for it */
                case_backward(c, KERNEL_AT(i, dtypes[t]), workers);
                case_check_backward(c, KERNEL_AT(i, dtypes[t])->name, seed);
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* All values and all gradients lie around one number, and so do all weights: long sums never cancel, and the errors of their
 * additions show. */
static void long_sums_of_one_sign_are_right(void **state) {
    (void)state;
    const int64_t many = case_share(60) < 60 ? 600 : 4000;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (int turn = 0; KERNEL_AT(0, dtypes[t]) && turn < 2; turn++) { /* many keys, many rows */
            const case_options options = {.max_rows = many,
                                          .max_keys = many,
                                          .rows = turn ? many : 32,
                                          .keys = turn ? 32 : many,
                                          .dim = 32,
                                          .amplitude = 0.3,
                                          .forbid_limits = true,
                                          .single = true};
            const uint64_t seed = 2700 + (uint64_t)turn;
            kernel_case *c = case_new(seed, dtypes[t], &options);
            const guarded *ones[] = {&c->v[0], &c->dout};
            for (int i = 0; i < 2; i++)
                for (int64_t j = 0; j < ones[i]->elements; j++) {
                    const double x = get_element(ones[i]->tensor.data, dtypes[t], j);
                    if (!isnan(x)) set_element(ones[i]->tensor.data, dtypes[t], j, 1 + x / 16);
                }
            case_forward_reference(c);
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                case_forward(c, KERNEL_AT(i, dtypes[t]), workers, true);
                case_check_forward(c, KERNEL_AT(i, dtypes[t])->name, seed, true);
            }
            check_backward_and_free(c, dtypes[t], seed, workers);
        }
    ra_workers_destroy(workers);
}

static const ra_dtype wide[] = {RA_F32, RA_BF16, RA_F64}; /* f16 has no such elements */

/* Values near the smallest numbers: no weight may be so small that their products vanish. */
static void forward_keeps_values_that_are_tiny(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 3; t++)
        for (uint64_t seed = 2600; KERNEL_AT(0, wide[t]) && seed < 2600 + (uint64_t)case_share(8); seed++) {
            kernel_case *c = case_new(seed, wide[t], &(case_options){.max_rows = 70, .max_keys = 200, .amplitude = 1});
            for (int n = 0; n < c->item_count; n++) make_tiny(&c->v[n], 0x1p-100);
            case_forward_reference(c);
            for (int i = 0; KERNEL_AT(i, wide[t]); i++) {
                case_forward(c, KERNEL_AT(i, wide[t]), workers, true);
                case_check_forward(c, KERNEL_AT(i, wide[t])->name, seed, true);
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* The same for gradients, with tiny dout or tiny values. */
static void backward_keeps_gradients_that_are_tiny(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 3; t++)
        for (uint64_t seed = 2650; KERNEL_AT(0, wide[t]) && seed < 2650 + (uint64_t)case_share(8); seed++) {
            kernel_case *c =
                case_new(seed, wide[t], &(case_options){.max_rows = 70, .max_keys = 200, .dim = 64, .amplitude = 1});
            const double factor = wide[t] == RA_F32 ? 0x1p-118 : 0x1p-100;
            if (seed % 2 == 0) make_tiny(&c->dout, factor);
            for (int n = 0; seed % 2 && n < c->item_count; n++) make_tiny(&c->v[n], factor);
            check_backward_and_free(c, wide[t], seed, workers);
        }
    ra_workers_destroy(workers);
}

static void forward_drops_the_same_pairs_as_the_definition(void **state) {
    (void)state;
    forward_cases(&(case_options){.max_rows = 40, .max_keys = 150, .amplitude = 1, .dropout = true}, 3000, 20);
}

static void backward_agrees_with_float64_on_random_items(void **state) {
    (void)state;
    backward_cases(&(case_options){.max_rows = 150, .max_keys = 150, .amplitude = 1}, 4000, 40);
}

static void backward_agrees_with_float64_on_scores_of_tens(void **state) {
    (void)state;
    backward_cases(&(case_options){.max_rows = 40, .max_keys = 150, .amplitude = 12}, 5000, 20);
}

static void backward_agrees_with_float64_over_many_blocks(void **state) {
    (void)state;
    backward_cases(&(case_options){.max_rows = 500, .max_keys = 500, .amplitude = 1}, 6000, 6);
}

/* Several tiles of rows and of keys for every kernel: sums of a row begin in one tile and end in another, and tiles that write
 * results must know which. Windows leave some of them without a pair. */
static void single_steps_of_many_tiles_write_gradients(void **state) {
    (void)state;
    const int64_t rows = case_small() ? 600 : 4200; /* 600 are several tiles for most kernels */
    case_options all = {.max_rows = rows, .rows = rows, .max_keys = 600, .keys = 600, .dim = 8, .amplitude = 1};
    all.single = all.two_types = true;
    case_options causal = all, window = all, small = all, later = all, gap = all;
    all.forbid_limits = true;
    causal.causal = true;
    /* Keys that no row of the first tile meets. */
    later.rows = rows + 300, later.causal = true, later.q_step = 1, later.k_step = 8;
    /* Rows whose keys begin with 1023, which none of them meets, so that the first tile of keys has no pair. */
    gap.rows = 600, gap.keys = 1900, gap.q_step = 3, gap.k_step = 1, gap.diagonal = 1023, gap.forbid_limits = true;
    small.rows = 300, small.keys = 400;
    backward_cases(&all, 6100, 1);
    backward_cases(&causal, 6200, 2);
    backward_cases(&window, 6300, 3);
    backward_cases(&later, 6500, 1);
    backward_cases(&gap, 6600, 1);
    backward_cases(&small, 6400, 12);
}

static void backward_drops_the_same_pairs_as_forward(void **state) {
    (void)state;
    backward_cases(&(case_options){.max_rows = 60, .max_keys = 150, .amplitude = 1, .dropout = true}, 7000, 20);
}

/* Scores of the other sign, and scores that are all 0. */
static void scales_of_zero_and_below_are_right(void **state) {
    (void)state;
    for (int dropout = 0; dropout < 2; dropout++) {
        const case_options below = {.max_rows = 60, .max_keys = 150, .amplitude = 1, .dropout = dropout, .scale = -1.5};
        const case_options zero = {.max_rows = 60, .max_keys = 150, .amplitude = 1, .dropout = dropout, .zero_scale = true};
        forward_cases(&below, 13000, 12);
        backward_cases(&below, 13100, 12);
        forward_cases(&zero, 13200, 6);
        backward_cases(&zero, 13300, 6);
    }
    /* too small for a float */
    forward_cases(&(case_options){.max_rows = 60, .max_keys = 150, .amplitude = 1, .scale = 1e-300}, 13400, 4);
}

static void few_rows_meet_many_keys(void **state) {
    (void)state;
    forward_cases(&(case_options){.max_rows = 3, .max_keys = 4000, .amplitude = 1, .few = true}, 14000, 16);
    forward_cases(&(case_options){.max_rows = 3, .max_keys = 4000, .amplitude = 12, .few = true, .dropout = true}, 14100, 8);
}

/* One row, key or dimension more, from nothing to beyond two tiles of registers, whatever their size. */
static void tails_of_every_length_are_right(void **state) {
    (void)state;
    enum { MOST = 132 };
    for (int64_t n = 1; n <= case_share(MOST); n++) {
        case_options keys = {.max_rows = 1, .max_keys = 1, .two_types = true, .amplitude = 0.5}, rows = keys, dims = keys;
        keys.rows = 17 + n % 3, keys.keys = n, keys.dim = 1 + n * 5 % 37;
        rows.rows = n, rows.keys = 1 + n * 11 % 71, rows.dim = 24;
        dims.rows = 1 + n % 31, dims.keys = 19, dims.dim = n;
        const case_options *each[] = {&keys, &rows, &dims};
        for (int i = 0; i < 3; i++) {
            forward_cases(each[i], 15000 + (uint64_t)n, 1);
            backward_cases(each[i], 16000 + (uint64_t)n, 1);
        }
    }
}

/* Runs last. Tensors have lain at every distance from a page that their type allows: 64 for bytes, fewer for what is larger. */
static void tensors_have_begun_at_every_offset(void **state) {
    (void)state;
    if (case_share(60) < 60) skip();
    for (int offset = 0; offset < 64; offset += 2)
        if (KERNEL_AT(0, RA_BF16) || KERNEL_AT(0, RA_F16) || offset % 4 == 0) assert_true(tensor_offsets >> offset & 1);
}

/* poison: the last value but one is infinite. */
static void results_depend_on_workers_never(const case_options *options, uint64_t from, int cases, bool poison) {
    static const int counts[] = {1, 2, 4};
    for (int t = 0; t < 4; t++)
        for (int i = 0; KERNEL_AT(i, dtypes[t]); i++)
            for (uint64_t seed = from; seed < from + (uint64_t)case_share(cases); seed++) {
                double *first[6] = {0};
                for (int w = 0; w < 3; w++) {
                    ra_workers *workers = workers_new(counts[w]);
                    kernel_case *c = case_new(seed, dtypes[t], options);
                    for (int64_t b = 0; poison && b < c->problem.batch; b++)
                        for (int64_t head = 0; head < c->v[0].heads; head++)
                            guarded_set(&c->v[0], b, c->items[0].k.row + (c->items[0].k.count - 2) * c->items[0].k.row_step,
                                        head, 0, INFINITY);
                    case_forward(c, KERNEL_AT(i, dtypes[t]), workers, true);
                    double *got[6] = {read_all(&c->out), read_all(&c->lse)};
                    const guarded *shape[6] = {&c->out, &c->lse, &c->dq, &c->dk[0], &c->dv[0], &c->dk[0]};
                    for (int64_t b = 0; b < c->problem.batch; b++)
                        for (int64_t row = 0; row < c->problem.rows_q; row++)
                            for (int64_t head = 0; head < c->problem.heads; head++)
                                guarded_set(&c->delta, b, row, head, 0, 0.25);
                    case_backward(c, KERNEL_AT(i, dtypes[t]), workers);
                    got[2] = read_all(&c->dq);
                    got[3] = read_all(&c->dk[0]);
                    got[4] = read_all(&c->dv[0]);
                    got[5] = read_all(&c->dk[c->item_count - 1]);
                    if (c->item_count > 1) shape[5] = &c->dk[c->item_count - 1];
                    for (int k = 0; k < 6; k++) {
                        const size_t bytes = (size_t)(shape[k]->batches * shape[k]->rows * shape[k]->heads * shape[k]->dim) * 8;
                        if (w == 0) {
                            first[k] = got[k];
                            continue;
                        }
                        assert_memory_equal(first[k], got[k], bytes);
                        free(got[k]);
                    }
                    case_free(c);
                    ra_workers_destroy(workers);
                }
                for (int k = 0; k < 6; k++) free(first[k]);
            }
}

static void results_do_not_depend_on_the_number_of_workers(void **state) {
    (void)state;
    results_depend_on_workers_never(&(case_options){.max_rows = 400, .max_keys = 400, .amplitude = 1}, 8000, 6, false);
    results_depend_on_workers_never(&(case_options){.max_rows = 3, .max_keys = 5000, .amplitude = 1, .few = true}, 8100, 4,
                                    false);
    /* Several tiles of rows for every kernel, and more tiles than are dealt at a time. */
    const int64_t rows = case_small() ? 1100 : 4200, keys = KERNEL_AT(1, RA_F32) && !case_small() ? 1100 : 520;
    results_depend_on_workers_never(
        &(case_options){.max_rows = rows, .rows = rows, .max_keys = keys, .keys = keys, .dim = 8, .amplitude = 1}, 8200, 1,
        false);
}

/* Workers that have all keys of some rows may sum otherwise than those that take turns, and those whose turn comes late, or
 * that have to give up numbers that are not finite: the sums must be the same. */
static void gradients_do_not_depend_on_who_sums_them(void **state) {
    (void)state;
    const bool whole = case_share(60) == 60; /* else kernel_turns.c has tiles enough */
    const int64_t rows = whole ? 300 : 80, keys = whole ? 1100 : 200;
    case_options all = {
        .max_rows = rows, .rows = rows, .max_keys = keys, .keys = keys, .dim = 44, .amplitude = 1, .single = true};
    case_options causal = all;
    all.forbid_limits = true;
    causal.causal = true, causal.q_step = keys / rows, causal.k_step = 1;
    case_options later = causal; /* steps of a ring, which go on from sums */
    later.single = false, later.steps = later.several = true;
    later.rows = later.max_rows = 80, later.q_step = keys / 80;
    for (int poison = 0; poison < 2; poison++) {
        results_depend_on_workers_never(&all, 8300, 1, poison);
        results_depend_on_workers_never(&causal, 8400, 1, poison);
        results_depend_on_workers_never(&later, 8500, 1, poison);
    }
}

/* One key of an item turns to NaN (or to infinity): the rows that attend to it feel it, and no others do. */
static void a_poisoned_row_reaches_only_the_rows_that_attend_to_it(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (uint64_t seed = 9000; KERNEL_AT(0, dtypes[t]) && seed < 9000 + (uint64_t)case_share(40); seed++) {
            const bool backward = seed % 2;
            /* Kernels that take many rows in blocks give up those that meet the key, and keep the others. */
            const case_options few = {.max_rows = 70, .max_keys = 150, .amplitude = 1};
            const case_options many = {
                .max_rows = 700, .rows = 700, .max_keys = 600, .keys = 600, .dim = 40, .amplitude = 1, .causal = true};
            const bool blocks = seed % 10 == 3;
            kernel_case *c = case_new(seed, dtypes[t], blocks ? &many : &few);
            rng r = {.seed = seed + 1};
            int64_t row = rng_int(&r, 0, ra_max(c->rows_k - 1, 0));
            if (blocks) { /* the key that query 400 is the first to meet */
                const ra_item_rows *q = &c->items[0].q, *k = &c->items[0].k;
                row = k->row + ra_min(k->count - 1, (q->pos + 400 * q->pos_step - k->pos) / k->pos_step) * k->row_step;
            }
            const double poison = rng_one_in(&r, 2) ? NAN : INFINITY;
            for (int64_t b = 0; c->rows_k > 0 && b < c->problem.batch; b++)
                for (int64_t head = 0; head < c->v[0].heads; head++) {
                    guarded_set(&c->v[0], b, row, head, 0, poison);
                    if (poison != INFINITY) guarded_set(&c->k[0], b, row, head, 0, poison);
                }
            case_forward_reference(c);
            if (backward) case_backward_reference(c);
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                const ra_kernel *kernel = KERNEL_AT(i, dtypes[t]);
                if (backward) {
                    case_backward(c, kernel, workers);
                    case_check_backward(c, kernel->name, seed);
                } else {
                    case_forward(c, kernel, workers, true);
                    case_check_forward(c, kernel->name, seed, true);
                }
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* dout of query 400 is NaN: the keys that it attends to feel it, and later ones do not, nor other queries. Kernels that take
 * rows in blocks have summed over some before they meet it, and go on after it. */
static void a_poisoned_query_reaches_only_the_keys_it_attends_to(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    const int64_t rows = case_small() ? 450 : 700, keys = case_small() ? 200 : 600;
    const case_options options = {
        .max_rows = rows, .rows = rows, .max_keys = keys, .keys = keys, .dim = 40, .amplitude = 1, .causal = true};
    for (int t = 0; t < 4; t++)
        for (uint64_t seed = 9100; KERNEL_AT(0, dtypes[t]) && seed < 9100 + (uint64_t)case_share(2); seed++) {
            kernel_case *c = case_new(seed, dtypes[t], &options);
            const int64_t row = c->items[0].q.row + 400 * c->items[0].q.row_step;
            for (int64_t b = 0; b < c->problem.batch; b++)
                for (int64_t head = 0; head < c->problem.heads; head++)
                    if (c->dout.used[guarded_at(&c->dout, b, row, head, 0)]) guarded_set(&c->dout, b, row, head, 0, NAN);
            check_backward_and_free(c, dtypes[t], seed, workers);
        }
    ra_workers_destroy(workers);
}

/* Keys of -inf against queries with positive elements: rows that meet only such keys are empty. */
static void rows_whose_every_score_is_minus_infinity_are_empty(void **state) {
    (void)state;
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (uint64_t seed = 10000; KERNEL_AT(0, dtypes[t]) && seed < 10000 + (uint64_t)case_share(16); seed++) {
            kernel_case *c = case_new(seed, dtypes[t], &(case_options){.max_rows = 40, .max_keys = 70, .amplitude = 1});
            c->problem.dropout = 0;
            for (int n = 0; n < c->item_count; n++)
                for (int64_t b = 0; b < c->problem.batch; b++)
                    for (int64_t row = 0; row < c->rows_k; row++)
                        for (int64_t head = 0; head < c->k[n].heads; head++)
                            if (c->k[n].used[guarded_at(&c->k[n], b, row, head, 0)])
                                guarded_set(&c->k[n], b, row, head, 0, -INFINITY);
            for (int64_t b = 0; b < c->problem.batch; b++)
                for (int64_t row = 0; row < c->problem.rows_q; row++)
                    for (int64_t head = 0; head < c->problem.heads; head++)
                        if (c->q.used[guarded_at(&c->q, b, row, head, 0)]) guarded_set(&c->q, b, row, head, 0, 1);
            case_forward_reference(c);
            case_backward_reference(c);
            const int64_t rows = c->problem.batch * c->problem.rows_q * c->problem.heads;
            for (int64_t i = 0; i < rows; i++) assert_true(c->want_lse[i] == -INFINITY);
            for (int i = 0; KERNEL_AT(i, dtypes[t]); i++) {
                const ra_kernel *kernel = KERNEL_AT(i, dtypes[t]);
                case_forward(c, kernel, workers, true);
                double *out = read_all(&c->out), *lse = read_all(&c->lse);
                for (int64_t k = 0; k < rows * c->problem.head_dim; k++) assert_true(out[k] == 0);
                for (int64_t k = 0; k < rows; k++) assert_true(lse[k] == -INFINITY);
                case_backward(c, kernel, workers);
                case_check_backward(c, kernel->name, seed); /* zeros, since every m is zero */
                free(out);
                free(lse);
            }
            case_free(c);
        }
    ra_workers_destroy(workers);
}

/* sum of dout * out + dlse * lse, by the scalar kernel in float64. */
static double objective(kernel_case *c, const ra_kernel *kernel, ra_workers *workers, double dlse) {
    case_forward(c, kernel, workers, true);
    double sum = 0;
    for (int64_t b = 0; b < c->problem.batch; b++)
        for (int64_t row = 0; row < c->problem.rows_q; row++)
            for (int64_t head = 0; head < c->problem.heads; head++) {
                const double lse = guarded_get(&c->lse, b, row, head, 0);
                if (lse == -INFINITY) continue;
                sum += dlse * lse;
                for (int64_t d = 0; d < c->problem.head_dim; d++)
                    sum += guarded_get(&c->dout, b, row, head, d) * guarded_get(&c->out, b, row, head, d);
            }
    return sum;
}

static void gradients_are_the_slopes_of_forward(void **state) {
    (void)state;
    ra_workers *workers = workers_new(1);
    const ra_problem any = {.dtype = RA_F64, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 1};
    const ra_kernel *scalar;
    assert_int_equal(ra_kernel_find("scalar", RA_DEVICE_CPU, &any, &scalar), RA_OK);
    for (uint64_t seed = 11000; seed < 11000 + (uint64_t)case_share(12); seed++) {
        kernel_case *c =
            case_new(seed, RA_F64, &(case_options){.max_rows = 20, .max_keys = 30, .amplitude = 1, .dropout = seed % 3 == 0});
        const double dlse = 0.375;
        objective(c, scalar, workers, dlse);
        guarded dlse_tensor =
            guarded_new(&(rng){.seed = seed}, RA_F64, c->problem.batch, c->problem.rows_q, c->problem.heads, 0);
        for (int64_t i = 0; i < dlse_tensor.elements; i++) set_element(dlse_tensor.tensor.data, RA_F64, i, dlse);
        ra_rows_delta(&c->problem, workers, &(ra_used_rows){0}, c->dout.tensor, c->out.tensor, dlse_tensor.tensor,
                      c->delta.tensor, c->problem.rows_q, c->problem.heads);
        case_backward(c, scalar, workers);
        rng r = {.seed = seed};
        guarded *input[3] = {&c->q, &c->k[0], &c->v[0]}, *gradient[3] = {&c->dq, &c->dk[0], &c->dv[0]};
        for (int tries = 0; tries < 60; tries++) {
            guarded *x = input[tries % 3], *g = gradient[tries % 3];
            if (x->rows == 0) continue;
            const int64_t b = rng_int(&r, 0, x->batches - 1), row = rng_int(&r, 0, x->rows - 1),
                          head = rng_int(&r, 0, x->heads - 1), d = rng_int(&r, 0, x->dim - 1);
            if (!x->used[guarded_at(x, b, row, head, d)]) continue;
            const double here = guarded_get(x, b, row, head, d), h = 1e-5, slope = guarded_get(g, b, row, head, d);
            guarded_set(x, b, row, head, d, here + h);
            const double up = objective(c, scalar, workers, dlse);
            guarded_set(x, b, row, head, d, here - h);
            const double down = objective(c, scalar, workers, dlse);
            guarded_set(x, b, row, head, d, here);
            assert_true(fabs((up - down) / (2 * h) - slope) <= 1e-6 * (1 + fabs(slope)));
        }
        guarded_free(&dlse_tensor);
        case_free(c);
    }
    ra_workers_destroy(workers);
}

#ifdef COUNTED_SCALAR_TILES
static void steps_without_nan_are_never_left_to_the_scalar_kernel(void **state) {
    (void)state;
    static const case_options options[] = {
        {.max_rows = 40, .max_keys = 700, .amplitude = 1, .forbid_limits = true}, /* its scores grow */
        {.max_rows = 300, .max_keys = 300, .amplitude = 1, .forbid_limits = true},
        {.max_rows = 300, .max_keys = 300, .amplitude = 1, .forbid_limits = true, .scale = -1},
        {.max_rows = 300, .max_keys = 300, .amplitude = 1, .forbid_limits = true, .dropout = true},
    };
    ra_workers *workers = workers_new(2);
    for (int t = 0; t < 4; t++)
        for (uint64_t seed = 12000; KERNEL_AT(0, dtypes[t]) && seed < 12012; seed++) {
            COUNTED_SCALAR_TILES = 0;
            kernel_case *c = case_new(seed, dtypes[t], &options[seed % 4]);
            if (seed % 4 == 0) let_scores_grow(c);
            case_forward(c, KERNEL_AT(0, dtypes[t]), workers, true);
            for (int64_t b = 0; b < c->problem.batch; b++)
                for (int64_t row = 0; row < c->problem.rows_q; row++)
                    for (int64_t head = 0; head < c->problem.heads; head++) guarded_set(&c->delta, b, row, head, 0, 0.25);
            case_backward(c, KERNEL_AT(0, dtypes[t]), workers);
            case_free(c);
            assert_int_equal(COUNTED_SCALAR_TILES, 0);
        }
    ra_workers_destroy(workers);
}
#endif

static void count_if_met(kernel_case *c, int item, int64_t b, int64_t row, int64_t head, void *arg) {
    const guarded *inputs[2] = {&c->q, &c->k[item]};
    int64_t(*count)[2] = arg; /* of queries, of keys: unmet, met */
    const guarded *input = inputs[count[2][0]];
    count[count[2][0]][input->used[guarded_at(input, b, row, head, 0)]]++;
}

static void whole_items_leave_no_row_alone(void **state) {
    (void)state;
    int64_t whole = 0, missed = 0; /* items of which that is true, and of those what was not seen */
    for (uint64_t seed = 31000; seed < 31000 + 400; seed++) {
        kernel_case *c =
            case_new(seed, RA_F32,
                     &(case_options){.max_rows = 9, .max_keys = 9, .amplitude = 1, .single = true, .causal = seed % 4 == 0});
        int64_t count[3][2] = {{0}};
        for (int keys = 0; keys < 2; keys++) {
            count[2][0] = keys;
            case_rows(c, keys, count_if_met, count);
        }
        const bool all = count[0][0] == 0 && count[1][0] == 0 && count[0][1] > 0 && count[1][1] > 0;
        const bool said = ra_item_whole(&c->problem, &c->items[0]);
        if (said) assert_true(all);
        whole += all;
        missed += all && !said;
        case_free(c);
    }
    assert_true(whole > 40 && missed < whole / 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_agrees_with_float64_on_random_items),
        cmocka_unit_test(forward_agrees_with_float64_on_scores_of_tens),
        cmocka_unit_test(forward_agrees_with_float64_over_many_key_blocks),
        cmocka_unit_test(forward_follows_scores_that_grow_without_bound),
        cmocka_unit_test(vast_scores_are_right),
        cmocka_unit_test(long_sums_of_one_sign_are_right),
        cmocka_unit_test(forward_keeps_values_that_are_tiny),
        cmocka_unit_test(backward_keeps_gradients_that_are_tiny),
        cmocka_unit_test(forward_drops_the_same_pairs_as_the_definition),
        cmocka_unit_test(backward_agrees_with_float64_on_random_items),
        cmocka_unit_test(backward_agrees_with_float64_on_scores_of_tens),
        cmocka_unit_test(backward_agrees_with_float64_over_many_blocks),
        cmocka_unit_test(single_steps_of_many_tiles_write_gradients),
        cmocka_unit_test(whole_items_leave_no_row_alone),
        cmocka_unit_test(backward_drops_the_same_pairs_as_forward),
        cmocka_unit_test(scales_of_zero_and_below_are_right),
        cmocka_unit_test(few_rows_meet_many_keys),
        cmocka_unit_test(tails_of_every_length_are_right),
        cmocka_unit_test(results_do_not_depend_on_the_number_of_workers),
        cmocka_unit_test(gradients_do_not_depend_on_who_sums_them),
        cmocka_unit_test(a_poisoned_row_reaches_only_the_rows_that_attend_to_it),
        cmocka_unit_test(a_poisoned_query_reaches_only_the_keys_it_attends_to),
        cmocka_unit_test(rows_whose_every_score_is_minus_infinity_are_empty),
        cmocka_unit_test(gradients_are_the_slopes_of_forward),
#ifdef COUNTED_SCALAR_TILES
        cmocka_unit_test(steps_without_nan_are_never_left_to_the_scalar_kernel),
#endif
        cmocka_unit_test(tensors_have_begun_at_every_offset),
    };
    return cmocka_run_group_tests_name("kernel_step", tests, NULL, NULL);
}

#endif
