#include "measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"
#include "device.h"
#include "group.h"
#include "ringattn_cuda.h"
#include "shard.h"

typedef struct sample {
    double seconds, wait;
    int64_t bytes_sent;
} sample;

typedef struct job {
    const settings *s;
    const ra_attention_desc *desc;
    bool backward; /* at all */
    bool time_forward;
    int warm;
    int64_t repeat;
    sample *forward, *back; /* [ranks][repeat] */
    int64_t *peak;          /* [ranks] */
    measurement *m;
} job;

static ra_status measure_call(ra_plan *plan, const shard *s, bool backward, sample *result) {
    ra_stats_data stats = {.struct_size = sizeof stats};
    double seconds;
    RA_TRY((backward ? device_backward : device_forward)(plan, s, &seconds));
    RA_TRY(ra_stats(plan, &stats));
    *result = (sample){seconds, stats.wait_seconds, stats.bytes_sent};
    return RA_OK;
}

static ra_status repeat_calls(job *j, rank_job *rank, ra_plan *plan, const shard *s) {
    sample ignored;
    for (int64_t i = -j->warm; i < j->repeat; i++) {
        sample *slot = i < 0 || !j->time_forward ? &ignored : &j->forward[rank->rank * j->repeat + i];
        if (j->time_forward || i == -j->warm) RA_TRY(measure_call(plan, s, false, slot)); /* backward needs one forward */
        if (j->backward) RA_TRY(measure_call(plan, s, true, i < 0 ? &ignored : &j->back[rank->rank * j->repeat + i]));
        rank->group->done++;
    }
    return RA_OK;
}

void measure_choices(ra_plan *plan, int threads, measurement *m) {
    snprintf(m->kernel, sizeof m->kernel, "%s", ra_plan_kernel(plan));
    snprintf(m->reason, sizeof m->reason, "%s", ra_plan_reason(plan));
    m->schedule = ra_plan_schedule(plan);
    m->bucket = ra_plan_bucket(plan);
    m->threads = threads;
    snprintf(m->path, sizeof m->path, "%s", ra_cuda_last_path());
}

