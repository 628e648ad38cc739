#include "solo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "device.h"
#include "progress.h"
#include "reference/reference.h"
#include "ringattn_cuda.h"
#include "shard.h"
#include "trace.h"

#define SAMPLED_ROWS 1000
#define SAMPLED_WORK 1e8 /* pairs times D of all sampled rows together: some seconds */

typedef struct solo {
    const settings *s;
    const ra_attention_desc *desc;
    shard mine;
    bool backward;
    solo_result *result;
} solo;

/* --------------------------------------------------------------------------------------------------------- generated */

static void make_row(void *ctx, bool value, int64_t batch, int64_t key, int64_t kv_head, void *elements) {
    const solo *o = ctx;
    const ra_attention_desc *d = o->desc;
    int64_t first = ((batch * d->seq_k + key) * tensor_heads(d, T_K) + kv_head) * d->head_dim;
    data_fill(o->s->seed, value ? DATA_V : DATA_K, first, d->head_dim, d->dtype, elements);
}

/* The same for many rows, on the GPU. */
static ra_status make_rows(void *ctx, bool value, const ra_row_set *rows, void *elements, void *stream) {
    const solo *o = ctx;
    const ra_attention_desc *d = o->desc;
    const ra_generated whole = {.seed = o->s->seed,
                                .tensor = value ? DATA_V : DATA_K,
                                .batch = d->batch,
                                .rows = d->seq_k,
                                .heads = tensor_heads(d, T_K),
                                .head_dim = d->head_dim,
                                .dtype = d->dtype};
    const int64_t block = rows->repeats * rows->rows.count * d->head_dim; /* of a head */
    const ra_tensor packed = {elements, rows->heads.count * block, d->head_dim, block};
    return ra_cuda_generate(&whole, rows, packed, stream);
}

/* A row as the reference reads it: generated, rounded to the dtype that is computed with, widened. */
static void read_row(const solo *o, data_tensor which, tensor_id like, int64_t batch, int64_t row, int64_t head,
                     double *elements) {
    const ra_attention_desc *d = o->desc;
    double narrow[256]; /* room for any dtype */
    int64_t first = ((batch * tensor_rows(d, like) + row) * tensor_heads(d, like) + head) * d->head_dim;
    data_fill(o->s->seed, which, first, d->head_dim, d->dtype, narrow);
    ra_convert(elements, RA_F64, narrow, d->dtype, d->head_dim);
}
static void read_q(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_Q, T_Q, b, row, head, e); }
static void read_k(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_K, T_K, b, row, head, e); }
static void read_v(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_V, T_V, b, row, head, e); }
static void read_dout(void *ctx, int64_t b, int64_t row, int64_t head, double *e) {
    read_row(ctx, DATA_DOUT, T_Q, b, row, head, e);
}

/* ---------------------------------------------------------------------------------------------------------- checking */

/* Local row n of a tensor of queries: its elements for every batch entry and head, in float64. */
static ra_status pick_row(const solo *o, tensor_id id, int64_t n, double *row) {
    const ra_attention_desc *d = o->desc;
    const ra_tensor *t = &o->mine.t[id].tensor;
    int64_t dim = id == T_LSE ? 1 : d->head_dim;
    double narrow[256]; /* room for any dtype */
    for (int64_t b = 0; b < d->batch; b++)
        for (int64_t h = 0; h < d->heads; h++, row += dim) {
            RA_TRY(shard_read(&o->mine, id, b * t->batch + n * t->row + h * t->head, dim, narrow));
            ra_convert(row, RA_F64, narrow, tensor_dtype(d, id), dim);
        }
    return RA_OK;
}

static ra_status judge_row(solo *o, int64_t n, const ref_outputs *want, double *got) {
    const ra_attention_desc *d = o->desc;
    verdict *v = &o->result->verdict;
    int64_t narrow = d->batch * d->heads, wide = narrow * d->head_dim;
    double bound = ref_bound(d->dtype, false, want->max_score);
    RA_TRY(pick_row(o, T_OUT, n, got));
    verify_judge(v, VERIFY_OUT, ref_compare(got, want->out, want->m_out, wide, d->dtype).ratio, bound);
    RA_TRY(pick_row(o, T_LSE, n, got));
    verify_judge(v, VERIFY_LSE, ref_compare_lse(got, want->lse, want->m_lse, narrow).ratio,
                 ref_bound(d->dtype, true, want->max_score));
    if (!o->backward) return RA_OK;
    RA_TRY(pick_row(o, T_DQ, n, got));
    verify_judge(v, VERIFY_DQ, ref_compare(got, want->dq, want->m_dq, wide, d->dtype).ratio, bound);
    return RA_OK;
}

/* The global row of local row n. */
static int64_t global_row(const ra_shard *rows, int64_t n) {
    int64_t first = rows->rows[0].count;
    const ra_rows *run = &rows->rows[n >= first];
    return run->start + (n >= first ? n - first : n) * run->step;
}

