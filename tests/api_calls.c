/* Every public function with wrong arguments: a status, a sentence, and nothing touched. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

#define N 16
#define H 2
#define D 8
#define ELEMENTS (N * H * D)

/* One rank with a plan and its tensors. */
typedef struct fixture {
    test_case c;
    ra_comm *comm;
    ra_plan *plan;
    float q[ELEMENTS], k[ELEMENTS], v[ELEMENTS], out[ELEMENTS], lse[N * H];
    float dout[ELEMENTS], dlse[N * H], dq[ELEMENTS], dk[ELEMENTS], dv[ELEMENTS];
    ra_forward_args forward;
    ra_backward_args backward;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    if (!f) return -1;
    test_case_init(&f->c);
    f->c.desc.causal = true;
    if (ra_comm_self(&f->comm) != RA_OK || ra_plan_create(f->comm, &f->c.desc, &f->plan) != RA_OK) return -1;
    for (int n = 0; n < ELEMENTS; n++) f->q[n] = f->k[n] = f->v[n] = f->dout[n] = (float)(n % 7) - 3;
    ra_tensor tensor = ra_tensor_bnhd(NULL, N, H, D), lse = ra_tensor_lse(NULL, N, H);
    f->forward = (ra_forward_args){.q = tensor, .k = tensor, .v = tensor, .out = tensor, .lse = lse};
    f->forward.q.data = f->q;
    f->forward.k.data = f->k;
    f->forward.v.data = f->v;
    f->forward.out.data = f->out;
    f->forward.lse.data = f->lse;
    f->backward = (ra_backward_args){.q = f->forward.q,
                                     .k = f->forward.k,
                                     .v = f->forward.v,
                                     .out = f->forward.out,
                                     .lse = f->forward.lse,
                                     .dout = tensor,
                                     .dlse = lse,
                                     .dq = tensor,
                                     .dk = tensor,
                                     .dv = tensor};
    f->backward.dout.data = f->dout;
    f->backward.dlse.data = f->dlse;
    f->backward.dq.data = f->dq;
    f->backward.dk.data = f->dk;
    f->backward.dv.data = f->dv;
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    ra_plan_destroy(f->plan);
    ra_comm_destroy(f->comm);
    free(f);
    return 0;
}

static void invalid(ra_status status, const char *names) {
    if (status != RA_INVALID) fail_msg("%s instead of RA_INVALID for a bad %s", ra_status_name(status), names);
    if (!strstr(ra_last_error(), names)) fail_msg("'%s' does not name %s", ra_last_error(), names);
}

static void good_arguments_are_taken(void **state) {
    fixture *f = *state;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    assert_int_equal(ra_backward(f->plan, &f->backward), RA_OK);
    f->backward.dlse.data = NULL;
    assert_int_equal(ra_backward(f->plan, &f->backward), RA_OK);
    f->forward.lse.data = NULL;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    /* k and v may be one and the same array, and q too. */
    f->forward.v.data = f->forward.q.data = f->k;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
}

static void forward_refuses_bad_tensors(void **state) {
    fixture *f = *state;
    invalid(ra_forward(NULL, &f->forward), "plan");
    invalid(ra_forward(f->plan, NULL), "args");
    for (int n = 0; n < N * H; n++) f->lse[n] = 42;
    for (int n = 0; n < ELEMENTS; n++) f->out[n] = 42;
    struct {
        const char *name;
        size_t offset;
    } list[] = {{"q", offsetof(ra_forward_args, q)},
                {"k", offsetof(ra_forward_args, k)},
                {"v", offsetof(ra_forward_args, v)},
                {"out", offsetof(ra_forward_args, out)}};
    for (size_t n = 0; n < 4; n++) {
        ra_forward_args args = f->forward;
        ((ra_tensor *)(void *)((char *)&args + list[n].offset))->data = NULL;
        invalid(ra_forward(f->plan, &args), list[n].name);
    }
    struct {
        float *where;
        const char *name;
    } overlaps[] = {{f->q, "q"}, {f->k, "k"}, {f->v, "v"}, {f->q + ELEMENTS - 1, "q"}, {f->lse, "lse"}};
    for (size_t n = 0; n < 5; n++) { /* the output on top of something else */
        ra_forward_args args = f->forward;
        args.out.data = overlaps[n].where;
        invalid(ra_forward(f->plan, &args), "out");
        assert_non_null(strstr(ra_last_error(), overlaps[n].name));
    }
    ra_forward_args args = f->forward;
    args.lse.data = f->v + 3;
    invalid(ra_forward(f->plan, &args), "lse");
    args = f->forward;
    args.out.row = 0; /* rows of the output on top of each other */
    invalid(ra_forward(f->plan, &args), "out");
    args = f->forward;
    args.out.head = D - 1;
    invalid(ra_forward(f->plan, &args), "out");
    args = f->forward;
    args.lse.row = 0;
    invalid(ra_forward(f->plan, &args), "lse");
    args = f->forward;
    args.q.row = INT64_MAX / 2; /* an extent beyond any address */
    invalid(ra_forward(f->plan, &args), "q");
    for (int n = 0; n < N * H; n++) assert_true(f->lse[n] == 42);
    for (int n = 0; n < ELEMENTS; n++) assert_true(f->out[n] == 42);
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK); /* and nothing is broken */
}

