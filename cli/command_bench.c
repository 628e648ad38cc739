/* bench: how long generated data take, and what they cost in bytes and memory. */
#include <math.h>
#include <stdio.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "core/workers.h"
#include "group.h"
#include "measure.h"
#include "solo.h"

/* Useful work counts attended pairs only: 4*D flops a pair forward, 10*D backward. */
static double flops(double pairs, const ra_attention_desc *desc, double a_pair) {
    return pairs * a_pair * (double)desc->head_dim;
}

static json_t *pass_json(const pass_measure *p, double work) {
    return json_pack("{s:f, s:f, s:f, s:I, s:I, s:f}", "ms", p->seconds * 1e3, "ms_min", p->seconds_min * 1e3, "gflops",
                     p->seconds > 0 ? work / p->seconds * 1e-9 : 0, "bytes_sent", (json_int_t)p->bytes_sent, "bytes_sent_total",
                     (json_int_t)p->bytes_sent_total, "wait_ms", p->wait * 1e3);
}

static void print_pass(const char *name, const pass_measure *p, double work) {
    printf("  %-9s %10s  %10s  %10.2f  %12s  %10s\n", name, show_seconds(p->seconds), show_seconds(p->seconds_min),
           p->seconds > 0 ? work / p->seconds * 1e-9 : 0, show_bytes((double)p->bytes_sent), show_seconds(p->wait));
}

/* What is the same whether a whole ring ran or one rank of it. */
static json_t *common_json(const settings *s, const ra_attention_desc *desc, int ranks, const measurement *m) {
    char layout[32], schedule[32];
    snprintf(layout, sizeof layout, "%s", option_word(OPT_LAYOUT, 1 + (int)desc->layout));
    snprintf(schedule, sizeof schedule, "%s", option_word(OPT_SCHEDULE, (int)m->schedule));
    return json_pack("{s:s, s:s, s:I, s:i, s:i, s:s, s:s, s:I, s:s, s:I, s:I, s:I, s:I}", "kernel", m->kernel, "dtype",
                     ra_dtype_name(desc->dtype), "seq", (json_int_t)desc->seq_k, "threads", m->threads, "ring_size", ranks,
                     "layout", layout, "schedule", schedule, "bucket", (json_int_t)m->bucket, "reason", m->reason,
                     "workspace_bytes", (json_int_t)m->workspace_bytes, "peak_bytes", (json_int_t)m->peak_bytes,
                     "planned_bytes", (json_int_t)m->planned_bytes, "repeat", (json_int_t)s->repeat);
}

static void print_common(const settings *s, const ra_attention_desc *desc, int ranks, const measurement *m, double pairs) {
    printf("[%lld, %lld, %lld, %lld] %s, %s pairs, kernel %s, %d thread%s a rank\n", (long long)desc->batch,
           (long long)desc->seq_q, (long long)desc->heads, (long long)desc->head_dim, ra_dtype_name(desc->dtype),
           show_count(pairs), m->kernel, m->threads, m->threads == 1 ? "" : "s");
    if (m->path[0]) printf("kernel on the GPU: %s\n", m->path);
    printf("ring of %d, %s", ranks, option_word(OPT_LAYOUT, 1 + (int)desc->layout));
    printf(", %s (%s)\n", option_word(OPT_SCHEDULE, (int)m->schedule), m->reason);
    if (s->given[OPT_RANK]) printf("rank %lld alone; what its peers would send is generated\n", (long long)s->rank);
    printf("\n  %-9s %10s  %10s  %10s  %12s  %10s\n", "pass", "median", "minimum", "GFLOP/s", "sent a rank", "waiting");
    if (s->pass != PASS_BWD) print_pass("forward", &m->forward, flops(pairs, desc, 4));
    if (s->pass != PASS_FWD) print_pass("backward", &m->backward, flops(pairs, desc, 10));
    printf("\nmemory of a rank: %s measured, %s planned, of which workspace %s\n", show_bytes((double)m->peak_bytes),
           show_bytes((double)m->planned_bytes), show_bytes((double)m->workspace_bytes));
}

