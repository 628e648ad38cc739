/* Is a result right? Against the reference, and the plan's numbers against what happened. */
#include <math.h>
#include <stdlib.h>

#include "support.h"

static test_errors worst[4]; /* by dtype */

static void print_case(const test_case *c) {
    char text[2048];
    print_error("case: %s\n", test_case_text(c, text, sizeof text));
}

/* One tensor: error over bound, kept in *worst_so_far; false and a line when it is beyond. */
static bool tensor_holds(const test_case *c, const char *name, ref_error error, double max_score, bool lse,
                         double *worst_so_far) {
    double bound = ref_bound(c->desc.dtype, lse, max_score), share = error.ratio / bound;
    if (share > *worst_so_far) *worst_so_far = share;
    if (share <= 1) return true;
    print_error("%s: error %.3g over the largest sum, bound %.3g, worst at element %lld\n", name, error.ratio, bound,
                (long long)error.where);
    return false;
}

/* What the plan says it will do, against counts of the reference and of the transport. */
static bool plan_holds(const test_case *c, const test_result *result, const ref_outputs *want) {
    int64_t pairs = 0, holes = 0;
    bool held = true;
    for (int rank = 0; rank < c->ranks; rank++) {
        ra_rank_summary plan = {.struct_size = sizeof plan};
        const ra_rank_summary *measured = &result->ranks[rank];
        if (ra_plan_summary(&c->desc, rank, c->ranks, &plan) != RA_OK) {
            print_error("ra_plan_summary: %s\n", ra_last_error());
            return false;
        }
        pairs += plan.pairs;
        holes += plan.holes;
        struct {
            const char *what;
            int64_t planned, seen;
            bool wanted;
        } list[] = {
            {"workspace, forward", plan.workspace_bytes, measured->workspace_bytes, true},
            {"workspace, backward", plan.workspace_bytes_backward, measured->workspace_bytes_backward, true},
            {"bytes sent forward, by ra_stats", plan.bytes_sent, result->forward[rank].bytes_sent, true},
            {"bytes sent backward, by ra_stats", plan.bytes_sent_backward, result->backward[rank].bytes_sent, c->backward},
            {"bytes sent forward, counted", plan.bytes_sent, measured->bytes_sent, c->transport == TEST_CUSTOM},
            {"bytes sent backward, counted", plan.bytes_sent_backward, measured->bytes_sent_backward,
             c->transport == TEST_CUSTOM && c->backward},
        };
        for (size_t n = 0; n < sizeof list / sizeof *list; n++) {
            if (!list[n].wanted || list[n].planned == list[n].seen) continue;
            print_error("rank %d: %s: planned %lld, was %lld\n", rank, list[n].what, (long long)list[n].planned,
                        (long long)list[n].seen);
            held = false;
        }
    }
    if (c->desc.query_placement == RA_REPLICATED) return held;
    if (pairs != want->pairs) print_error("pairs: planned %lld, are %lld\n", (long long)pairs, (long long)want->pairs);
    if (holes != want->holes) print_error("holes: planned %lld, are %lld\n", (long long)holes, (long long)want->holes);
    return held && pairs == want->pairs && holes == want->holes;
}

void test_result_holds(const test_case *c, const test_data *data, const test_result *result) {
    const ra_attention_desc *desc = &c->desc;
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
    int64_t rows = desc->batch * desc->seq_q * desc->heads, queries = rows * desc->head_dim;
    int64_t keys = desc->batch * desc->seq_k * kv_heads * desc->head_dim;
    if (result->status != RA_OK) {
        print_case(c);
        fail_msg("%s: %s", ra_status_name(result->status), result->error);
    }
    ref_inputs inputs = test_inputs(c, data);
    ref_outputs want;
    assert_true(ref_outputs_alloc(desc, desc->seq_q, desc->seq_k, c->backward, &want));
    assert_true(c->backward ? ref_backward(desc, &inputs, &want) : ref_forward(desc, &inputs, &want));
    double score = want.max_score;
    test_errors *w = &worst[desc->dtype];
    bool held =
        tensor_holds(c, "out", ref_compare(result->out, want.out, want.m_out, queries, desc->dtype), score, false, &w->out);
    held &= tensor_holds(c, "lse", ref_compare_lse(result->lse, want.lse, want.m_lse, rows), score, true, &w->lse);
    if (c->backward) {
        held &= tensor_holds(c, "dq", ref_compare(result->dq, want.dq, want.m_dq, queries, desc->dtype), score, false, &w->dq);
        held &= tensor_holds(c, "dk", ref_compare(result->dk, want.dk, want.m_dk, keys, desc->dtype), score, false, &w->dk);
        held &= tensor_holds(c, "dv", ref_compare(result->dv, want.dv, want.m_dv, keys, desc->dtype), score, false, &w->dv);
    }
    held &= plan_holds(c, result, &want);
    ref_outputs_free(&want);
    if (!held) {
        print_case(c);
        fail_msg("the result is not the function's");
    }
}

void test_case_holds_on(const test_ring *ring, const test_case *c) {
    test_data data = test_data_create(c);
    test_result result = test_run_on(ring, c, &data);
    test_result_holds(c, &data, &result);
    test_result_free(&result);
    test_data_free(&data);
}

void test_case_holds(const test_case *c) {
    test_ring ring;
    test_ring_open(&ring, c->ranks, c->transport);
    test_case_holds_on(&ring, c);
    test_ring_close(&ring);
}

void test_data_holds(const test_case *c, const test_data *data) {
    test_result result = test_run(c, data);
    test_result_holds(c, data, &result);
    test_result_free(&result);
}

static int64_t cases_hold(uint64_t seed, int64_t count, void (*draw)(test_case *c, test_rng *rng, int64_t n), bool poison) {
    test_rng rng = {test_seed(seed)};
    int64_t poisoned = 0;
    for (int64_t n = count; n > 0; n--) {
        test_case c;
        draw(&c, &rng, n);
        test_data data = test_data_create(&c);
        if (poison) poisoned += test_data_poison(&c, &data);
        test_data_holds(&c, &data);
        test_data_free(&data);
    }
    return poisoned;
}

void test_cases_hold(uint64_t seed, int64_t fast, int64_t slow, void (*draw)(test_case *c, test_rng *rng, int64_t n)) {
    cases_hold(seed, test_cases(fast, slow), draw, false);
}

int64_t test_poisoned_cases_hold(uint64_t seed, int64_t fast, int64_t slow,
                                 void (*draw)(test_case *c, test_rng *rng, int64_t n)) {
    return cases_hold(seed, test_cases(fast, slow), draw, true);
}

int test_print_worst(void **state) {
    (void)state;
    static const char *const dtypes[] = {"f32", "bf16", "f16", "f64"};
    for (int n = 0; n < 4; n++) {
        print_message("%s, largest error over its bound: out %.2f, lse %.2f, dq %.2f, dk %.2f, dv %.2f\n", dtypes[n],
                      worst[n].out, worst[n].lse, worst[n].dq, worst[n].dk, worst[n].dv);
    }
    return 0;
}