static void backward_refuses_bad_tensors(void **state) {
    fixture *f = *state;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    invalid(ra_backward(NULL, &f->backward), "plan");
    invalid(ra_backward(f->plan, NULL), "args");
    for (int n = 0; n < ELEMENTS; n++) f->dq[n] = f->dk[n] = f->dv[n] = 42;
    struct {
        const char *name;
        size_t offset;
    } list[] = {{"q", offsetof(ra_backward_args, q)},     {"k", offsetof(ra_backward_args, k)},
                {"v", offsetof(ra_backward_args, v)},     {"out", offsetof(ra_backward_args, out)},
                {"lse", offsetof(ra_backward_args, lse)}, {"dout", offsetof(ra_backward_args, dout)},
                {"dq", offsetof(ra_backward_args, dq)},   {"dk", offsetof(ra_backward_args, dk)},
                {"dv", offsetof(ra_backward_args, dv)}};
    for (size_t n = 0; n < 9; n++) {
        ra_backward_args args = f->backward;
        ((ra_tensor *)(void *)((char *)&args + list[n].offset))->data = NULL;
        invalid(ra_backward(f->plan, &args), list[n].name);
    }
    static const size_t outputs[] = {offsetof(ra_backward_args, dq), offsetof(ra_backward_args, dk),
                                     offsetof(ra_backward_args, dv)};
    static const char *const names[] = {"dq", "dk", "dv"};
    for (size_t n = 0; n < 3; n++) {
        float *inputs[] = {f->q, f->k, f->v, f->out, f->dout, f->lse, f->dlse, n == 0 ? f->dk : f->dq, n == 2 ? f->dk : f->dv};
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
            ra_backward_args args = f->backward;
            ((ra_tensor *)(void *)((char *)&args + outputs[n]))->data = inputs[i];
            invalid(ra_backward(f->plan, &args), names[n]);
        }
        ra_backward_args args = f->backward;
        ((ra_tensor *)(void *)((char *)&args + outputs[n]))->row = 1;
        invalid(ra_backward(f->plan, &args), names[n]);
    }
    for (int n = 0; n < ELEMENTS; n++) assert_true(f->dq[n] == 42 && f->dk[n] == 42 && f->dv[n] == 42);
    assert_int_equal(ra_backward(f->plan, &f->backward), RA_OK);
}

