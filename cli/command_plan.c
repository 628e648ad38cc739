/* plan: what each rank would do and need, without computing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "fit.h"
#include "machine.h"

typedef struct plan_view {
    const settings *s;
    const ra_attention_desc *desc;
    int ranks;
    bool forward, backward; /* passes */
    machine machine;
    ra_rank_summary *rank; /* [ranks] */
    plan_totals totals;
    double predicted; /* seconds, of the slowest rank */
    fit_result fit;
    char layout[16], schedule[16];
} plan_view;

/* ------------------------------------------------------------------------------------------------------------ looking */

static double rank_seconds(const plan_view *p, const ra_rank_summary *r) {
    double seconds = 0;
    if (p->forward) seconds += machine_rank_seconds(&p->machine, p->desc, p->ranks, r, false);
    if (p->backward) seconds += machine_rank_seconds(&p->machine, p->desc, p->ranks, r, true);
    return seconds;
}

static ra_status look(plan_view *p) {
    RA_TRY(plan_ranks(p->desc, p->ranks, &p->rank));
    for (int i = 0; i < p->ranks; i++) plan_add(&p->totals, &p->rank[i], p->backward);
    machine_prediction all;
    machine_predict_from(&p->machine, p->desc, p->ranks, p->rank, &all);
    p->predicted = (p->forward ? all.forward : 0) + (p->backward ? all.backward : 0);
    plan_finish(&p->totals, p->desc);
    snprintf(p->layout, sizeof p->layout, "%s", option_word(OPT_LAYOUT, 1 + (int)p->desc->layout));
    snprintf(p->schedule, sizeof p->schedule, "%s", option_word(OPT_SCHEDULE, (int)p->rank[0].schedule));
    return RA_OK;
}

/* --------------------------------------------------------------------------------------------------------------- JSON */

static json_t *rank_json(const plan_view *p, const ra_rank_summary *r) {
    return json_pack("{s:i, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:o}", "rank", (int)r->rank, "rows", (json_int_t)r->rows_q,
                     "rows_k", (json_int_t)r->rows_k, "pairs",
                     summary_uncounted(r) ? json_null() : json_integer(r->pairs), "bytes_sent", (json_int_t)r->bytes_sent,
                     "bytes_sent_backward", (json_int_t)r->bytes_sent_backward, "hops", (json_int_t)r->hops, "items",
                     (json_int_t)r->items, "memory_bytes", (json_int_t)summary_bytes(r, p->backward),
                     "predicted_ms", json_number(1e3 * rank_seconds(p, r)));
}

static ra_status scaling_json(const plan_view *p, bool weak, json_t **result) {
    machine_scaling rows[MACHINE_SCALING_ROWS];
    RA_TRY(machine_scale(&p->machine, p->desc, p->forward, p->backward, weak ? ra_max(1, p->desc->seq_k / p->ranks) : 0, rows));
    *result = json_array();
    for (int i = 0; i < MACHINE_SCALING_ROWS; i++)
        json_array_append_new(*result,
                              json_pack("{s:i, s:I, s:o, s:o}", "ring_size", rows[i].ranks, "seq", (json_int_t)rows[i].seq,
                                        "predicted_ms", json_number(rows[i].seconds * 1e3), "efficiency",
                                        json_number(rows[i].efficiency)));
    return RA_OK;
}

static void write_fit(const plan_view *p, char *c, char *cli, char *python) {
    const fit_case fit = {p->s, &p->fit, p->ranks, p->backward, p->schedule};
    fit_as_c(&fit, c);
    fit_as_command(&fit, cli);
    fit_as_python(&fit, python);
}

static json_t *fit_json(const plan_view *p) {
    static char c[FIT_TEXT], cli[FIT_TEXT], python[FIT_TEXT];
    write_fit(p, c, cli, python);
    return json_pack("{s:I, s:I, s:s, s:s, s:s}", "seq", (json_int_t)p->fit.seq, "memory_bytes",
                     (json_int_t)p->fit.memory_bytes, "c", c, "cli", cli, "python", python);
}

