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
#include "ringattn_cuda.h"
#include "sample.h"
#include "shard.h"
#include "trace.h"

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
    const ra_generated whole = shard_generated(d, T_K, value ? DATA_V : DATA_K, o->s->seed);
    const int64_t block = rows->repeats * rows->rows.count * d->head_dim; /* of a head */
    const ra_tensor packed = {elements, rows->heads.count * block, d->head_dim, block};
    return ra_cuda_generate(&whole, rows, packed, stream);
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
    if (status == RA_OK)
        status = sample_check(&o->mine, o->s->seed, o->result->plan.pairs, o->backward, &o->result->verdict,
                              &o->result->sampled_rows);
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