static void plans_and_summaries_refuse_bad_arguments(void **state) {
    fixture *f = *state;
    const ra_attention_desc *desc = &f->c.desc;
    ra_plan *plan = NULL;
    invalid(ra_plan_create(NULL, desc, &plan), "comm");
    invalid(ra_plan_create(f->comm, NULL, &plan), "desc");
    invalid(ra_plan_create(f->comm, desc, NULL), "plan");
    assert_null(plan);
    ra_plan_destroy(NULL);
    ra_rank_summary summary = {.struct_size = sizeof summary};
    invalid(ra_plan_summary(NULL, 0, 1, &summary), "desc");
    invalid(ra_plan_summary(desc, 0, 1, NULL), "summary");
    invalid(ra_plan_summary(desc, -1, 1, &summary), "rank");
    invalid(ra_plan_summary(desc, 1, 1, &summary), "rank");
    invalid(ra_plan_summary(desc, 0, 0, &summary), "ranks");
    invalid(ra_plan_summary(desc, 0, -3, &summary), "ranks");
    summary.struct_size = 0;
    invalid(ra_plan_summary(desc, 0, 1, &summary), "struct_size");
    ra_shard queries, keys;
    invalid(ra_shard_rows(NULL, 0, 1, &queries, &keys), "desc");
    invalid(ra_shard_rows(desc, -1, 1, &queries, &keys), "rank");
    invalid(ra_shard_rows(desc, 1, 1, &queries, &keys), "rank");
    invalid(ra_shard_rows(desc, 0, 0, &queries, &keys), "ranks");
    assert_int_equal(ra_shard_rows(desc, 0, 1, NULL, NULL), RA_OK);
    invalid(ra_attention_desc_check(NULL), "desc");
    invalid(ra_attention(NULL, &f->forward), "desc");
    invalid(ra_attention(desc, NULL), "args");
    ra_stats_data stats = {.struct_size = sizeof stats};
    invalid(ra_stats(NULL, &stats), "plan");
    invalid(ra_stats(f->plan, NULL), "stats");
    invalid(ra_comm_stats(NULL, &stats), "comm");
    invalid(ra_comm_stats(f->comm, NULL), "stats");
    stats.struct_size = 3;
    invalid(ra_stats(f->plan, &stats), "struct_size");
    invalid(ra_comm_stats(f->comm, &stats), "struct_size");
}

/* A caller built against a later header passes larger structs: known fields are filled, the rest is left alone. */
static void larger_structs_of_later_versions_are_filled(void **state) {
    fixture *f = *state;
    struct {
        ra_rank_summary summary;
        char later[32];
    } newer;
    memset(&newer, 0x5a, sizeof newer);
    newer.summary.struct_size = sizeof newer;
    assert_int_equal(ra_plan_summary(&f->c.desc, 0, 1, &newer.summary), RA_OK);
    assert_int_equal(newer.summary.rows_q, N);
    struct {
        ra_stats_data stats;
        char later[32];
    } more;
    memset(&more, 0x5a, sizeof more);
    more.stats.struct_size = sizeof more;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    assert_int_equal(ra_stats(f->plan, &more.stats), RA_OK);
    assert_true(more.stats.steps >= 1);
}

/* One that was built against version 0.1 passes a summary without the fields that came later. */
static void summaries_of_earlier_versions_are_filled_as_far_as_they_go(void **state) {
    fixture *f = *state;
    const size_t earlier = offsetof(ra_rank_summary, state_rows);
    ra_rank_summary summaries[2];
    memset(summaries, 0x5a, sizeof summaries);
    summaries[0].struct_size = (uint32_t)earlier;
    assert_int_equal(ra_plan_summary(&f->c.desc, 0, 1, summaries), RA_OK);
    assert_int_equal(summaries[0].rows_q, N);
    assert_int_equal(summaries[0].state_rows, 0x5a5a5a5a5a5a5a5a);
    ra_rank_summary *second = (ra_rank_summary *)(void *)((char *)summaries + earlier);
    second->struct_size = (uint32_t)earlier;
    assert_int_equal(ra_plan_summaries(&f->c.desc, 2, summaries), RA_OK);
    assert_int_equal(second->rank, 1);
    assert_int_equal(*((char *)second + earlier), 0x5a);
    second->struct_size = (uint32_t)earlier - 1;
    invalid(ra_plan_summaries(&f->c.desc, 2, summaries), "struct_size");
}

/* ------------------------------------------------------------------------------------------------- communicators */

static ra_status refuse_post(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request) {
    (void)ctx, (void)peer, (void)tag, (void)buf, (void)bytes, (void)request;
    return RA_INTERNAL;
}
static ra_status refuse_send(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request) {
    (void)ctx, (void)peer, (void)tag, (void)buf, (void)bytes, (void)request;
    return RA_INTERNAL;
}
static ra_status refuse_wait(void *ctx, void *request, double seconds, int *done, size_t *received) {
    (void)ctx, (void)request, (void)seconds, (void)done, (void)received;
    return RA_INTERNAL;
}
static ra_status refuse_cancel(void *ctx, void *request) {
    (void)ctx, (void)request;
    return RA_OK;
}