static ra_status report_json(const plan_view *p) {
    json_t *ranks = json_array();
    for (int i = 0; i < p->ranks; i++) json_array_append_new(ranks, rank_json(p, &p->rank[i]));
    json_t *o =
        json_pack("{s:I, s:I, s:i, s:s, s:s, s:s, s:I, s:s, s:o, s:o, s:o, s:o, s:s, s:o}", "seq", (json_int_t)p->desc->seq_k,
                  "seq_q", (json_int_t)p->desc->seq_q, "ring_size", p->ranks, "dtype", ra_dtype_name(p->desc->dtype), "layout",
                  p->layout, "schedule", p->schedule, "bucket", (json_int_t)p->rank[0].bucket, "reason", p->rank[0].reason,
                  "balance", json_number(p->totals.balance), "holes", json_number(p->totals.hole_share), "predicted_ms",
                  json_number(p->predicted * 1e3),
                  "machine", json_text(p->machine.name), "pass", p->forward ? p->backward ? "both" : "fwd" : "bwd", "ranks",
                  ranks);
    char model[256];
    snprintf(model, sizeof model, "a model, not a measurement; %s", p->machine.basis);
    json_object_set_new(o, "predicted_by", json_string(model));
    if (p->s->fit) json_object_set_new(o, "fit", fit_json(p));
    if (p->s->given[OPT_MACHINE]) {
        json_t *strong = NULL, *weak = NULL;
        ra_status status = scaling_json(p, false, &strong);
        if (status == RA_OK) status = scaling_json(p, true, &weak);
        json_object_set_new(o, "strong_scaling", strong);
        json_object_set_new(o, "weak_scaling", weak);
        if (status != RA_OK) {
            json_decref(o);
            return status;
        }
    }
    return print_json(p->s, o);
}

/* ------------------------------------------------------------------------------------------------------------- people */

static void print_rank(const plan_view *p, const ra_rank_summary *r) {
    printf("  %5d  %14lld  %10s  %12s  %12lld  %12s\n", (int)r->rank, (long long)r->rows_q,
           summary_uncounted(r) ? "> 9.22 E" : show_count((double)r->pairs),
           show_bytes((double)(p->forward ? r->bytes_sent : r->bytes_sent_backward)), (long long)r->hops,
           show_bytes((double)summary_bytes(r, p->backward)));
}

static const char *show_efficiency(double efficiency, char text[16]) {
    snprintf(text, 16, isnan(efficiency) ? "unknown" : "%.1f %%", 100 * efficiency);
    return text;
}

static ra_status print_scaling(const plan_view *p) {
    machine_scaling strong[MACHINE_SCALING_ROWS], weak[MACHINE_SCALING_ROWS];
    RA_TRY(machine_scale(&p->machine, p->desc, p->forward, p->backward, 0, strong));
    RA_TRY(machine_scale(&p->machine, p->desc, p->forward, p->backward, ra_max(1, p->desc->seq_k / p->ranks), weak));
    printf("\npredicted scaling on %s (a model, not a measurement; %s)\n", p->machine.name, p->machine.basis);
    printf("  %5s  %12s  %10s    %16s  %12s  %10s\n", "ranks", "this length", "efficiency", "growing length", "time",
           "efficiency");
    for (int i = 0; i < MACHINE_SCALING_ROWS; i++) {
        char one[16], other[16];
        printf("  %5d  %12s  %10s    %16lld  %12s  %10s\n", strong[i].ranks, show_seconds(strong[i].seconds),
               show_efficiency(strong[i].efficiency, one), (long long)weak[i].seq, show_seconds(weak[i].seconds),
               show_efficiency(weak[i].efficiency, other));
    }
    return RA_OK;
}

