#include "verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"
#include "device.h"
#include "group.h"
#include "reference/reference.h"
#include "shard.h"

#define FULL_LIMIT 4e8 /* products of elements that are worth a complete check: some ten seconds */
#define LOOK 3.0       /* products in whose time the reference sees whether a query meets a key */
#define SAMPLED_ROWS 32
#define SAMPLED_KEYS 8

const char *const verify_names[VERIFY_TENSORS] = {"out", "lse", "dq", "dk", "dv"};

/* Results of all ranks as global arrays in float64, and the inputs. */
typedef struct job {
    const settings *s;
    const ra_attention_desc *desc;
    double *t[TENSOR_COUNT];
} job;

static int64_t elements(const ra_attention_desc *desc, tensor_id id) {
    int64_t dim = id == T_LSE ? 1 : desc->head_dim;
    return desc->batch * tensor_rows(desc, id) * tensor_heads(desc, id) * dim;
}

static ra_status rank_body(rank_job *rank) {
    job *j = rank->arg;
    shard s;
    ra_plan *plan = NULL;
    RA_TRY(shard_init(j->desc, rank->rank, rank->ranks, &s));
    ra_status status = shard_alloc_all(&s, true);
    if (status == RA_OK) status = shard_generate(&s, j->s->seed);
    if (status == RA_OK) status = ra_plan_create(rank->comm, j->desc, &plan);
    double seconds;
    if (status == RA_OK) status = ra_plan_check_backward(plan);
    if (status == RA_OK) status = device_forward(plan, &s, &seconds);
    if (status == RA_OK) status = device_backward(plan, &s, &seconds);
    for (int id = 0; id < TENSOR_COUNT && status == RA_OK; id++) {
        bool copy_of_rank_0 = j->desc->query_placement == RA_REPLICATED && tensor_has_queries((tensor_id)id) && rank->rank != 0;
        if (!copy_of_rank_0) status = shard_store(&s, (tensor_id)id, j->t[id], RA_F64);
    }
    ra_plan_destroy(plan);
    shard_free(&s);
    return status;
}

/* Where ranks are processes, each has only its own rows, and zeros elsewhere: the sum over ranks has all. */
static ra_status collect(job *j, group *g) {
    for (int id = 0; id < TENSOR_COUNT && g->local < g->ranks; id++) {
        int64_t count = elements(j->desc, (tensor_id)id), bytes = count * (int64_t)sizeof(double);
        double *all = malloc((size_t)(g->ranks * bytes) + 1);
        if (!all) return ra_fail(RA_NOMEM, "no memory to gather the results");
        memcpy(all + g->first * count, j->t[id], (size_t)bytes);
        ra_status status = group_gather(g, all, bytes);
        memset(j->t[id], 0, (size_t)bytes);
        for (int64_t i = 0; i < g->ranks * count; i++) j->t[id][i % count] += all[i];
        free(all);
        RA_TRY(status);
    }
    return RA_OK;
}

/* ----------------------------------------------------------------------------------------------------------- judging */

void verify_judge(verdict *v, int tensor, double error, double bound) {
    v->error[tensor] = error > v->error[tensor] ? error : v->error[tensor];
    v->bound[tensor] = bound;
    v->checked[tensor] = true;
    if (!(error <= bound)) v->failed = true;
}

static void judge(verdict *v, int tensor, ref_error e, double bound) { verify_judge(v, tensor, e.ratio, bound); }

static void judge_queries(const job *j, const ref_outputs *want, int64_t rows, double *const got[TENSOR_COUNT], verdict *v) {
    const ra_attention_desc *d = j->desc;
    int64_t wide = d->batch * rows * d->heads * d->head_dim, narrow = d->batch * rows * d->heads;
    double bound = ref_bound(d->dtype, false, want->max_score), bound_lse = ref_bound(d->dtype, true, want->max_score);
    judge(v, VERIFY_OUT, ref_compare(got[T_OUT], want->out, want->m_out, wide, d->dtype), bound);
    judge(v, VERIFY_LSE, ref_compare_lse(got[T_LSE], want->lse, want->m_lse, narrow), bound_lse);
    judge(v, VERIFY_DQ, ref_compare(got[T_DQ], want->dq, want->m_dq, wide, d->dtype), bound);
}

static ref_inputs inputs_of(const job *j) {
    return (ref_inputs){
        .q = {.data = j->t[T_Q]}, .k = {.data = j->t[T_K]}, .v = {.data = j->t[T_V]}, .dout = {.data = j->t[T_DOUT]}};
}

