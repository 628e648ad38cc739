/* p ranks as threads: shards out, plan, forward, backward, shards in. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ringattn_cuda.h"
#include "support.h"

/* ---------------------------------------------------------------------------------------------------------- the ring */

void test_ring_open(test_ring *ring, int ranks, test_transport transport) {
    *ring = (test_ring){.ranks = ranks, .transport = transport};
    ring->comms = calloc((size_t)ranks, sizeof *ring->comms);
    ring->traffic = calloc((size_t)ranks, sizeof *ring->traffic);
    assert_non_null(ring->comms);
    assert_non_null(ring->traffic);
    ra_status status = RA_INTERNAL;
    switch (transport) {
    case TEST_SELF:
        assert_int_equal(ranks, 1);
        status = ra_comm_self(&ring->comms[0]);
        break;
    case TEST_THREADS: status = ra_comm_threads(ranks, ring->comms); break;
    case TEST_CUSTOM: status = test_counting_comms(ranks, ring->comms, ring->traffic); break;
    }
    if (status != RA_OK) print_error("cannot open a ring of %d: %s\n", ranks, ra_last_error());
    assert_int_equal(status, RA_OK);
    for (int rank = 0; rank < ranks; rank++) assert_int_equal(ra_comm_set_timeout(ring->comms[rank], 60, 60), RA_OK);
}

void test_ring_close(test_ring *ring) {
    for (int rank = 0; rank < ring->ranks; rank++) ra_comm_destroy(ring->comms[rank]);
    free(ring->comms);
    free(ring->traffic);
    *ring = (test_ring){0};
}

typedef struct thread_job {
    void (*work)(void *arg, int rank);
    void *arg;
    int rank;
} thread_job;

static void *thread_main(void *arg) {
    thread_job *job = arg;
    job->work(job->arg, job->rank);
    return NULL;
}

void test_ring_each(const test_ring *ring, void (*work)(void *arg, int rank), void *arg) {
    pthread_t *threads = calloc((size_t)ring->ranks, sizeof *threads);
    thread_job *jobs = calloc((size_t)ring->ranks, sizeof *jobs);
    assert_non_null(threads);
    assert_non_null(jobs);
    for (int rank = 1; rank < ring->ranks; rank++) {
        jobs[rank] = (thread_job){work, arg, rank};
        assert_int_equal(pthread_create(&threads[rank], NULL, thread_main, &jobs[rank]), 0);
    }
    work(arg, 0);
    for (int rank = 1; rank < ring->ranks; rank++) pthread_join(threads[rank], NULL);
    free(threads);
    free(jobs);
}

/* ------------------------------------------------------------------------------------------------------- local tensors */

/* A rank's part of one tensor; dim 0 marks lse and dlse, whose global order is [B, heads, rows]. */
typedef struct local_tensor {
    test_buffer buffer;
    ra_tensor tensor;
    ra_dtype dtype;
    int64_t batch, heads, dim, elements, total; /* total: rows of the global tensor */
    ra_shard shard;
} local_tensor;

/* NaN: an output that stays unwritten, and padding that is written or read, show. */
static void fill_untouched(local_tensor *t) {
    for (int64_t n = 0; n < t->elements; n++) test_store(t->dtype, t->buffer.ptr, n, NAN);
}

static local_tensor local_create(const test_case *c, ra_dtype dtype, ra_shard shard, int64_t total, int64_t heads, int64_t dim,
                                 bool right) {
    local_tensor t = {.dtype = dtype, .batch = c->desc.batch, .heads = heads, .dim = dim, .total = total, .shard = shard};
    int64_t rows = shard.count, width = dim ? dim : 1;
    switch (c->strides) {
    case TEST_BNHD:
        if (dim) {
            t.tensor = ra_tensor_bnhd(NULL, rows, heads, dim);
        } else {
            t.tensor = ra_tensor_lse(NULL, rows, heads);
        }
        t.elements = t.batch * rows * heads * width;
        break;
    case TEST_BHND: /* and lse the other way round: [B, rows, heads] */
        t.tensor = dim ? (ra_tensor){NULL, heads * rows * dim, dim, rows * dim} : (ra_tensor){NULL, heads * rows, heads, 1};
        t.elements = t.batch * rows * heads * width;
        break;
    default:
        t.tensor.head = width + 3;
        t.tensor.row = heads * t.tensor.head + 5;
        t.tensor.batch = rows * t.tensor.row + 7;
        t.elements = t.batch * t.tensor.batch;
        break;
    }
    t.buffer = guard_alloc((size_t)t.elements * ra_dtype_size(dtype), right);
    t.tensor.data = t.buffer.ptr;
    fill_untouched(&t);
    return t;
}