static ra_status check_rows(solo *o) {
    const ra_attention_desc *d = o->desc;
    int64_t rows = o->mine.queries.count;
    double work = rows > 0 ? (double)o->result->plan.pairs / (double)rows * (double)d->head_dim : 0;
    int64_t count = ra_min(rows, work > SAMPLED_WORK / SAMPLED_ROWS ? (int64_t)(SAMPLED_WORK / work) + 1 : SAMPLED_ROWS);
    ref_inputs inputs = {.q = {.read = read_q, .ctx = o}, .k = {.read = read_k, .ctx = o}, .v = {.read = read_v, .ctx = o}};
    inputs.dout = (ref_input){.read = read_dout, .ctx = o};
    ref_outputs want;
    double *got = malloc((size_t)(d->batch * d->heads * d->head_dim + 1) * sizeof *got);
    bool enough = got && ref_outputs_alloc(d, 1, 0, o->backward, &want);
    if (!enough) {
        free(got);
        return ra_fail(RA_NOMEM, "no memory for the reference");
    }
    progress_start("checking sampled rows");
    ra_status status = RA_OK;
    for (int64_t i = 0; i < count && status == RA_OK; i++) {
        int64_t n = count > 1 ? (int64_t)((double)i * (double)(rows - 1) / (double)(count - 1)) : 0;
        int64_t row = global_row(&o->mine.queries, n);
        status = ref_query_rows(d, &inputs, &row, 1, o->backward, &want) ? judge_row(o, n, &want, got)
                                                                         : ra_fail(RA_NOMEM, "no memory for the reference");
        progress_set((double)i / (double)count);
    }
    progress_end();
    o->result->sampled_rows = count;
    ref_outputs_free(&want);
    free(got);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- measuring */

typedef struct timing {
    double *seconds;
    int64_t count, bytes_sent;
} timing;

static ra_status timed(solo *o, ra_plan *plan, bool backward, timing *t) {
    ra_stats_data stats = {.struct_size = sizeof stats};
    double seconds;
    RA_TRY((backward ? device_backward : device_forward)(plan, &o->mine, &seconds));
    if (!t) return RA_OK;
    t->seconds[t->count++] = seconds;
    RA_TRY(ra_stats(plan, &stats));
    t->bytes_sent = stats.bytes_sent;
    return RA_OK;
}

/* On the CPU without warm-up: a rank of a large job takes long enough. A GPU loads kernels and allocates in its first calls. */
static ra_status run_passes(solo *o, ra_plan *plan, timing *forward, timing *backward) {
    const bool time_forward = o->s->pass != PASS_BWD;
    const int64_t first = o->desc->device == RA_DEVICE_CUDA ? -1 : 0;
    progress_start("bench");
    for (int64_t i = first; i < o->s->repeat; i++) {
        if (time_forward || i == first) RA_TRY(timed(o, plan, false, time_forward && i >= 0 ? forward : NULL));
        if (o->backward) RA_TRY(timed(o, plan, true, i >= 0 ? backward : NULL));
        progress_set((double)(i + 1) / (double)o->s->repeat);
    }
    progress_end();
    return RA_OK;
}

static void finish(timing *t, pass_measure *pass) {
    if (t->count == 0) return;
    pass->seconds = measure_median(t->seconds, t->count);
    pass->seconds_min = t->seconds[0];
    pass->bytes_sent = pass->bytes_sent_total = t->bytes_sent;
}

static ra_status measure_rank(solo *o, ra_comm *comm, ra_plan *plan) {
    measurement *m = &o->result->m;
    ra_stats_data stats = {.struct_size = sizeof stats};
    timing forward = {.seconds = calloc((size_t)o->s->repeat, sizeof(double))};
    timing backward = {.seconds = calloc((size_t)o->s->repeat, sizeof(double))};
    ra_status status = forward.seconds && backward.seconds ? run_passes(o, plan, &forward, &backward)
                                                           : ra_fail(RA_NOMEM, "no memory for the repetitions");
    if (status == RA_OK) status = ra_comm_stats(comm, &stats);
    if (status == RA_OK) {
        finish(&forward, &m->forward);
        finish(&backward, &m->backward);
        m->peak_bytes = o->mine.memory.peak + stats.pool_peak;
        m->planned_bytes = summary_bytes(&o->result->plan, o->backward);
        m->workspace_bytes =
            ra_max(o->result->plan.workspace_bytes, o->backward ? o->result->plan.workspace_bytes_backward : 0);
        measure_choices(plan, o->desc->threads, m);
    }
    free(forward.seconds);
    free(backward.seconds);
    return status;
}

static ra_status run_rank(solo *o) {
    ra_solo_ops ops = {.struct_size = sizeof ops, .make_row = make_row, .ctx = o};
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    RA_TRY(ra_comm_solo((int)o->s->rank, (int)o->s->ring_size, &ops, &comm));
    ra_status status = ra_comm_set_cuda_maker(comm, make_rows, o);
    if (status == RA_OK) status = trace_attach(o->s, comm);
    if (status == RA_OK) status = ra_plan_create(comm, o->desc, &plan);
    if (status == RA_OK) status = shard_alloc_all(&o->mine, o->backward);
    if (status == RA_OK) status = shard_generate(&o->mine, o->s->seed);
    if (status == RA_OK) status = measure_rank(o, comm, plan);
    if (status == RA_OK) status = check_rows(o);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
    return status;
}

ra_status solo_run(const settings *s, const ra_attention_desc *desc, solo_result *result) {
    memset(result, 0, sizeof *result);
    solo o = {.s = s, .desc = desc, .backward = s->pass != PASS_FWD, .result = result};
    result->plan.struct_size = sizeof result->plan;
    ra_status planned = ra_plan_summary(desc, (int)s->rank, (int)s->ring_size, &result->plan);
    if (planned == RA_NOMEM && s->given[OPT_MEMORY_LIMIT]) return over_memory_limit(s);
    RA_TRY(planned);
    int64_t needed = summary_bytes(&result->plan, o.backward);
    if (s->given[OPT_MEMORY_LIMIT] && needed > s->memory_limit)
        return ra_fail(RA_NOMEM, "rank %lld needs %s for shards and workspace, more than --memory-limit %s", (long long)s->rank,
                       show_bytes((double)needed), show_bytes((double)s->memory_limit));
    RA_TRY(shard_init(desc, (int)s->rank, (int)s->ring_size, &o.mine));
    ra_status status = run_rank(&o);
    shard_free(&o.mine);
    return status;
}