static ra_status judge_all(const job *j, verdict *v) {
    const ra_attention_desc *d = j->desc;
    ref_outputs want;
    ref_inputs inputs = inputs_of(j);
    bool enough = ref_outputs_alloc(d, d->seq_q, d->seq_k, true, &want);
    if (enough && ref_backward(d, &inputs, &want)) {
        int64_t keys = elements(d, T_K);
        double bound = ref_bound(d->dtype, false, want.max_score);
        judge_queries(j, &want, d->seq_q, j->t, v);
        judge(v, VERIFY_DK, ref_compare(j->t[T_DK], want.dk, want.m_dk, keys, d->dtype), bound);
        judge(v, VERIFY_DV, ref_compare(j->t[T_DV], want.dv, want.m_dv, keys, d->dtype), bound);
    } else enough = false;
    ref_outputs_free(&want);
    return enough ? RA_OK : ra_fail(RA_NOMEM, "no memory for the reference");
}

/* Gradients of one key row in every head, and the same sums in absolute values, each [batch][Hk][D]. The reference would
 * compute the whole row of every query that meets the key; here the row's lse and out, which are checked by themselves,
 * stand for that. */
typedef struct key_sums {
    double *dk, *dv, *m_dk, *m_dv;
} key_sums;

static void add_query(const job *j, int64_t b, int64_t i, int64_t head, int64_t y, double m, key_sums *sums) {
    const ra_attention_desc *d = j->desc;
    int64_t dim = d->head_dim, g = ref_kv_head(d, head), hk = tensor_heads(d, T_K);
    const double *q = j->t[T_Q] + ((b * d->seq_q + i) * d->heads + head) * dim,
                 *k = j->t[T_K] + ((b * d->seq_k + y) * hk + g) * dim;
    const double *v = j->t[T_V] + ((b * d->seq_k + y) * hk + g) * dim, *out = j->t[T_OUT] + (q - j->t[T_Q]);
    const double *dout = j->t[T_DOUT] + (q - j->t[T_Q]);
    double lse = j->t[T_LSE][(b * d->heads + head) * d->seq_q + i];
    double scale = isnan(d->scale) ? 1 / sqrt((double)dim) : d->scale, score = 0, dp = 0, dp_size = 0, delta = 0,
           delta_size = 0;
    for (int64_t e = 0; e < dim; e++) {
        score += q[e] * k[e];
        dp += dout[e] * v[e];
        dp_size += fabs(dout[e] * v[e]);
        delta += dout[e] * out[e];
        delta_size += fabs(dout[e] * out[e]);
    }
    double p = exp(scale * score - lse), ds = p * (m * dp - delta), a = p * (m * dp_size + delta_size);
    int64_t at = (b * hk + g) * dim;
    for (int64_t e = 0; e < dim; e++) {
        sums->dk[at + e] += scale * ds * q[e];
        sums->m_dk[at + e] += fabs(scale * a * q[e]);
        sums->dv[at + e] += p * m * dout[e];
        sums->m_dv[at + e] += fabs(p * m * dout[e]);
    }
}

static void sum_key(const job *j, int64_t y, key_sums *sums) {
    const ra_attention_desc *d = j->desc;
    for (int64_t branch = 0; branch < ref_branches(d); branch++) {
        int64_t low, high;
        ref_query_hull(d, y, branch, &low, &high);
        for (int64_t b = 0; b < d->batch; b++)
            for (int64_t head = 0; head < d->heads; head++)
                for (int64_t i = low; i < high; i++) {
                    if (!ref_attended(d, b, i, y, head, branch)) continue;
                    double m = d->dropout == 0 ? 1 : ref_kept(d, b, i, y, head, branch) ? 1 / (1 - d->dropout) : 0;
                    add_query(j, b, i, head, y, m, sums);
                }
    }
}

static ra_status judge_keys(const job *j, double max_score, verdict *v) {
    const ra_attention_desc *d = j->desc;
    int64_t hk = tensor_heads(d, T_K), width = hk * d->head_dim, elements_of_row = d->batch * width,
            count = ra_min(d->seq_k, SAMPLED_KEYS);
    double *space = malloc(6 * (size_t)elements_of_row * sizeof *space);
    if (!space) return ra_fail(RA_NOMEM, "no memory for the reference");
    key_sums sums = {space, space + elements_of_row, space + 2 * elements_of_row, space + 3 * elements_of_row};
    double *got[2] = {space + 4 * elements_of_row, space + 5 * elements_of_row}, bound = ref_bound(d->dtype, false, max_score);
    for (int64_t n = 0; n < count; n++) {
        int64_t y = n * (d->seq_k - 1) / ra_max(1, count - 1);
        memset(space, 0, 4 * (size_t)elements_of_row * sizeof *space);
        sum_key(j, y, &sums);
        for (int64_t b = 0; b < d->batch; b++) {
            memcpy(got[0] + b * width, j->t[T_DK] + (b * d->seq_k + y) * width, (size_t)width * sizeof(double));
            memcpy(got[1] + b * width, j->t[T_DV] + (b * d->seq_k + y) * width, (size_t)width * sizeof(double));
        }
        judge(v, VERIFY_DK, ref_compare(got[0], sums.dk, sums.m_dk, elements_of_row, d->dtype), bound);
        judge(v, VERIFY_DV, ref_compare(got[1], sums.dv, sums.m_dv, elements_of_row, d->dtype), bound);
    }
    free(space);
    return RA_OK;
}

