/* Passes over rows of which only some are used, in tensors of every layout at every offset: each used row gets what it should,
 * each other row of a result its zeros, and nothing else is touched. */
#include "kernel_case.h"

enum { MAX_SETS = 5 };

typedef struct rows_case {
    rng r;
    ra_problem problem;
    int64_t rows, heads;
    ra_used sets[MAX_SETS];
    ra_used_rows used;
    unsigned char *is_used; /* [rows][heads] */
    ra_workers *workers;
} rows_case;

static ra_span part_of(rng *r, int64_t count) {
    ra_span s = {.start = rng_int(r, 0, count - 1), .step = rng_int(r, 1, 6)};
    s.count = rng_int(r, 1, (count - 1 - s.start) / s.step + 1);
    if (rng_one_in(r, 2)) s.start = rng_int(r, 0, ra_min(s.step, count) - 1), s.count = (count - 1 - s.start) / s.step + 1;
    return rng_one_in(r, 4) ? (ra_span){0, 1, count} : s;
}

/* Of small tensors, and of some that are large enough to be streamed. */
static rows_case case_of_rows(uint64_t seed, ra_dtype dtype) {
    rows_case c = {.r = {.seed = seed}};
    rng *r = &c.r;
    const int64_t size = (int64_t)ra_dtype_size(dtype);
    c.problem = (ra_problem){.dtype = dtype, .batch = rng_int(r, 1, 2), .head_dim = rng_one_in(r, 3) ? 64 : rng_int(r, 1, 70)};
    c.heads = rng_one_in(r, 12) ? rng_int(r, 200, 300) : rng_int(r, 1, 5);
    c.rows = rng_one_in(r, 4) ? (1 << 20) / (c.problem.batch * c.heads * c.problem.head_dim * size) + rng_int(r, 1, 50)
                              : rng_int(r, 1, 100);
    c.problem.rows_q = c.rows;
    c.problem.heads = c.problem.kv_heads = c.heads;
    c.is_used = calloc((size_t)(c.rows * c.heads), 1);
    assert_non_null(c.is_used);
    c.used.count = rng_int(r, 0, MAX_SETS);
    for (int64_t i = 0; i < c.used.count; i++) {
        c.sets[i] = (ra_used){part_of(r, c.rows), part_of(r, c.heads)};
        for (int64_t n = 0; n < c.sets[i].rows.count; n++)
            for (int64_t h = 0; h < c.sets[i].heads.count; h++)
                c.is_used[(c.sets[i].rows.start + n * c.sets[i].rows.step) * c.heads + c.sets[i].heads.start +
                          h * c.sets[i].heads.step] = 1;
    }
    if (c.used.count == 0) memset(c.is_used, 1, (size_t)(c.rows * c.heads));
    assert_int_equal(ra_workers_create((int)rng_int(r, 1, 3), &c.workers), RA_OK);
    return c;
}
static void rows_case_free(rows_case *c) {
    ra_workers_destroy(c->workers);
    free(c->is_used);
}

/* Indices reach all rows, or used ones alone. */
static void reach(const rows_case *c, guarded *g, bool all) {
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t row = 0; row < g->rows; row++)
            for (int64_t head = 0; head < g->heads; head++)
                if (all || c->is_used[row * c->heads + head]) guarded_use(g, b, row, head);
    guarded_keep(g);
}
static guarded tensor_of(rows_case *c, ra_dtype dtype, int64_t dim, bool all) {
    guarded g = guarded_new(&c->r, dtype, c->problem.batch, c->rows, c->heads, dim);
    reach(c, &g, all);
    return g;
}
static void set_used(rows_case *c, guarded *g, double low) {
    for (int64_t i = 0; i < g->elements; i++)
        if (g->used[i]) set_element(g->tensor.data, g->dtype, i, low + fabs(rng_normal(&c->r)));
}

static void used_are(const guarded *g, double value) {
    for (int64_t i = 0; i < g->elements; i++)
        if (g->used[i]) assert_true(get_element(g->tensor.data, g->dtype, i) == value);
    guarded_check(g, false);
}

