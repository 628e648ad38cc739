/* Attention, one query row of one head at a time: list its pairs, then sum over the list. */
#include "reference/reference.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

/* The pairs of one query row and head. */
typedef struct row {
    int64_t count, capacity;
    struct pair {
        int64_t y;
        double score, size; /* size: the score's sum in absolute values */
        double p;           /* exp(score - lse) */
        double m;           /* dropout: keep / (1 - p) */
    } * pairs;
    double lse;
    double *out, *size; /* [D]: sum of P M v, and of P M |v| */
    double *buffer[4];  /* [D] each, for inputs read through a function */
} row;

enum { Q, K, V, DOUT };

static int64_t kv_heads(const ra_attention_desc *desc) { return desc->kv_heads ? desc->kv_heads : desc->heads; }

static double scale_of(const ra_attention_desc *desc) {
    return isnan(desc->scale) ? 1.0 / sqrt((double)desc->head_dim) : desc->scale;
}

static const double *read(const ref_input *input, int64_t rows, int64_t heads, int64_t dim, int64_t batch, int64_t row_index,
                          int64_t head, double *buffer) {
    if (input->data) return input->data + ((batch * rows + row_index) * heads + head) * dim;
    input->read(input->ctx, batch, row_index, head, buffer);
    return buffer;
}

static bool row_init(const ra_attention_desc *desc, row *r) {
    size_t dim = (size_t)desc->head_dim;
    *r = (row){0};
    r->out = calloc(6 * dim, sizeof *r->out);
    if (!r->out) return false;
    r->size = r->out + dim;
    for (size_t n = 0; n < 4; n++) r->buffer[n] = r->out + (2 + n) * dim;
    return true;
}

static void row_free(row *r) {
    free(r->pairs);
    free(r->out);
}

static bool row_push(row *r, struct pair pair) {
    if (r->count == r->capacity) {
        int64_t capacity = r->capacity ? 2 * r->capacity : 256;
        struct pair *grown = realloc(r->pairs, (size_t)capacity * sizeof *grown);
        if (!grown) return false;
        r->pairs = grown;
        r->capacity = capacity;
    }
    r->pairs[r->count++] = pair;
    return true;
}

static const double *read_kv(const ra_attention_desc *desc, const ref_input *input, int64_t b, int64_t y, int64_t head,
                             double *buffer) {
    return read(input, desc->seq_k, kv_heads(desc), desc->head_dim, b, y, ref_kv_head(desc, head), buffer);
}

static const double *read_q(const ra_attention_desc *desc, const ref_input *input, int64_t b, int64_t i, int64_t head,
                            double *buffer) {
    return read(input, desc->seq_q, desc->heads, desc->head_dim, b, i, head, buffer);
}

/* Lists the pairs of query i and head and computes P, lse and out. */
static bool row_forward(const ra_attention_desc *desc, const ref_inputs *in, int64_t b, int64_t i, int64_t head, row *r) {
    int64_t dim = desc->head_dim;
    double scale = scale_of(desc), largest = -INFINITY, total = 0;
    const double *q = read_q(desc, &in->q, b, i, head, r->buffer[Q]);
    r->count = 0;
    for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
        int64_t lo, hi;
        ref_key_hull(desc, i, branch, &lo, &hi);
        for (int64_t y = lo; y < hi; y++) {
            if (!ref_attended(desc, b, i, y, head, branch)) continue;
            const double *k = read_kv(desc, &in->k, b, y, head, r->buffer[K]);
            struct pair pair = {.y = y, .m = 1};
            for (int64_t d = 0; d < dim; d++) {
                pair.score += q[d] * k[d];
                pair.size += fabs(q[d] * k[d]);
            }
            pair.score *= scale;
            pair.size *= fabs(scale);
            if (desc->dropout > 0) pair.m = ref_kept(desc, b, i, y, head, branch) ? 1 / (1 - desc->dropout) : 0;
            if (!(pair.score <= largest)) largest = pair.score; /* takes a NaN too */
            if (!row_push(r, pair)) return false;
        }
    }
    for (int64_t d = 0; d < dim; d++) r->out[d] = r->size[d] = 0;
    r->lse = -INFINITY;
    if (largest == -INFINITY) {
        for (int64_t n = 0; n < r->count; n++) r->pairs[n].p = 0;
        return true;
    }
    for (int64_t n = 0; n < r->count; n++) total += exp(r->pairs[n].score - largest);
    r->lse = largest + log(total);
    for (int64_t n = 0; n < r->count; n++) {
        struct pair *pair = &r->pairs[n];
        pair->p = exp(pair->score - largest) / total;
        const double *v = read_kv(desc, &in->v, b, pair->y, head, r->buffer[V]);
        if (pair->m == 0 || pair->p == 0) continue;
        for (int64_t d = 0; d < dim; d++) {
            r->out[d] += pair->p * pair->m * v[d];
            r->size[d] += pair->p * pair->m * fabs(v[d]);
        }
    }
    return true;
}