/* Which of a device's kernels ran. */
static void add_path(const measurement *m, json_t *o) {
    if (m->path[0]) json_object_set_new(o, "path", json_string(m->path));
}

static void add_passes(const settings *s, const ra_attention_desc *desc, const measurement *m, double pairs, json_t *o) {
    if (s->pass != PASS_BWD) json_object_set_new(o, "fwd", pass_json(&m->forward, flops(pairs, desc, 4)));
    if (s->pass != PASS_FWD) json_object_set_new(o, "bwd", pass_json(&m->backward, flops(pairs, desc, 10)));
}

static ra_status bench_ring(const settings *s, const ra_attention_desc *desc, int ranks) {
    measurement m;
    plan_totals totals;
    RA_TRY(measure(s, desc, ranks, (pass_choice)s->pass, 1, s->repeat, "bench", &m));
    RA_TRY(plan_sum(desc, ranks, s->pass != PASS_FWD, &totals));
    if (s->json) {
        json_t *o = common_json(s, desc, ranks, &m);
        json_object_set_new(o, "holes", json_number(totals.hole_share));
        json_object_set_new(o, "pairs", json_integer(totals.pairs));
        add_path(&m, o);
        add_passes(s, desc, &m, (double)totals.pairs, o);
        return print_json(s, o);
    }
    print_common(s, desc, ranks, &m, (double)totals.pairs);
    if (totals.holes > 0) printf("%.3g %% of the rows have no key in this pattern\n", 100 * totals.hole_share);
    return RA_OK;
}

static ra_status bench_rank(const settings *s, const ra_attention_desc *desc, bool *check_failed) {
    solo_result r;
    RA_TRY(solo_run(s, desc, &r));
    double rows = (double)desc->batch * (double)r.plan.rows_q * (double)desc->heads, pairs = (double)r.plan.pairs;
    double holes = r.plan.holes < 0 ? (double)NAN : rows > 0 ? (double)r.plan.holes / rows : 0;
    *check_failed = r.verdict.failed || r.m.peak_bytes != r.m.planned_bytes;
    if (s->json) {
        json_t *o = common_json(s, desc, (int)s->ring_size, &r.m), *worst = json_object();
        for (int t = 0; t < VERIFY_TENSORS; t++)
            if (r.verdict.checked[t]) json_object_set_new(worst, verify_names[t], json_number(r.verdict.error[t]));
        json_object_update_new(o, json_pack("{s:o, s:I, s:I, s:I, s:b, s:o}", "holes", json_number(holes), "pairs",
                                            (json_int_t)r.plan.pairs, "rank", (json_int_t)s->rank, "sampled_rows",
                                            (json_int_t)r.sampled_rows, "failed", *check_failed, "worst", worst));
        add_path(&r.m, o);
        add_passes(s, desc, &r.m, pairs, o);
        return print_json(s, o);
    }
    print_common(s, desc, (int)s->ring_size, &r.m, pairs);
    printf("%lld sampled rows against float64: ", (long long)r.sampled_rows);
    for (int t = 0; t < VERIFY_TENSORS; t++)
        if (r.verdict.checked[t]) printf("%s %.1e, ", verify_names[t], r.verdict.error[t]);
    printf("%s\n", r.verdict.failed ? "FAILED" : "within the bounds");
    if (holes > 0) printf("%.3g %% of the rows have no key in this pattern\n", 100 * holes);
    return RA_OK;
}

ra_status command_bench(const settings *s, bool *check_failed) {
    int ranks = (int)s->ring_size;
    description d;
    bool alone = s->given[OPT_RANK];
    if (!alone) RA_TRY(group_ranks(s, &ranks));
    RA_TRY(describe(s, s->seq.values[0], ranks, &d));
    if (alone && !s->threads) d.desc.threads = (int32_t)ra_max(1, ra_usable_cores()); /* it has the machine for itself */
    ra_status status = alone ? bench_rank(s, &d.desc, check_failed) : bench_ring(s, &d.desc, ranks);
    description_free(&d);
    return status;
}