static void communicators_refuse_bad_arguments(void **state) {
    fixture *f = *state;
    ra_comm *comm = NULL, *comms[2] = {NULL, NULL};
    invalid(ra_comm_self(NULL), "comm");
    invalid(ra_comm_threads(0, comms), "ranks");
    invalid(ra_comm_threads(-1, comms), "ranks");
    invalid(ra_comm_threads(513, comms), "1..512"); /* refused at once, instead of after minutes and gigabytes */
    invalid(ra_comm_threads(2, NULL), "comm");
    const ra_comm_ops ops = {.struct_size = sizeof ops,
                             .post_recv = refuse_post,
                             .post_send = refuse_send,
                             .wait = refuse_wait,
                             .cancel = refuse_cancel};
    invalid(ra_comm_custom(NULL, NULL, 0, 1, &comm), "ops");
    invalid(ra_comm_custom(&ops, NULL, 0, 1, NULL), "comm");
    invalid(ra_comm_custom(&ops, NULL, 1, 1, &comm), "rank");
    invalid(ra_comm_custom(&ops, NULL, -1, 1, &comm), "rank");
    invalid(ra_comm_custom(&ops, NULL, 0, 0, &comm), "ranks");
    ra_comm_ops bad = ops;
    bad.struct_size = 4;
    invalid(ra_comm_custom(&bad, NULL, 0, 1, &comm), "struct_size");
    bad = ops;
    bad.post_recv = NULL;
    invalid(ra_comm_custom(&bad, NULL, 0, 1, &comm), "post_recv");
    bad = ops;
    bad.post_send = NULL;
    invalid(ra_comm_custom(&bad, NULL, 0, 1, &comm), "post_send");
    bad = ops;
    bad.wait = NULL;
    invalid(ra_comm_custom(&bad, NULL, 0, 1, &comm), "wait");
    bad = ops;
    bad.cancel = NULL;
    invalid(ra_comm_custom(&bad, NULL, 0, 1, &comm), "cancel");
    assert_null(comm);
    invalid(ra_comm_set_timeout(NULL, 1, 1), "comm");
    invalid(ra_comm_set_timeout(f->comm, 0, 1), "timeout");
    invalid(ra_comm_set_timeout(f->comm, -1, 1), "timeout");
    invalid(ra_comm_set_timeout(f->comm, (double)NAN, 1), "timeout");
    invalid(ra_comm_set_timeout(f->comm, 1, 0), "start_timeout");
    assert_int_equal(ra_comm_set_timeout(f->comm, 0.5, 1), RA_OK);
    ra_comm_destroy(NULL);
    ra_comm_abort(NULL, RA_ABORTED, "nobody");
    assert_int_equal(ra_comm_rank(f->comm), 0);
    assert_int_equal(ra_comm_size(f->comm), 1);
    assert_string_equal(ra_comm_transport(f->comm), "self");
    assert_int_equal(ra_comm_rank(NULL), -1);
    assert_int_equal(ra_comm_size(NULL), 0);
    assert_non_null(ra_comm_transport(NULL));
    assert_int_equal(ra_comm_threads(2, comms), RA_OK);
    assert_int_equal(ra_comm_rank(comms[1]), 1);
    assert_int_equal(ra_comm_size(comms[1]), 2);
    assert_string_equal(ra_comm_transport(comms[1]), "threads");
    ra_comm_destroy(comms[1]); /* any order */
    ra_comm_destroy(comms[0]);
    /* One rank needs no peer, so a transport that can do nothing serves. */
    assert_int_equal(ra_comm_custom(&ops, NULL, 0, 1, &comm), RA_OK);
    assert_string_equal(ra_comm_transport(comm), "custom");
    ra_comm_destroy(comm);
}

static void an_aborted_communicator_stays_aborted(void **state) {
    fixture *f = *state;
    ra_comm_abort(f->comm, RA_ABORTED, "the test says so");
    for (int n = 0; n < 2; n++) {
        assert_int_equal(ra_forward(f->plan, &f->forward), RA_ABORTED);
        assert_non_null(strstr(ra_last_error(), "the test says so"));
        ra_plan *plan = NULL;
        assert_int_equal(ra_plan_create(f->comm, &f->c.desc, &plan), RA_ABORTED);
        assert_null(plan);
    }
}

