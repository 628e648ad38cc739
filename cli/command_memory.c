/* memory: the measured peak of a rank, at several lengths and ring sizes. */
#include <math.h>
#include <stdio.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "measure.h"

#define MOST_THREADS 512 /* ranks that ra_comm_threads takes */

typedef struct memory_row {
    int64_t seq, peak, planned;
    int ranks;
    double reduction;
    double limit; /* of the reduction; NAN: not worked out */
} memory_row;

/* What a rank of a dense forward pass cannot do without: its rows, and where keys come from others the running state: m and l,
 * and of 16-bit types the lower halves of the sums. */
static double least_bytes(const ra_attention_desc *d, int ranks) {
    const double size = (double)ra_dtype_size(d->dtype), state = (double)ra_state_size(d->dtype);
    const double q = (double)(d->batch * d->heads) * (double)ra_ceil_div(d->seq_q, ranks);
    const double k = (double)(d->batch * d->kv_heads) * (double)ra_ceil_div(d->seq_k, ranks);
    const double dim = (double)d->head_dim, rows = (2 * q + 2 * k) * dim * size + q * state;
    return rows + (ranks > 1 ? q * (2 * state + (size < state ? 2 * dim : 0)) : 0);
}

/* What would be saved without buckets and scratch. */
static double limit_of(const settings *s, const ra_attention_desc *d, int ranks) {
    const bool dense = d->branches == 1 && d->segment_lengths[0] == 0 && d->dilation_rates[0] == 1;
    const bool known = dense && s->pass == PASS_FWD && d->device == RA_DEVICE_CPU && d->query_placement == RA_SHARDED &&
                       d->seq_q > 0 && d->seq_k > 0;
    return known ? 1 - least_bytes(d, ranks) / least_bytes(d, 1) : (double)NAN;
}

static ra_status measure_row(const settings *s, int64_t seq, int ranks, memory_row *row) {
    description d;
    measurement m;
    RA_TRY(describe(s, seq, ranks, &d));
    ra_status status = measure(s, &d.desc, ranks, (pass_choice)s->pass, 0, 1, "memory", &m);
    *row = (memory_row){.seq = seq,
                        .peak = m.peak_bytes,
                        .planned = m.planned_bytes,
                        .ranks = ranks,
                        .limit = limit_of(s, &d.desc, ranks)};
    description_free(&d);
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
    char limit[32] = "-";
    if (!isnan(r->limit)) snprintf(limit, sizeof limit, "%.1f %%", 100 * r->limit);
    printf("%12lld  %5d  %12s  %12s  %10.1f  %8.1f %%  %8s\n", (long long)r->seq, r->ranks, show_bytes((double)r->peak),
           show_bytes((double)r->planned), r->seq > 0 ? (double)r->peak / (double)r->seq : 0, 100 * r->reduction, limit);
    fflush(stdout);
}

static json_t *row_json(const memory_row *r) {
    return json_pack("{s:I, s:i, s:I, s:I, s:f, s:f, s:o}", "seq", (json_int_t)r->seq, "ring_size", r->ranks, "peak_bytes",
                     (json_int_t)r->peak, "planned_bytes", (json_int_t)r->planned, "bytes_per_token",
                     r->seq > 0 ? (double)r->peak / (double)r->seq : 0, "reduction", r->reduction, "limit",
                     isnan(r->limit) ? json_null() : json_real(r->limit));
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

/* A row over the memory limit, or with too many ranks, is reported before anything is run or printed. */
static ra_status check_rows(const settings *s) {
    for (int64_t i = 0; i < s->seq.count; i++)
        for (int64_t j = 0; j < s->ring_sizes.count; j++) {
            description d;
            int ranks = (int)s->ring_sizes.values[j];
            if (ranks > MOST_THREADS)
                return ra_fail(RA_INVALID, "--ring-sizes: ranks is %d; at most %d run in this process", ranks, MOST_THREADS);
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
        printf("%12s  %5s  %12s  %12s  %10s  %10s  %8s\n", "tokens", "ring", "peak a rank", "planned", "bytes/token",
               "reduction", "limit");
    ra_status status = RA_OK;
    for (int64_t i = 0; i < s->seq.count && status == RA_OK; i++) status = measure_seq(s, s->seq.values[i], rows);
    if (status == RA_OK && rows)
        return print_json(s, json_pack("{s:s, s:o}", "dtype", ra_dtype_name((ra_dtype)s->dtype), "rows", rows));
    json_decref(rows);
    return status;
}