static int64_t shard_row(const ra_shard *shard, int64_t local) {
    const ra_rows *rows = &shard->rows[local >= shard->rows[0].count];
    if (local >= shard->rows[0].count) local -= shard->rows[0].count;
    return rows->start + local * rows->step;
}

/* Calls visit for each element with its index in the local buffer and in the global array. */
static void local_visit(local_tensor *t, double *global, void (*visit)(local_tensor *t, int64_t local, double *element)) {
    int64_t width = t->dim ? t->dim : 1;
    for (int64_t b = 0; b < t->batch; b++) {
        for (int64_t n = 0; n < t->shard.count; n++) {
            int64_t row = shard_row(&t->shard, n);
            for (int64_t h = 0; h < t->heads; h++) {
                int64_t local = b * t->tensor.batch + n * t->tensor.row + h * t->tensor.head;
                int64_t index = t->dim ? ((b * t->total + row) * t->heads + h) * t->dim : (b * t->heads + h) * t->total + row;
                for (int64_t d = 0; d < width; d++) visit(t, local + d, global + index + d);
            }
        }
    }
}

static void put(local_tensor *t, int64_t local, double *element) { test_store(t->dtype, t->buffer.ptr, local, *element); }

/* Takes the element and leaves the mark, so that afterwards the whole buffer must be marks. */
static void take(local_tensor *t, int64_t local, double *element) {
    *element = test_load(t->dtype, t->buffer.ptr, local);
    test_store(t->dtype, t->buffer.ptr, local, NAN);
}

static bool local_collect(local_tensor *t, double *global) {
    local_visit(t, global, take);
    for (int64_t n = 0; n < t->elements; n++) {
        if (!isnan(test_load(t->dtype, t->buffer.ptr, n))) return false;
    }
    return true;
}

/* --------------------------------------------------------------------------------------------------------------- run */

typedef struct rank_job {
    local_tensor q, k, v, out, lse, dout, dlse, dq, dk, dv;
    ra_status status;
    char error[512];
} rank_job;

typedef struct run_job {
    const test_ring *ring;
    const test_case *c;
    const test_data *data;
    test_result *result;
    rank_job *ranks;
} run_job;

/* Ranks of one process need streams of their own. */
static void *stream_of(const test_case *c, int rank) {
    static char streams[64];
    assert_true(rank < (int)sizeof streams);
    return c->desc.device == RA_DEVICE_CUDA && c->ranks > 1 ? &streams[rank] : NULL;
}

static ra_status run_rank(run_job *run, int rank) {
    const test_case *c = run->c;
    const ra_attention_desc *desc = &c->desc;
    rank_job *job = &run->ranks[rank];
    ra_comm *comm = run->ring->comms[rank];
    const test_traffic *traffic = &run->ring->traffic[rank];
    ra_rank_summary *measured = &run->result->ranks[rank];

    ra_plan *plan = NULL;
    ra_status status = ra_plan_create(comm, desc, &plan);
    if (status != RA_OK) return status;
    measured->workspace_bytes = ra_plan_workspace(plan, false);
    measured->workspace_bytes_backward = ra_plan_workspace(plan, true);

    int64_t sent = traffic->sent;
    ra_forward_args forward = {
        .q = job->q.tensor, .k = job->k.tensor, .v = job->v.tensor, .out = job->out.tensor, .lse = job->lse.tensor};
    forward.stream = stream_of(c, rank);
    status = ra_forward(plan, &forward);
    measured->bytes_sent = traffic->sent - sent;
    run->result->forward[rank].struct_size = run->result->backward[rank].struct_size = sizeof(ra_stats_data);
    if (status == RA_OK) status = ra_stats(plan, &run->result->forward[rank]);
    if (status == RA_OK && c->backward) {
        sent = traffic->sent;
        ra_backward_args backward = {.q = job->q.tensor,
                                     .k = job->k.tensor,
                                     .v = job->v.tensor,
                                     .out = job->out.tensor,
                                     .lse = job->lse.tensor,
                                     .dout = job->dout.tensor,
                                     .dq = job->dq.tensor,
                                     .dk = job->dk.tensor,
                                     .dv = job->dv.tensor};
        if (c->dlse) backward.dlse = job->dlse.tensor;
        backward.stream = forward.stream;
        status = ra_backward(plan, &backward);
        measured->bytes_sent_backward = traffic->sent - sent;
        if (status == RA_OK) status = ra_stats(plan, &run->result->backward[rank]);
    }
    if (desc->device == RA_DEVICE_CUDA && status == RA_OK) status = ra_cuda_synchronize(forward.stream);
    ra_plan_destroy(plan);
    return status;
}

