#include "sample.h"

#include <stdlib.h>

#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "core/workers.h"
#include "progress.h"
#include "reference/reference.h"

#define SAMPLED_ROWS 1000
#define SAMPLED_WORK 1e8 /* pairs times D of all sampled rows together, for each thread: some seconds */
#define KEPT_BYTES (8 << 20) /* of k or v, at most: little beside what a rank holds */

/* What a worker needs for a row, and what it found. */
typedef struct checker {
    ref_outputs want;
    double *got; /* a row of a tensor */
    verdict verdict;
    ra_status status;
    ra_sentence sentence; /* of the status */
} checker;

typedef struct sample {
    const shard *rank;
    uint64_t seed;
    bool backward;
    char *kept[2]; /* all of k and v, if they are small: every sampled row reads them; NULL: each row is generated when read */
    int64_t count;
    checker *checkers; /* [workers] */
    _Atomic int64_t done;
} sample;

/* ----------------------------------------------------------------------------------------------------------- the inputs */

/* A row as the reference reads it: generated, rounded to the dtype that is computed with, widened. */
static void read_row(const sample *s, data_tensor which, tensor_id like, int64_t batch, int64_t row, int64_t head,
                     double *elements) {
    const ra_attention_desc *d = s->rank->desc;
    double narrow[256]; /* room for any dtype */
    int64_t first = ((batch * tensor_rows(d, like) + row) * tensor_heads(d, like) + head) * d->head_dim;
    const char *kept = like == T_K ? s->kept[0] : like == T_V ? s->kept[1] : NULL;
    if (!kept) data_fill(s->seed, which, first, d->head_dim, d->dtype, narrow);
    const void *from = kept ? kept + first * (int64_t)ra_dtype_size(d->dtype) : (const char *)narrow;
    ra_convert(elements, RA_F64, from, d->dtype, d->head_dim);
}
static void read_q(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_Q, T_Q, b, row, head, e); }
static void read_k(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_K, T_K, b, row, head, e); }
static void read_v(void *ctx, int64_t b, int64_t row, int64_t head, double *e) { read_row(ctx, DATA_V, T_V, b, row, head, e); }
static void read_dout(void *ctx, int64_t b, int64_t row, int64_t head, double *e) {
    read_row(ctx, DATA_DOUT, T_Q, b, row, head, e);
}

