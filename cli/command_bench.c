/* bench: how long generated data take, and what they cost in bytes and memory. */
#include <stdio.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/status.h"
#include "group.h"
#include "measure.h"

/* Useful work counts attended pairs only: 4*D flops a pair forward, 10*D backward. */
static double flops(const plan_totals *totals, const ra_attention_desc *desc, double a_pair) {
    return (double)totals->pairs * a_pair * (double)desc->head_dim;
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

static ra_status report(const settings *s, const ra_attention_desc *desc, int ranks, const measurement *m) {
    plan_totals totals;
    RA_TRY(plan_sum(desc, ranks, s->pass != PASS_FWD, &totals));
    double forward = flops(&totals, desc, 4), backward = flops(&totals, desc, 10);
    char layout[32], schedule[32];
    snprintf(layout, sizeof layout, "%s", option_word(OPT_LAYOUT, 1 + (int)desc->layout));
    snprintf(schedule, sizeof schedule, "%s", option_word(OPT_SCHEDULE, (int)m->schedule));
    if (s->json) {
        json_t *o = json_pack("{s:s, s:s, s:i, s:i, s:s, s:s, s:I, s:s, s:I, s:I, s:I, s:o, s:I, s:I}", "kernel", m->kernel,
                              "dtype", ra_dtype_name(desc->dtype), "threads", m->threads, "ring_size", ranks, "layout", layout,
                              "schedule", schedule, "bucket", (json_int_t)m->bucket, "reason", m->reason, "workspace_bytes",
                              (json_int_t)m->workspace_bytes, "peak_bytes", (json_int_t)m->peak_bytes, "planned_bytes",
                              (json_int_t)m->planned_bytes, "holes", json_number(totals.hole_share), "pairs",
                              (json_int_t)totals.pairs, "repeat", (json_int_t)s->repeat);
        if (s->pass != PASS_BWD) json_object_set_new(o, "fwd", pass_json(&m->forward, forward));
        if (s->pass != PASS_FWD) json_object_set_new(o, "bwd", pass_json(&m->backward, backward));
        return print_json(s, o);
    }
    printf("[%lld, %lld, %lld, %lld] %s, %s pairs, kernel %s, %d thread%s a rank\n", (long long)desc->batch,
           (long long)desc->seq_q, (long long)desc->heads, (long long)desc->head_dim, ra_dtype_name(desc->dtype),
           show_count((double)totals.pairs), m->kernel, m->threads, m->threads == 1 ? "" : "s");
    printf("ring of %d, %s, %s (%s)\n\n", ranks, layout, schedule, m->reason);
    printf("  %-9s %10s  %10s  %10s  %12s  %10s\n", "pass", "median", "minimum", "GFLOP/s", "sent a rank", "waiting");
    if (s->pass != PASS_BWD) print_pass("forward", &m->forward, forward);
    if (s->pass != PASS_FWD) print_pass("backward", &m->backward, backward);
    printf("\nmemory of a rank: %s measured, %s planned, of which workspace %s\n", show_bytes((double)m->peak_bytes),
           show_bytes((double)m->planned_bytes), show_bytes((double)m->workspace_bytes));
    if (totals.holes > 0) printf("%.3g %% of the rows have no key in this pattern\n", 100 * totals.hole_share);
    return RA_OK;
}

ra_status command_bench(const settings *s, bool *check_failed) {
    int ranks;
    description d;
    measurement m;
    (void)check_failed;
    if (s->given[OPT_RANK]) return ra_fail(RA_NOT_AVAILABLE, "bench --rank is not available in this build");
    RA_TRY(group_ranks(s, &ranks));
    RA_TRY(describe(s, s->seq.values[0], ranks, &d));
    ra_status status = measure(s, &d.desc, ranks, (pass_choice)s->pass, 1, s->repeat, "bench", &m);
    if (status == RA_OK) status = report(s, &d.desc, ranks, &m);
    description_free(&d);
    return status;
}