static void run_work(void *arg, int rank) {
    run_job *run = arg;
    rank_job *job = &run->ranks[rank];
    job->status = run_rank(run, rank);
    if (job->status != RA_OK) snprintf(job->error, sizeof job->error, "rank %d: %s", rank, ra_last_error());
}

static void rank_create(rank_job *job, const test_case *c, const test_data *data, int rank) {
    const ra_attention_desc *desc = &c->desc;
    ra_shard queries, keys;
    assert_int_equal(ra_shard_rows(desc, rank, c->ranks, &queries, &keys), RA_OK);
    int64_t hq = desc->heads, hk = desc->kv_heads ? desc->kv_heads : hq, dim = desc->head_dim;
    bool right = (c->data_seed + (uint64_t)rank) % 2 == 0;
    ra_dtype dtype = desc->dtype, state = test_state_dtype(dtype);
    struct {
        local_tensor *t;
        bool query;
        double *input;
        int64_t dim;
    } list[] = {{&job->q, true, data->q, dim},     {&job->k, false, data->k, dim}, {&job->v, false, data->v, dim},
                {&job->out, true, NULL, dim},      {&job->lse, true, NULL, 0},     {&job->dout, true, data->dout, dim},
                {&job->dlse, true, data->dlse, 0}, {&job->dq, true, NULL, dim},    {&job->dk, false, NULL, dim},
                {&job->dv, false, NULL, dim}};
    for (size_t n = 0; n < sizeof list / sizeof *list; n++) {
        *list[n].t = local_create(c, list[n].dim ? dtype : state, list[n].query ? queries : keys,
                                  list[n].query ? desc->seq_q : desc->seq_k, list[n].query ? hq : hk, list[n].dim, right);
        if (list[n].input) local_visit(list[n].t, list[n].input, put);
    }
}

static void rank_free(rank_job *job) {
    local_tensor *list[] = {&job->q,    &job->k,    &job->v,  &job->out, &job->lse,
                            &job->dout, &job->dlse, &job->dq, &job->dk,  &job->dv};
    for (size_t n = 0; n < sizeof list / sizeof *list; n++) guard_free(&list[n]->buffer);
}

static double *nan_array(int64_t count) {
    double *array = malloc((size_t)(count + 1) * sizeof *array);
    assert_non_null(array);
    for (int64_t n = 0; n < count; n++) array[n] = NAN;
    return array;
}

/* Brings one output of one rank home. With replicated queries every rank has all of it, and all must hold the same. */
static void collect(run_job *run, int rank, local_tensor *t, double *global, bool replicated, const char *name) {
    test_result *result = run->result;
    int64_t count = t->batch * t->total * t->heads * (t->dim ? t->dim : 1);
    double *before = NULL;
    if (replicated && rank > 0) {
        before = nan_array(count);
        memcpy(before, global, (size_t)count * sizeof *before);
    }
    if (!local_collect(t, global)) {
        result->status = RA_INTERNAL;
        snprintf(result->error, sizeof result->error, "rank %d: the padding of %s was written to", rank, name);
    }
    if (before && memcmp(before, global, (size_t)count * sizeof *before) != 0) {
        result->status = RA_INTERNAL;
        snprintf(result->error, sizeof result->error, "rank %d: its copy of %s differs from rank 0's", rank, name);
    }
    free(before);
}

/* Ranks that wait for each other for ever all look alive, so nothing but a clock can tell. */
#define WATCHDOG_SECONDS 120
static char watched[2048];