/* rowsum(dout * out) - dlse and the same in absolute values. */
static void row_delta(const ra_attention_desc *desc, const ref_inputs *in, int64_t b, int64_t i, int64_t head, const row *r,
                      const double *dout, double *delta, double *size) {
    *delta = *size = 0;
    for (int64_t d = 0; d < desc->head_dim; d++) {
        *delta += dout[d] * r->out[d];
        *size += fabs(dout[d] * r->out[d]);
    }
    if (in->dlse) {
        double dlse = in->dlse[(b * desc->heads + head) * desc->seq_q + i];
        *delta -= dlse;
        *size += fabs(dlse);
    }
}

static void add(double *sum, int64_t index, double value) {
    if (sum) sum[index] += value;
}

/* The gradients of one row: dq at element qi of dq, and (unless no_keys) dk and dv at ki[pair]. only_y >= 0 takes that key
 * alone. */
static void row_backward(const ra_attention_desc *desc, const ref_inputs *in, int64_t b, int64_t i, int64_t head, row *r,
                         int64_t q_element, int64_t only_y, int64_t key_element, ref_outputs *res) {
    int64_t dim = desc->head_dim;
    double scale = scale_of(desc), delta, delta_size;
    const double *q = read_q(desc, &in->q, b, i, head, r->buffer[Q]);
    const double *dout = read_q(desc, &in->dout, b, i, head, r->buffer[DOUT]);
    row_delta(desc, in, b, i, head, r, dout, &delta, &delta_size);
    for (int64_t n = 0; n < r->count; n++) {
        const struct pair *pair = &r->pairs[n];
        if (only_y >= 0 && pair->y != only_y) continue;
        const double *k = read_kv(desc, &in->k, b, pair->y, head, r->buffer[K]);
        const double *v = read_kv(desc, &in->v, b, pair->y, head, r->buffer[V]);
        double dp = 0, dp_size = 0;
        for (int64_t d = 0; d < dim; d++) {
            dp += dout[d] * v[d];
            dp_size += fabs(dout[d] * v[d]);
        }
        bool dead = pair->p == 0; /* a score of -inf, or none that counts: nothing flows */
        double ds = dead ? 0 : pair->p * (pair->m * dp - delta);
        double a = dead ? 0 : pair->p * (pair->m * dp_size + delta_size);
        int64_t ke = only_y >= 0 ? key_element : ((b * desc->seq_k + pair->y) * kv_heads(desc) + ref_kv_head(desc, head)) * dim;
        for (int64_t d = 0; d < dim && !dead; d++) {
            if (only_y < 0) {
                add(res->dq, q_element + d, scale * ds * k[d]);
                add(res->m_dq, q_element + d, fabs(scale * a * k[d]) + DBL_MIN);
            }
            add(res->dk, ke + d, scale * ds * q[d]);
            add(res->m_dk, ke + d, fabs(scale * a * q[d]) + DBL_MIN);
            if (pair->m == 0) continue;
            add(res->dv, ke + d, pair->p * pair->m * dout[d]);
            add(res->m_dv, ke + d, fabs(pair->p * pair->m * dout[d]));
        }
    }
}

static void clear(double *array, int64_t count) {
    for (int64_t n = 0; array && n < count; n++) array[n] = 0;
}

static bool query_rows(const ra_attention_desc *desc, const ref_inputs *in, const int64_t *rows, int64_t count, bool backward,
                       ref_outputs *res) {
    int64_t dim = desc->head_dim, heads = desc->heads;
    row r;
    if (!row_init(desc, &r)) return false;
    res->max_score = 0;
    res->pairs = res->holes = 0;
    if (backward) {
        clear(res->dq, desc->batch * count * heads * dim);
        clear(res->m_dq, desc->batch * count * heads * dim);
    }
    for (int64_t b = 0; b < desc->batch; b++) {
        for (int64_t n = 0; n < count; n++) {
            for (int64_t head = 0; head < heads; head++) {
                int64_t i = rows ? rows[n] : n;
                if (!row_forward(desc, in, b, i, head, &r)) {
                    row_free(&r);
                    return false;
                }
                int64_t element = ((b * count + n) * heads + head) * dim, entry = (b * heads + head) * count + n;
                double m_lse = r.count ? 1 : 0;
                for (int64_t c = 0; c < r.count; c++) {
                    if (r.pairs[c].size > m_lse) m_lse = r.pairs[c].size;
                    if (fabs(r.pairs[c].score) > res->max_score) res->max_score = fabs(r.pairs[c].score);
                }
                for (int64_t d = 0; d < dim; d++) {
                    if (res->out) res->out[element + d] = r.out[d];
                    if (res->m_out) res->m_out[element + d] = r.size[d];
                }
                if (res->lse) res->lse[entry] = r.lse;
                if (res->m_lse) res->m_lse[entry] = m_lse;
                res->pairs += r.count;
                res->holes += r.count == 0;
                if (backward) row_backward(desc, in, b, i, head, &r, element, -1, 0, res);
            }
        }
    }
    row_free(&r);
    return true;
}