/* -------------------------------------------------------------------------------------------------------- the rest */

static void plan_queries_answer(void **state) {
    fixture *f = *state;
    char whole[8192], small[5];
    int64_t length = ra_plan_report(f->plan, whole, sizeof whole);
    assert_true(length > 0 && length < (int64_t)sizeof whole);
    assert_int_equal(strlen(whole), length);
    assert_int_equal(ra_plan_report(f->plan, NULL, 0), length);
    memset(small, 'x', sizeof small);
    assert_int_equal(ra_plan_report(f->plan, small, sizeof small), length);
    assert_int_equal(small[4], 0);
    assert_memory_equal(small, whole, 4);
    assert_int_equal(ra_plan_schedule(f->plan), RA_SCHEDULE_RING);
    assert_true(ra_plan_bucket(f->plan) >= 1);
    assert_non_null(ra_plan_kernel(f->plan));
    assert_true(strlen(ra_plan_kernel(f->plan)) > 0);
    assert_non_null(ra_plan_reason(f->plan));
    assert_true(ra_plan_workspace(f->plan, false) >= 0);
    assert_true(ra_plan_workspace(f->plan, true) >= 0);
}

static void a_plan_over_the_memory_limit_is_refused_with_the_number(void **state) {
    fixture *f = *state;
    ra_attention_desc desc = f->c.desc;
    ra_rank_summary s = {.struct_size = sizeof s};
    assert_int_equal(ra_plan_summary(&desc, 0, 1, &s), RA_OK);
    desc.memory_limit = 1000; /* the shards alone are more */
    ra_plan *plan = NULL;
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_NOMEM);
    assert_non_null(strstr(ra_last_error(), "memory_limit"));
    assert_null(plan);
    desc.memory_limit = s.shard_bytes + s.shard_bytes_backward + s.workspace_bytes + s.workspace_bytes_backward;
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_OK);
    ra_plan_destroy(plan);
}

static void unknown_kernels_and_missing_devices_are_not_available(void **state) {
    fixture *f = *state;
    ra_attention_desc desc = f->c.desc;
    ra_plan *plan = NULL;
    desc.kernel = "abacus";
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_NOT_AVAILABLE);
    assert_non_null(strstr(ra_last_error(), "abacus"));
    desc.kernel = "a-name-that-is-longer-than-any-kernel-has-ever-had";
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_NOT_AVAILABLE);
    desc.kernel = "scalar";
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_OK);
    assert_string_equal(ra_plan_kernel(plan), "scalar");
    ra_plan_destroy(plan);
}

static void kernels_are_listed(void **state) {
    (void)state;
    ra_kernel_info info;
    int count = 0;
    bool scalar = false;
    while (ra_kernel_list(count, &info)) {
        assert_non_null(info.name);
        assert_non_null(info.reason);
        assert_true(info.available == (info.reason[0] == 0));
        if (strcmp(info.name, "scalar") == 0) scalar = info.available;
        count++;
    }
    assert_true(scalar);
    assert_true(ra_kernel_list(0, NULL));
    assert_false(ra_kernel_list(count, NULL));
    assert_false(ra_kernel_list(-1, &info));
    assert_false(ra_kernel_list(count, &info));
    assert_false(ra_kernel_list(1000000, &info));
    assert_non_null(ra_cpu_features());
}

static void *fresh_thread(void *arg) {
    *(bool *)arg = strcmp(ra_last_error(), "") == 0;
    return NULL;
}

static void each_thread_has_its_own_last_error(void **state) {
    (void)state;
    assert_int_equal(ra_attention_desc_check(NULL), RA_INVALID);
    assert_true(strlen(ra_last_error()) > 0);
    pthread_t thread;
    bool empty = false;
    assert_int_equal(pthread_create(&thread, NULL, fresh_thread, &empty), 0);
    pthread_join(thread, NULL);
    assert_true(empty);
}