static void give_up(int signal_number) {
    (void)signal_number;
    static const char text[] = "the ring does not end; case: ";
    if (write(STDERR_FILENO, text, sizeof text - 1) > 0 && write(STDERR_FILENO, watched, strlen(watched)) > 0)
        (void)!write(STDERR_FILENO, "\n", 1);
    _exit(1);
}

void test_watch(const test_case *c) {
    test_case_text(c, watched, sizeof watched);
    signal(SIGALRM, give_up);
    const char *limit = getenv("RINGATTN_WATCHDOG");
    alarm(limit ? (unsigned)atoi(limit) : WATCHDOG_SECONDS);
}

void test_unwatch(void) { alarm(0); }

test_result test_run_on(const test_ring *ring, const test_case *c, const test_data *data) {
    const ra_attention_desc *desc = &c->desc;
    assert_int_equal(ring->ranks, c->ranks);
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
    int64_t queries = desc->batch * desc->seq_q * desc->heads, keys = desc->batch * desc->seq_k * kv_heads;
    test_result result = {.out = nan_array(queries * desc->head_dim),
                          .lse = nan_array(queries),
                          .dq = nan_array(queries * desc->head_dim),
                          .dk = nan_array(keys * desc->head_dim),
                          .dv = nan_array(keys * desc->head_dim),
                          .ranks = calloc((size_t)c->ranks, sizeof(ra_rank_summary)),
                          .forward = calloc((size_t)c->ranks, sizeof(ra_stats_data)),
                          .backward = calloc((size_t)c->ranks, sizeof(ra_stats_data))};
    run_job run = {ring, c, data, &result, calloc((size_t)c->ranks, sizeof(rank_job))};
    assert_non_null(run.ranks);
    for (int rank = 0; rank < c->ranks; rank++) rank_create(&run.ranks[rank], c, data, rank);
    test_watch(c);
    test_ring_each(ring, run_work, &run);
    test_unwatch();
    for (int rank = c->ranks - 1; rank >= 0; rank--) {
        if (run.ranks[rank].status == RA_OK) continue;
        result.status = run.ranks[rank].status;
        memcpy(result.error, run.ranks[rank].error, sizeof result.error);
    }
    bool replicated = desc->query_placement == RA_REPLICATED;
    for (int rank = 0; rank < c->ranks; rank++) {
        rank_job *job = &run.ranks[rank];
        if (result.status == RA_OK) {
            collect(&run, rank, &job->out, result.out, replicated, "out");
            collect(&run, rank, &job->lse, result.lse, replicated, "lse");
            if (c->backward) {
                collect(&run, rank, &job->dq, result.dq, replicated, "dq");
                collect(&run, rank, &job->dk, result.dk, false, "dk");
                collect(&run, rank, &job->dv, result.dv, false, "dv");
            }
        }
        rank_free(job);
    }
    free(run.ranks);
    return result;
}

test_result test_run(const test_case *c, const test_data *data) {
    test_ring ring;
    test_ring_open(&ring, c->ranks, c->transport);
    test_result result = test_run_on(&ring, c, data);
    test_ring_close(&ring);
    return result;
}

void test_result_free(test_result *result) {
    free(result->out);
    free(result->lse);
    free(result->dq);
    free(result->dk);
    free(result->dv);
    free(result->ranks);
    free(result->forward);
    free(result->backward);
    *result = (test_result){0};
}

const char *test_difference(const test_case *c, const test_result *a, const test_result *b) {
    const ra_attention_desc *desc = &c->desc;
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
    size_t queries = (size_t)(desc->batch * desc->seq_q * desc->heads), keys = (size_t)(desc->batch * desc->seq_k * kv_heads);
    size_t dim = (size_t)desc->head_dim, size = sizeof(double);
    if (a->status != b->status) return "status";
    if (memcmp(a->out, b->out, queries * dim * size) != 0) return "out";
    if (memcmp(a->lse, b->lse, queries * size) != 0) return "lse";
    if (!c->backward) return NULL;
    if (memcmp(a->dq, b->dq, queries * dim * size) != 0) return "dq";
    if (memcmp(a->dk, b->dk, keys * dim * size) != 0) return "dk";
    if (memcmp(a->dv, b->dv, keys * dim * size) != 0) return "dv";
    return NULL;
}