static ra_status report(const plan_view *p) {
    const ra_attention_desc *d = p->desc;
    printf("[%lld, %lld, %lld, %lld] %s over %d rank%s: %s, %s, bucket %lld\n%s\n\n", (long long)d->batch, (long long)d->seq_q,
           (long long)d->heads, (long long)d->head_dim, ra_dtype_name(d->dtype), p->ranks, p->ranks == 1 ? "" : "s", p->layout,
           p->schedule, (long long)p->rank[0].bucket, p->rank[0].reason);
    printf("  %5s  %14s  %10s  %12s  %12s  %12s\n", "rank", "rows", "pairs", "sent", "hops", "memory");
    for (int i = 0; i < p->ranks; i++) {
        if (p->ranks > 16 && i == 8) {
            printf("    ...\n");
            i = p->ranks - 4;
        }
        print_rank(p, &p->rank[i]);
    }
    char balance[16] = "unknown";
    if (!isnan(p->totals.balance)) snprintf(balance, sizeof balance, "%.3f", p->totals.balance);
    printf("\nbalance %s (mean pairs of a rank / most), predicted %s on %s (a model, not a measurement)", balance,
           show_seconds(p->predicted), p->machine.name);
    if (p->totals.holes > 0) printf(", %.3g %% of the rows have no key", 100 * p->totals.hole_share);
    printf("\n");
    if (p->s->given[OPT_MACHINE]) RA_TRY(print_scaling(p));
    if (p->s->fit) {
        static char c[FIT_TEXT], cli[FIT_TEXT], python[FIT_TEXT];
        write_fit(p, c, cli, python);
        printf("\nlongest sequence within %s a rank, %s: %lld tokens (%s%s)\n", show_bytes((double)p->s->memory_limit),
               p->backward ? "forward and backward" : "forward", (long long)p->fit.seq, show_bytes((double)p->fit.memory_bytes),
               p->s->offload ? " on the GPU; all tensors lie in the host's memory" : "");
        printf("\nC:\n%s\n\ncommand line:\n%s\n\nPython:\n%s\n", c, cli, python);
    }
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------ command */

static ra_status plan_settings(plan_view *p, settings *chosen) {
    description d;
    bool open = p->s->schedule == (int)RA_SCHEDULE_AUTO && p->s->query_placement == (int)RA_SHARDED && p->ranks > 1;
    if (p->s->fit) {
        if (open) chosen->schedule = (int)RA_SCHEDULE_RING; /* needs least */
        RA_TRY(fit(chosen, &p->machine, p->ranks, p->backward, &p->fit));
        chosen->seq = (int_list){{p->fit.seq}, 1};
        chosen->layout = 1 + (int)p->fit.layout;
        chosen->bucket = p->fit.bucket;
    }
    RA_TRY(describe(chosen, chosen->seq.values[0], p->ranks, &d));
    p->desc = &d.desc;
    ra_status status = machine_suits(&p->machine, &d.desc);
    if (status == RA_OK) status = check_memory_limit(p->s, &d.desc, p->ranks, p->backward);
    if (status == RA_OK) status = look(p);
    if (status == RA_OK && p->s->fit && open)
        snprintf(p->rank[0].reason, sizeof p->rank[0].reason, "ring: needs least memory; bucket %lld: %s",
                 (long long)p->rank[0].bucket,
                 p->s->bucket ? "as asked for" : "the fastest of those that fit the longest sequence");
    if (status == RA_OK) status = p->s->json ? report_json(p) : report(p);
    free(p->rank);
    description_free(&d);
    return status;
}

ra_status command_plan(const settings *s, bool *check_failed) {
    (void)check_failed;
    static settings chosen;
    plan_view p = {.s = s, .ranks = (int)s->ring_size};
    /* what fits must fit in training, unless a pass is named */
    pass_choice pass = s->fit && !s->given[OPT_PASS] ? PASS_BOTH : (pass_choice)s->pass;
    p.forward = pass != PASS_BWD;
    p.backward = pass != PASS_FWD;
    RA_TRY(machine_find(s->machine ? s->machine : "laptop", &p.machine));
    chosen = *s;
    return plan_settings(&p, &chosen);
}
