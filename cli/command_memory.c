/* memory: the measured peak of a rank, at several lengths and ring sizes. */
#include <stdio.h>

#include "cli.h"
#include "core/status.h"
#include "measure.h"

typedef struct memory_row {
    int64_t seq, peak, planned;
    int ranks;
    double reduction;
} memory_row;

static ra_status measure_row(const settings *s, int64_t seq, int ranks, memory_row *row) {
    description d;
    measurement m;
    RA_TRY(describe(s, seq, ranks, &d));
    ra_status status = measure(s, &d.desc, ranks, (pass_choice)s->pass, 0, 1, "memory", &m);
    description_free(&d);
    *row = (memory_row){.seq = seq, .peak = m.peak_bytes, .planned = m.planned_bytes, .ranks = ranks};
    return status;
}

/* What one rank alone would need, if the list does not have it. */
static ra_status plan_one(const settings *s, int64_t seq, int64_t *bytes) {
    description d;
    plan_totals totals;
    RA_TRY(describe(s, seq, 1, &d));
    d.desc.memory_limit = 0;
    ra_status status = plan_sum(&d.desc, 1, s->pass != PASS_FWD, &totals);
    description_free(&d);
    *bytes = s->pass != PASS_FWD ? totals.backward_max : totals.forward_max;
    return status;
}

static void print_row(const memory_row *r) {
    printf("%12lld  %5d  %12s  %12s  %10.1f  %8.1f %%\n", (long long)r->seq, r->ranks, show_bytes((double)r->peak),
           show_bytes((double)r->planned), r->seq > 0 ? (double)r->peak / (double)r->seq : 0, 100 * r->reduction);
    fflush(stdout);
}

static json_t *row_json(const memory_row *r) {
    return json_pack("{s:I, s:i, s:I, s:I, s:f, s:f}", "seq", (json_int_t)r->seq, "ring_size", r->ranks, "peak_bytes",
                     (json_int_t)r->peak, "planned_bytes", (json_int_t)r->planned, "bytes_per_token",
                     r->seq > 0 ? (double)r->peak / (double)r->seq : 0, "reduction", r->reduction);
}

static ra_status measure_seq(const settings *s, int64_t seq, json_t *rows) {
    int64_t alone;
    RA_TRY(plan_one(s, seq, &alone));
    for (int64_t i = 0; i < s->ring_sizes.count; i++) {
        memory_row row;
        RA_TRY(measure_row(s, seq, (int)s->ring_sizes.values[i], &row));
        if (row.ranks == 1) alone = row.peak;
        row.reduction = alone > 0 ? 1 - (double)row.peak / (double)alone : 0;
        if (rows) json_array_append_new(rows, row_json(&row));
        else print_row(&row);
    }
    return RA_OK;
}

/* A row over the limit is said before anything is run or printed. */
static ra_status check_rows(const settings *s) {
    for (int64_t i = 0; i < s->seq.count; i++)
        for (int64_t j = 0; j < s->ring_sizes.count; j++) {
            description d;
            int ranks = (int)s->ring_sizes.values[j];
            RA_TRY(describe(s, s->seq.values[i], ranks, &d));
            ra_status status = check_memory_limit(s, &d.desc, ranks, s->pass != PASS_FWD);
            description_free(&d);
            RA_TRY(status);
        }
    return RA_OK;
}

ra_status command_memory(const settings *s, bool *check_failed) {
    (void)check_failed;
    RA_TRY(check_rows(s));
    json_t *rows = s->json ? json_array() : NULL;
    if (!rows)
        printf("%12s  %5s  %12s  %12s  %10s  %10s\n", "tokens", "ring", "peak a rank", "planned", "bytes/token", "reduction");
    ra_status status = RA_OK;
    for (int64_t i = 0; i < s->seq.count && status == RA_OK; i++) status = measure_seq(s, s->seq.values[i], rows);
    if (status == RA_OK && rows) return print_json(s, json_pack("{s:o}", "rows", rows));
    json_decref(rows);
    return status;
}