static ra_status rank_body(rank_job *rank) {
    job *j = rank->arg;
    shard s;
    ra_plan *plan = NULL;
    ra_stats_data stats = {.struct_size = sizeof stats};
    RA_TRY(shard_init(j->desc, rank->rank, rank->ranks, &s));
    ra_status status = shard_alloc_all(&s, j->backward);
    if (status == RA_OK) status = shard_generate(&s, j->s->seed);
    if (status == RA_OK) status = ra_plan_create(rank->comm, j->desc, &plan);
    if (status == RA_OK && j->backward) status = ra_plan_check_backward(plan);
    if (status == RA_OK) status = repeat_calls(j, rank, plan, &s);
    if (status == RA_OK) status = ra_comm_stats(rank->comm, &stats);
    j->peak[rank->rank] = s.memory.peak + stats.pool_peak;
    if (status == RA_OK && rank->rank == 0) measure_choices(plan, j->desc->threads, j->m);
    ra_plan_destroy(plan);
    shard_free(&s);
    return status;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double measure_median(double *values, int64_t count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

/* Every repetition lasts as long as its slowest rank. */
static ra_status summarise(const sample *samples, int ranks, int64_t repeat, pass_measure *pass) {
    double *seconds = malloc(2 * (size_t)repeat * sizeof *seconds), *waits = seconds + repeat;
    if (!seconds) return ra_fail(RA_NOMEM, "no memory for %lld repetitions", (long long)repeat);
    for (int64_t i = 0; i < repeat; i++) {
        seconds[i] = waits[i] = 0;
        for (int r = 0; r < ranks; r++) {
            const sample *x = &samples[r * repeat + i];
            if (x->seconds > seconds[i]) seconds[i] = x->seconds;
            if (x->wait > waits[i]) waits[i] = x->wait;
        }
    }
    pass->bytes_sent = pass->bytes_sent_total = 0;
    for (int r = 0; r < ranks; r++) {
        int64_t sent = samples[r * repeat].bytes_sent;
        pass->bytes_sent = ra_max(pass->bytes_sent, sent);
        pass->bytes_sent_total += sent;
    }
    pass->seconds = measure_median(seconds, repeat);
    pass->seconds_min = seconds[0];
    pass->wait = measure_median(waits, repeat);
    free(seconds);
    return RA_OK;
}

static ra_status measure_group(job *j, int ranks, const char *what) {
    group g;
    RA_TRY(group_open(j->s, ranks, &g));
    g.total = ranks * (j->repeat + j->warm);
    ra_status status = group_run(&g, what, rank_body, j);
    if (status == RA_OK) status = group_gather(&g, j->forward, j->repeat * (int64_t)sizeof *j->forward);
    if (status == RA_OK) status = group_gather(&g, j->back, j->repeat * (int64_t)sizeof *j->back);
    if (status == RA_OK) status = group_gather(&g, j->peak, (int64_t)sizeof *j->peak);
    group_close(&g);
    if (status == RA_OK && j->time_forward) status = summarise(j->forward, ranks, j->repeat, &j->m->forward);
    if (status == RA_OK && j->backward) status = summarise(j->back, ranks, j->repeat, &j->m->backward);
    for (int r = 0; r < ranks; r++) j->m->peak_bytes = ra_max(j->m->peak_bytes, j->peak[r]);
    return status;
}

ra_status measure(const settings *s, const ra_attention_desc *desc, int ranks, pass_choice pass, int warm, int64_t repeat,
                  const char *what, measurement *m) {
    memset(m, 0, sizeof *m);
    bool backward = pass != PASS_FWD;
    RA_TRY(check_memory_limit(s, desc, ranks, backward));
    plan_totals totals;
    RA_TRY(plan_sum(desc, ranks, backward, &totals));
    m->planned_bytes = backward ? totals.backward_max : totals.forward_max;
    m->workspace_bytes = totals.workspace_max;
    size_t count = (size_t)ranks * (size_t)repeat;
    job j = {
        .s = s, .desc = desc, .backward = backward, .time_forward = pass != PASS_BWD, .warm = warm, .repeat = repeat, .m = m};
    j.forward = calloc(count, sizeof *j.forward);
    j.back = calloc(count, sizeof *j.back);
    j.peak = calloc((size_t)ranks, sizeof *j.peak);
    ra_status status = j.forward && j.back && j.peak ? measure_group(&j, ranks, what)
                                                     : ra_fail(RA_NOMEM, "no memory for %lld repetitions", (long long)repeat);
    free(j.forward);
    free(j.back);
    free(j.peak);
    return status;
}

double measure_estimate(const settings *s, const ra_attention_desc *desc, int ranks, bool backward) {
    static settings plain;
    plan_totals whole, part;
    measurement m;
    ra_attention_desc small = *desc;
    small.batch = ra_min(desc->batch, 1);
    small.seq_q = ra_min(desc->seq_q, 256);
    small.seq_k = ra_min(desc->seq_k, 256);
    small.key_begin = small.key_end = NULL;
    small.memory_limit = 0;
    plain = *s;
    plain.trace = NULL;
    plain.given[OPT_MEMORY_LIMIT] = false;
    if (plan_sum(desc, ranks, backward, &whole) != RA_OK || plan_sum(&small, ranks, backward, &part) != RA_OK ||
        part.pairs == 0)
        return 0;
    if (s->memory_limit > 0 && (backward ? part.backward_max : part.forward_max) > s->memory_limit) return 0;
    if (whole.pairs < 100 * part.pairs) return 0; /* it will not take long enough to matter */
    if (measure(&plain, &small, ranks, backward ? PASS_BOTH : PASS_FWD, 1, 1, "", &m) != RA_OK) return 0;
    return (m.forward.seconds + m.backward.seconds) * (double)whole.pairs / (double)part.pairs;
}