bool ref_forward(const ra_attention_desc *desc, const ref_inputs *inputs, ref_outputs *outputs) {
    return query_rows(desc, inputs, NULL, desc->seq_q, false, outputs);
}

bool ref_backward(const ra_attention_desc *desc, const ref_inputs *inputs, ref_outputs *outputs) {
    int64_t keys = desc->batch * desc->seq_k * kv_heads(desc) * desc->head_dim;
    clear(outputs->dk, keys);
    clear(outputs->dv, keys);
    clear(outputs->m_dk, keys);
    clear(outputs->m_dv, keys);
    return query_rows(desc, inputs, NULL, desc->seq_q, true, outputs);
}

bool ref_query_rows(const ra_attention_desc *desc, const ref_inputs *inputs, const int64_t *rows, int64_t count, bool backward,
                    ref_outputs *outputs) {
    ref_outputs only = *outputs; /* keys are not summed from a sample of queries */
    only.dk = only.dv = only.m_dk = only.m_dv = NULL;
    bool done = query_rows(desc, inputs, rows, count, backward, &only);
    outputs->max_score = only.max_score;
    outputs->pairs = only.pairs;
    outputs->holes = only.holes;
    return done;
}

/* Is there a branch in which query i of this head meets key y? */
static bool meets(const ra_attention_desc *desc, int64_t b, int64_t i, int64_t y, int64_t head) {
    for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
        if (ref_attended(desc, b, i, y, head, branch)) return true;
    }
    return false;
}

bool ref_key_rows(const ra_attention_desc *desc, const ref_inputs *inputs, const int64_t *rows, int64_t count,
                  ref_outputs *outputs) {
    int64_t dim = desc->head_dim, keys = desc->batch * count * kv_heads(desc) * dim;
    clear(outputs->dk, keys);
    clear(outputs->dv, keys);
    clear(outputs->m_dk, keys);
    clear(outputs->m_dv, keys);
    row r;
    if (!row_init(desc, &r)) return false;
    for (int64_t b = 0; b < desc->batch; b++) {
        for (int64_t n = 0; n < count; n++) {
            int64_t lo = desc->seq_q, hi = 0;
            for (int64_t branch = 0; branch < ref_branches(desc); branch++) {
                int64_t branch_lo, branch_hi;
                ref_query_hull(desc, rows[n], branch, &branch_lo, &branch_hi);
                if (branch_lo < lo) lo = branch_lo;
                if (branch_hi > hi) hi = branch_hi;
            }
            for (int64_t i = lo; i < hi; i++) {
                for (int64_t head = 0; head < desc->heads; head++) {
                    if (!meets(desc, b, i, rows[n], head)) continue;
                    if (!row_forward(desc, inputs, b, i, head, &r)) {
                        row_free(&r);
                        return false;
                    }
                    int64_t element = ((b * count + n) * kv_heads(desc) + ref_kv_head(desc, head)) * dim;
                    row_backward(desc, inputs, b, i, head, &r, 0, rows[n], element, outputs);
                }
            }
        }
    }
    row_free(&r);
    return true;
}

bool ref_outputs_alloc(const ra_attention_desc *desc, int64_t rows_q, int64_t rows_k, bool backward, ref_outputs *outputs) {
    size_t q = (size_t)(desc->batch * rows_q * desc->heads), k = (size_t)(desc->batch * rows_k * kv_heads(desc));
    size_t dim = (size_t)desc->head_dim;
    *outputs = (ref_outputs){0};
    struct {
        double **array;
        size_t count;
        bool wanted;
    } list[] = {
        {&outputs->out, q * dim, true},      {&outputs->m_out, q * dim, true},    {&outputs->lse, q, true},
        {&outputs->m_lse, q, true},          {&outputs->dq, q * dim, backward},   {&outputs->m_dq, q * dim, backward},
        {&outputs->dk, k * dim, backward},   {&outputs->m_dk, k * dim, backward}, {&outputs->dv, k * dim, backward},
        {&outputs->m_dv, k * dim, backward},
    };
    for (size_t n = 0; n < sizeof list / sizeof *list; n++) {
        if (!list[n].wanted) continue;
        *list[n].array = calloc(list[n].count + 1, sizeof(double));
        if (!*list[n].array) {
            ref_outputs_free(outputs);
            return false;
        }
    }
    return true;
}

void ref_outputs_free(ref_outputs *outputs) {
    double *arrays[] = {outputs->out,   outputs->lse,   outputs->dq,   outputs->dk,   outputs->dv,
                        outputs->m_out, outputs->m_lse, outputs->m_dq, outputs->m_dk, outputs->m_dv};
    for (size_t n = 0; n < sizeof arrays / sizeof *arrays; n++) free(arrays[n]);
    *outputs = (ref_outputs){0};
}
