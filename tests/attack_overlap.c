/* Outputs with strides of any kind: one that overlaps itself, another output or an input in a single element is refused, and
 * every slice and permutation of a plain tensor is taken. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

enum { ARENA = 4096, MIDDLE = ARENA / 2 };

typedef struct shape {
    int64_t batch, rows, heads, dim;
} shape;

static float arena[ARENA];
static unsigned char marks[ARENA];

/* Marks the elements of a tensor; true if one was marked before. */
static bool mark(const shape *s, const ra_tensor *t) {
    bool met = false;
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t r = 0; r < s->rows; r++)
            for (int64_t h = 0; h < s->heads; h++)
                for (int64_t d = 0; d < s->dim; d++) {
                    int64_t at = (float *)t->data - arena + b * t->batch + r * t->row + h * t->head + d;
                    assert_in_range(at, 0, ARENA - 1);
                    met |= marks[at];
                    marks[at] = 1;
                }
    return met;
}

static ra_status forward(ra_plan *plan, ra_tensor q, ra_tensor out, const shape *s) {
    static float keys[64 * 3 * 3], lse[64];
    ra_tensor kv = ra_tensor_bnhd(keys, s->rows, s->heads, s->dim);
    return ra_forward(plan, &(ra_forward_args){.q = q, .k = kv, .v = kv, .out = out,
                                               .lse = ra_tensor_lse(lse, s->rows, s->heads)});
}

static ra_plan *plan_of(ra_comm *comm, const shape *s) {
    ra_attention_desc desc;
    ra_plan *plan = NULL;
    ra_attention_desc_init(&desc);
    desc.batch = s->batch;
    desc.seq_q = desc.seq_k = s->rows;
    desc.heads = s->heads;
    desc.head_dim = s->dim;
    desc.threads = 1;
    assert_int_equal(ra_plan_create(comm, &desc, &plan), RA_OK);
    return plan;
}

static int64_t random_stride(test_rng *rng) { return rng_below(rng, 101) - 50; }

static void outputs_that_overlap_anything_are_refused_whatever_their_strides(void **state) {
    (void)state;
    test_rng rng = {test_seed(7)};
    int64_t cases = test_cases(20000, 500000), itself = 0, input = 0, taken = 0;
    ra_comm *comm = NULL;
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    for (int64_t n = 0; n < cases; n++) {
        shape s = {1 + rng_below(&rng, 3), 1 + rng_below(&rng, 4), 1 + rng_below(&rng, 3), 1 + rng_below(&rng, 4)};
        ra_plan *plan = plan_of(comm, &s);
        ra_tensor out = {arena + MIDDLE, random_stride(&rng), random_stride(&rng), random_stride(&rng)}, q = out;
        if (rng_chance(&rng, 30)) q = (ra_tensor){NULL, random_stride(&rng), random_stride(&rng), random_stride(&rng)};
        q.data = arena + MIDDLE + rng_below(&rng, 200) - 100;
        memset(marks, 0, sizeof marks);
        bool self = mark(&s, &out);
        memset(marks, 0, sizeof marks);
        mark(&s, &q);
        bool met = false;
        static unsigned char of_q[ARENA];
        memcpy(of_q, marks, sizeof marks);
        memset(marks, 0, sizeof marks);
        mark(&s, &out);
        for (int i = 0; i < ARENA; i++) met |= marks[i] && of_q[i];
        ra_status status = forward(plan, q, out, &s);
        if ((self || met) && status != RA_INVALID)
            fail_msg("case %lld: %s, though out overlaps %s: [%lld %lld %lld %lld], out strides %lld %lld %lld", (long long)n,
                     ra_status_name(status), self ? "itself" : "q", (long long)s.batch, (long long)s.rows, (long long)s.heads,
                     (long long)s.dim, (long long)out.batch, (long long)out.row, (long long)out.head);
        itself += self;
        input += met;
        taken += status == RA_OK;
        ra_plan_destroy(plan);
    }
    print_message("%lld outputs over themselves, %lld over an input: all refused; %lld of %lld taken\n", (long long)itself,
                  (long long)input, (long long)taken, (long long)cases);
    assert_true(itself > 100 && input > 100 && taken > 100);
    ra_comm_destroy(comm);
}

/* q and out are slices of one packed tensor [.., .., .., 2 * dim + gap], its dimensions in any order, with any steps. */
static void slices_and_permutations_of_a_plain_tensor_are_taken(void **state) {
    (void)state;
    test_rng rng = {test_seed(8)};
    ra_comm *comm = NULL;
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    for (int n = 0; n < 2000; n++) {
        shape s = {1 + rng_below(&rng, 3), 1 + rng_below(&rng, 4), 1 + rng_below(&rng, 3), 1 + rng_below(&rng, 4)};
        ra_plan *plan = plan_of(comm, &s);
        const int64_t counts[3] = {s.batch, s.rows, s.heads};
        int64_t strides[3], next = 2 * s.dim + rng_below(&rng, 3);
        int first = (int)rng_below(&rng, 3), turn = 1 + (int)rng_below(&rng, 2);
        for (int i = 0; i < 3; i++) {
            int at = (first + i * turn) % 3;
            strides[at] = next * (1 + rng_below(&rng, 2));
            next = strides[at] * counts[at];
        }
        bool swapped = rng_chance(&rng, 50);
        ra_tensor q = {arena + swapped * s.dim, strides[0], strides[1], strides[2]}, out = q;
        out.data = arena + !swapped * s.dim;
        ra_status status = forward(plan, q, out, &s);
        if (status != RA_OK) fail_msg("case %d: %s", n, ra_last_error());
        ra_plan_destroy(plan);
    }
    ra_comm_destroy(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_that_overlap_anything_are_refused_whatever_their_strides),
        cmocka_unit_test(slices_and_permutations_of_a_plain_tensor_are_taken),
    };
    return cmocka_run_group_tests_name("attack_overlap", tests, NULL, NULL);
}