/* Where there is no memory for them, rows are generated as if they were large. */
static void keep_keys(sample *s) {
    const ra_attention_desc *d = s->rank->desc;
    int64_t elements = ra_sat_mul(ra_sat_mul(d->batch, d->seq_k), ra_sat_mul(d->kv_heads, d->head_dim));
    int64_t bytes = ra_sat_mul(elements, (int64_t)ra_dtype_size(d->dtype));
    for (int i = 0; i < 2 && bytes <= KEPT_BYTES; i++) {
        s->kept[i] = malloc((size_t)bytes + 1);
        if (s->kept[i]) data_fill(s->seed, i == 0 ? DATA_K : DATA_V, 0, elements, d->dtype, s->kept[i]);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- a row */

/* Local row n of a tensor of queries: its elements for every batch entry and head, in float64. */
static ra_status pick_row(const sample *s, tensor_id id, int64_t n, double *row) {
    const ra_attention_desc *d = s->rank->desc;
    const ra_tensor *t = &s->rank->t[id].tensor;
    int64_t dim = id == T_LSE ? 1 : d->head_dim;
    double narrow[256]; /* room for any dtype */
    for (int64_t b = 0; b < d->batch; b++)
        for (int64_t h = 0; h < d->heads; h++, row += dim) {
            RA_TRY(shard_read(s->rank, id, b * t->batch + n * t->row + h * t->head, dim, narrow));
            ra_convert(row, RA_F64, narrow, tensor_dtype(d, id), dim);
        }
    return RA_OK;
}

static ra_status judge_row(const sample *s, int64_t n, checker *c) {
    const ra_attention_desc *d = s->rank->desc;
    const ref_outputs *want = &c->want;
    int64_t narrow = d->batch * d->heads, wide = narrow * d->head_dim;
    double bound = ref_bound(d->dtype, false, want->max_score);
    RA_TRY(pick_row(s, T_OUT, n, c->got));
    verify_judge(&c->verdict, VERIFY_OUT, ref_compare(c->got, want->out, want->m_out, wide, d->dtype).ratio, bound);
    RA_TRY(pick_row(s, T_LSE, n, c->got));
    verify_judge(&c->verdict, VERIFY_LSE, ref_compare_lse(c->got, want->lse, want->m_lse, narrow).ratio,
                 ref_bound(d->dtype, true, want->max_score));
    if (!s->backward) return RA_OK;
    RA_TRY(pick_row(s, T_DQ, n, c->got));
    verify_judge(&c->verdict, VERIFY_DQ, ref_compare(c->got, want->dq, want->m_dq, wide, d->dtype).ratio, bound);
    return RA_OK;
}

/* The global row of local row n. */
static int64_t global_row(const ra_shard *rows, int64_t n) {
    int64_t first = rows->rows[0].count;
    const ra_rows *run = &rows->rows[n >= first];
    return run->start + (n >= first ? n - first : n) * run->step;
}

static void check_row(void *arg, int64_t index, int worker) {
    sample *s = arg;
    checker *c = &s->checkers[worker];
    if (c->status != RA_OK) return;
    const ra_shard *queries = &s->rank->queries;
    int64_t n = s->count > 1 ? (int64_t)((double)index * (double)(queries->count - 1) / (double)(s->count - 1)) : 0;
    int64_t row = global_row(queries, n);
    ref_inputs inputs = {.q = {.read = read_q, .ctx = s}, .k = {.read = read_k, .ctx = s}, .v = {.read = read_v, .ctx = s}};
    inputs.dout = (ref_input){.read = read_dout, .ctx = s};
    c->status = ref_query_rows(s->rank->desc, &inputs, &row, 1, s->backward, &c->want)
                    ? judge_row(s, n, c)
                    : ra_fail(RA_NOMEM, "no memory for the reference");
    if (c->status != RA_OK) c->sentence = ra_sentence_keep();
    s->done++;
}

/* ------------------------------------------------------------------------------------------------------------- all rows */

static void show_progress(void *arg) {
    sample *s = arg;
    progress_set((double)s->done / (double)s->count);
}

/* What all workers found together. */
static ra_status sum_up(const sample *s, int workers, verdict *v) {
    for (int i = 0; i < workers; i++) {
        const checker *c = &s->checkers[i];
        if (c->status != RA_OK) {
            ra_sentence_restore(&c->sentence);
            return c->status;
        }
        for (int t = 0; t < VERIFY_TENSORS; t++)
            if (c->verdict.checked[t]) verify_judge(v, t, c->verdict.error[t], c->verdict.bound[t]);
        v->failed = v->failed || c->verdict.failed;
    }
    return RA_OK;
}

static ra_status check_all(sample *s, ra_workers *workers, verdict *v) {
    const ra_attention_desc *d = s->rank->desc;
    const int count = ra_workers_count(workers);
    s->checkers = calloc((size_t)count, sizeof *s->checkers);
    bool enough = s->checkers;
    for (int i = 0; i < count && enough; i++) {
        s->checkers[i].got = malloc((size_t)(d->batch * d->heads * d->head_dim + 1) * sizeof(double));
        enough = s->checkers[i].got && ref_outputs_alloc(d, 1, 0, s->backward, &s->checkers[i].want);
    }
    if (enough) keep_keys(s);
    progress_start("checking sampled rows");
    if (enough) ra_workers_run(workers, s->count, check_row, s, show_progress, s);
    progress_end();
    ra_status status = enough ? sum_up(s, count, v) : ra_fail(RA_NOMEM, "no memory for the reference");
    for (int i = 0; i < count && s->checkers; i++) {
        ref_outputs_free(&s->checkers[i].want);
        free(s->checkers[i].got);
    }
    free(s->checkers);
    for (int i = 0; i < 2; i++) free(s->kept[i]);
    return status;
}

ra_status sample_check(const shard *rank, uint64_t seed, int64_t pairs, bool backward, verdict *v, int64_t *rows) {
    const ra_attention_desc *d = rank->desc;
    const int64_t all = rank->queries.count;
    const int threads = d->threads > 0 ? d->threads : 1;
    const double of_a_row = all > 0 ? (double)pairs / (double)all * (double)d->head_dim : 0, most = threads * SAMPLED_WORK;
    *rows = ra_min(all, of_a_row * SAMPLED_ROWS > most ? (int64_t)(most / of_a_row) + 1 : SAMPLED_ROWS);
    sample s = {.rank = rank, .seed = seed, .backward = backward, .count = *rows};
    ra_workers *workers;
    RA_TRY(ra_workers_create(threads, &workers));
    ra_status status = check_all(&s, workers, v);
    ra_workers_destroy(workers);
    return status;
}