/* Rows spread over the sequence, one at a time. */
static ra_status judge_sample(const job *j, verdict *v) {
    const ra_attention_desc *d = j->desc;
    ref_outputs want;
    ref_inputs inputs = inputs_of(j);
    int64_t width = d->heads * d->head_dim, count = ra_min(d->seq_q, SAMPLED_ROWS);
    double *got[TENSOR_COUNT] = {0};
    got[T_OUT] = malloc((size_t)(d->batch * width) * sizeof(double));
    got[T_DQ] = malloc((size_t)(d->batch * width) * sizeof(double));
    got[T_LSE] = malloc((size_t)(d->batch * d->heads) * sizeof(double));
    bool enough = got[T_OUT] && got[T_DQ] && got[T_LSE] && ref_outputs_alloc(d, 1, 0, true, &want);
    for (int64_t n = 0; n < count && enough; n++) {
        int64_t row = n * (d->seq_q - 1) / ra_max(1, count - 1);
        enough = ref_query_rows(d, &inputs, &row, 1, true, &want);
        for (int64_t b = 0; b < d->batch; b++) {
            memcpy(got[T_OUT] + b * width, j->t[T_OUT] + (b * d->seq_q + row) * width, (size_t)width * sizeof(double));
            memcpy(got[T_DQ] + b * width, j->t[T_DQ] + (b * d->seq_q + row) * width, (size_t)width * sizeof(double));
            for (int64_t h = 0; h < d->heads; h++)
                got[T_LSE][b * d->heads + h] = j->t[T_LSE][(b * d->heads + h) * d->seq_q + row];
        }
        if (enough) judge_queries(j, &want, 1, got, v);
    }
    v->sampled_rows = count;
    double max_score = enough ? want.max_score : 0;
    if (enough) ref_outputs_free(&want);
    free(got[T_OUT]);
    free(got[T_DQ]);
    free(got[T_LSE]);
    return enough ? judge_keys(j, max_score, v) : ra_fail(RA_NOMEM, "no memory for the reference");
}

/* A complete check multiplies rows of each attended pair, and looks for them among all keys, or those of a segment. */
static double full_work(const ra_attention_desc *d, double pairs) {
    double looks = 0;
    for (int64_t branch = 0; branch < ref_branches(d); branch++) {
        const int64_t segment = d->branches ? d->segment_lengths[branch] : 0;
        looks += (double)(segment > 0 ? ra_min(segment, d->seq_k) : d->seq_k);
    }
    looks *= (double)d->batch * (double)d->heads * (double)d->seq_q;
    return pairs * (double)d->head_dim + LOOK * looks;
}

ra_status verify_on(group *g, const settings *s, const ra_attention_desc *desc, const char *what, verdict *v) {
    job j = {.s = s, .desc = desc};
    plan_totals totals;
    memset(v, 0, sizeof *v);
    RA_TRY(plan_sum(desc, g->ranks, true, &totals));
    ra_status status = RA_OK;
    for (int id = 0; id < TENSOR_COUNT && status == RA_OK; id++) {
        j.t[id] = calloc((size_t)elements(desc, (tensor_id)id) + 1, sizeof(double));
        if (!j.t[id]) status = ra_fail(RA_NOMEM, "no memory to gather the results");
    }
    if (status == RA_OK) status = group_run(g, what, rank_body, &j);
    if (status == RA_OK) status = collect(&j, g);
    const bool all = full_work(desc, totals.pairs_sum) <= FULL_LIMIT;
    if (status == RA_OK) status = all ? judge_all(&j, v) : judge_sample(&j, v);
    for (int id = 0; id < TENSOR_COUNT; id++) free(j.t[id]);
    return status;
}

ra_status verify_case(const settings *s, const ra_attention_desc *desc, int ranks, const char *what, verdict *v) {
    group g;
    RA_TRY(check_memory_limit(s, desc, ranks, true));
    RA_TRY(group_open(s, ranks, &g));
    ra_status status = verify_on(&g, s, desc, what, v);
    group_close(&g);
    return status;
}