/* A used row has what `want` says, where that is given; all others have `gap`. */
static void check_elements(rows_case *c, const guarded *g,
                           double (*want)(rows_case *, int64_t, int64_t, int64_t, int64_t, void *), double gap, void *arg) {
    for (int64_t b = 0; b < g->batches; b++)
        for (int64_t row = 0; row < g->rows; row++)
            for (int64_t head = 0; head < g->heads; head++)
                for (int64_t d = 0; d < g->dim; d++) {
                    const bool is_used = c->is_used[row * c->heads + head];
                    const double x = is_used && want ? want(c, b, row, head, d, arg) : gap, y = guarded_get(g, b, row, head, d);
                    if (x != y || signbit(x) != signbit(y))
                        fail_msg("row %lld of head %lld, element %lld: %g, not %g", (long long)row, (long long)head,
                                 (long long)d, y, x);
                }
    guarded_check(g, false);
}

static ra_dtype state_of(ra_dtype dtype) { return dtype == RA_F64 ? RA_F64 : RA_F32; }

static double rounded(ra_dtype dtype, double value) {
    double room;
    set_element(&room, dtype, 0, value);
    return get_element(&room, dtype, 0);
}

/* Parts sums: the upper halves go where `result` has them. Returns the lower ones. */
static guarded parted(rows_case *c, const guarded *sums, guarded *result) {
    guarded lower = tensor_of(c, c->problem.dtype, c->problem.head_dim, false);
    for (int64_t b = 0; b < sums->batches; b++)
        for (int64_t row = 0; row < sums->rows; row++)
            for (int64_t head = 0; head < sums->heads; head++)
                for (int64_t d = 0; d < sums->dim && c->is_used[row * c->heads + head]; d++) {
                    uint32_t bits;
                    memcpy(&bits, (const float *)sums->tensor.data + guarded_at(sums, b, row, head, d), sizeof bits);
                    ((uint16_t *)result->tensor.data)[guarded_at(result, b, row, head, d)] = (uint16_t)(bits >> 16);
                    ((uint16_t *)lower.tensor.data)[guarded_at(&lower, b, row, head, d)] = (uint16_t)bits;
                }
    return lower;
}

static double converted(rows_case *c, int64_t b, int64_t row, int64_t head, int64_t d, void *sums) {
    return rounded(c->problem.dtype, guarded_get(sums, b, row, head, d));
}

static void gradients_are_the_sums_of_used_rows_between_zeros(void **state) {
    (void)state;
    for (uint64_t seed = 20000; seed < 20000 + (uint64_t)case_share(200); seed++) {
        rows_case c = case_of_rows(seed, seed % 2 ? RA_BF16 : RA_F16);
        c.used.sets = c.sets;
        guarded sums = tensor_of(&c, RA_F32, c.problem.head_dim, false);
        guarded result = tensor_of(&c, c.problem.dtype, c.problem.head_dim, true);
        ra_rows_zero(&c.problem, c.workers, &c.used, sums.tensor, sizeof(float), c.rows, c.heads);
        used_are(&sums, 0);
        set_used(&c, &sums, 0);
        const bool halves = seed % 4 < 2;
        guarded lower = halves ? parted(&c, &sums, &result) : (guarded){0};
        ra_rows_convert(&c.problem, c.workers, &c.used, halves, result.tensor, halves ? lower.tensor : sums.tensor, c.rows,
                        c.heads);
        check_elements(&c, &result, converted, 0, &sums);
        guarded_free(&sums);
        guarded_free(&lower);
        guarded_free(&result);
        rows_case_free(&c);
    }
}

static void rows_that_no_item_meets_are_zero_and_minus_infinity(void **state) {
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16, RA_F64};
    const ra_tensor none = {0};
    for (uint64_t seed = 21000; seed < 21000 + (uint64_t)case_share(200); seed++) {
        rows_case c = case_of_rows(seed, dtypes[seed % 4]);
        c.used.sets = c.sets;
        guarded out = tensor_of(&c, c.problem.dtype, c.problem.head_dim, true);
        guarded lse = tensor_of(&c, state_of(c.problem.dtype), 0, true);
        ra_rows_fill(&c.problem, c.workers, &c.used, true, out.tensor, seed % 3 ? lse.tensor : none, none, none);
        check_elements(&c, &out, NULL, 0, NULL);
        if (seed % 3) check_elements(&c, &lse, NULL, -INFINITY, NULL);
        guarded_free(&out);
        guarded_free(&lse);
        rows_case_free(&c);
    }
}

static double three(rows_case *c, int64_t b, int64_t row, int64_t head, int64_t d, void *arg) {
    (void)c, (void)b, (void)row, (void)head, (void)d, (void)arg;
    return 3;
}