static void tensors_have_the_strides_of_c_order(void **state) {
    (void)state;
    float data[1];
    ra_tensor t = ra_tensor_bnhd(data, 5, 3, 7);
    assert_ptr_equal(t.data, data);
    assert_true(t.batch == 105 && t.row == 21 && t.head == 7);
    t = ra_tensor_lse(data, 5, 3);
    assert_ptr_equal(t.data, data);
    assert_true(t.batch == 15 && t.row == 1 && t.head == 5);
}

static int lines;
static void count_line(void *ctx, ra_log_level level, const char *line) {
    (void)ctx, (void)level;
    assert_non_null(line);
    lines++;
}

static void the_logger_can_be_replaced_and_restored(void **state) {
    fixture *f = *state;
    ra_set_logger(count_line, NULL, RA_LOG_TRACE);
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    ra_set_logger(NULL, NULL, RA_LOG_NONE);
    int before = lines;
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    assert_int_equal(lines, before);
}

/* Inputs may repeat rows by a stride of 0: one K/V for the whole batch. */
static void a_batch_stride_of_zero_shares_keys(void **state) {
    fixture *f = *state;
    ra_attention_desc desc = f->c.desc;
    desc.batch = 3;
    ra_plan *plan;
    assert_int_equal(ra_plan_create(f->comm, &desc, &plan), RA_OK);
    float *out = calloc(3 * ELEMENTS, sizeof *out);
    assert_non_null(out);
    ra_forward_args args = f->forward;
    args.q.batch = args.k.batch = args.v.batch = 0;
    args.out.data = out;
    args.lse.data = NULL;
    assert_int_equal(ra_forward(plan, &args), RA_OK);
    assert_memory_equal(out, out + ELEMENTS, ELEMENTS * sizeof *out);
    assert_memory_equal(out, out + 2 * ELEMENTS, ELEMENTS * sizeof *out);
    assert_int_equal(ra_forward(f->plan, &f->forward), RA_OK);
    assert_memory_equal(out, f->out, sizeof f->out);
    free(out);
    ra_plan_destroy(plan);
}

static void free_and_fail(void *ctx, void *memory, size_t bytes) {
    (void)ctx;
    (void)bytes;
    free(memory);
    ra_forward(NULL, NULL); /* an error of clean-up's own */
}

static void *take_aligned(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void clean_up_keeps_the_sentence_about_what_went_wrong(void **state) {
    (void)state;
    ra_comm *comm;
    ra_attention_desc_init(NULL); /* and does nothing */
    ra_set_allocator(&(ra_allocator){take_aligned, free_and_fail, NULL});
    assert_int_equal(ra_comm_self(&comm), RA_OK);
    invalid(ra_comm_allgather(comm, NULL, NULL, -1), "bytes");
    char sentence[1024];
    strcpy(sentence, ra_last_error());
    ra_comm_destroy(comm);
    assert_string_equal(ra_last_error(), sentence);
    ra_set_allocator(NULL);
}

int main(void) {
#define WITH_PLAN(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        WITH_PLAN(good_arguments_are_taken),
        WITH_PLAN(forward_refuses_bad_tensors),
        WITH_PLAN(backward_refuses_bad_tensors),
        WITH_PLAN(plans_and_summaries_refuse_bad_arguments),
        WITH_PLAN(larger_structs_of_later_versions_are_filled),
        WITH_PLAN(summaries_of_earlier_versions_are_filled_as_far_as_they_go),
        WITH_PLAN(communicators_refuse_bad_arguments),
        WITH_PLAN(an_aborted_communicator_stays_aborted),
        WITH_PLAN(plan_queries_answer),
        WITH_PLAN(a_plan_over_the_memory_limit_is_refused_with_the_number),
        WITH_PLAN(unknown_kernels_and_missing_devices_are_not_available),
        WITH_PLAN(a_batch_stride_of_zero_shares_keys),
        WITH_PLAN(the_logger_can_be_replaced_and_restored),
        cmocka_unit_test(kernels_are_listed),
        cmocka_unit_test(clean_up_keeps_the_sentence_about_what_went_wrong),
        cmocka_unit_test(each_thread_has_its_own_last_error),
        cmocka_unit_test(tensors_have_the_strides_of_c_order),
    };
    return cmocka_run_group_tests_name("calls", tests, NULL, NULL);
}