static void gaps_are_filled_and_used_rows_are_left_alone(void **state) {
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16, RA_F64};
    const ra_tensor none = {0};
    for (uint64_t seed = 23000; seed < 23000 + (uint64_t)case_share(200); seed++) {
        rows_case c = case_of_rows(seed, dtypes[seed % 4]);
        c.used.sets = c.sets;
        guarded out = tensor_of(&c, c.problem.dtype, c.problem.head_dim, true);
        guarded lse = tensor_of(&c, state_of(c.problem.dtype), 0, true);
        guarded *both[] = {&out, &lse};
        for (int i = 0; i < 2; i++)
            for (int64_t at = 0; at < both[i]->elements; at++)
                if (both[i]->used[at]) set_element(both[i]->tensor.data, both[i]->dtype, at, 3);
        ra_rows_fill_gaps(&c.problem, c.workers, &c.used, out.tensor, seed % 3 ? lse.tensor : none, c.rows, c.heads);
        check_elements(&c, &out, three, 0, NULL);
        if (seed % 3) check_elements(&c, &lse, three, -INFINITY, NULL);
        guarded_free(&out);
        guarded_free(&lse);
        rows_case_free(&c);
    }
}

typedef struct forward_state {
    guarded acc, m, l;
    const double *sums; /* what acc held */
} forward_state;

static double quotient(rows_case *c, int64_t b, int64_t row, int64_t head, int64_t d, void *arg) {
    const forward_state *s = arg;
    const double acc = s->sums[guarded_at(&s->acc, b, row, head, d)] / guarded_get(&s->l, b, row, head, 0);
    return rounded(c->problem.dtype, c->problem.dtype == RA_F64 ? acc : (double)(float)acc);
}
static double log_of_sum(rows_case *c, int64_t b, int64_t row, int64_t head, int64_t d, void *arg) {
    const forward_state *s = arg;
    const double lse = guarded_get(&s->m, b, row, head, d) + log(guarded_get(&s->l, b, row, head, d));
    return c->problem.dtype == RA_F64 ? lse : (double)(float)lse;
}

static void a_state_is_kept_and_finished_in_used_rows_alone(void **state) {
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16, RA_F64};
    const ra_tensor none = {0};
    for (uint64_t seed = 22000; seed < 22000 + (uint64_t)case_share(200); seed++) {
        rows_case c = case_of_rows(seed, dtypes[seed % 4]);
        c.used.sets = c.sets;
        const ra_dtype dtype = c.problem.dtype, sums = state_of(dtype);
        const bool in_out = sums == dtype && seed % 8 < 4; /* acc is out itself */
        forward_state s = {tensor_of(&c, sums, c.problem.head_dim, false), tensor_of(&c, sums, 0, false),
                           tensor_of(&c, sums, 0, false), NULL};
        guarded out = tensor_of(&c, dtype, c.problem.head_dim, true), lse = tensor_of(&c, sums, 0, true);
        ra_rows_fill(&c.problem, c.workers, &c.used, false, none, none, s.m.tensor, s.l.tensor);
        guarded *all[] = {&s.acc, &s.m, &s.l};
        for (int i = 0; i < 3; i++) {
            if (i > 0) used_are(all[i], i == 1 ? -INFINITY : 0);
            set_used(&c, all[i], i == 2 ? 0.5 : 0);
        }
        guarded_read(&s.acc);
        s.sums = s.acc.values;
        if (in_out) reach(&c, &s.acc, true);
        const bool halves = ra_dtype_size(dtype) == 2 && seed % 8 < 4;
        guarded lower = halves ? parted(&c, &s.acc, &out) : (guarded){0};
        ra_rows_finish(&c.problem, c.workers, &c.used, halves, halves ? lower.tensor : s.acc.tensor, s.m.tensor, s.l.tensor,
                       in_out ? s.acc.tensor : out.tensor, seed % 3 ? lse.tensor : none);
        check_elements(&c, in_out ? &s.acc : &out, quotient, 0, &s);
        if (seed % 3) check_elements(&c, &lse, log_of_sum, -INFINITY, &s);
        for (int i = 0; i < 3; i++) guarded_free(all[i]);
        guarded_free(&lower);
        guarded_free(&out);
        guarded_free(&lse);
        rows_case_free(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_the_sums_of_used_rows_between_zeros),
        cmocka_unit_test(rows_that_no_item_meets_are_zero_and_minus_infinity),
        cmocka_unit_test(gaps_are_filled_and_used_rows_are_left_alone),
        cmocka_unit_test(a_state_is_kept_and_finished_in_used_rows_alone),
    };
    return cmocka_run_group_tests_name("kernel_rows", tests, NULL, NULL);
}
