/* The public calls: arguments are checked here, before anything is touched. */
#include <inttypes.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/status.h"
#include "ring/pass.h"

/* One argument: a tensor of batch x rows x heads x dim. */
typedef struct argument {
    const char *name;
    const ra_tensor *tensor;
    int64_t rows, heads, dim, size;
    bool output, optional;
} argument;

static bool is_empty(const ra_config *c, const argument *a) { return c->batch == 0 || a->rows == 0; }

/* The bytes that an argument may touch: [*low, *high). False if no memory is that large. */
static bool extent(const ra_config *c, const argument *a, uintptr_t *low, uintptr_t *high) {
    int64_t first = 0, last = a->dim;
    const int64_t strides[3] = {a->tensor->batch, a->tensor->row, a->tensor->head}, counts[3] = {c->batch, a->rows, a->heads};
    for (int i = 0; i < 3; i++) {
        int64_t reach, *end = strides[i] < 0 ? &first : &last;
        if (!ra_mul(strides[i], counts[i] - 1, &reach) || !ra_add(*end, reach, end)) return false;
    }
    if (!ra_mul(first, a->size, &first) || !ra_mul(last, a->size, &last)) return false;
    *low = (uintptr_t)a->tensor->data + (uintptr_t)first;
    *high = (uintptr_t)a->tensor->data + (uintptr_t)last;
    return *low <= (uintptr_t)a->tensor->data && *high > *low;
}

/* Dimensions of a tensor by stride, the longest first; a stride's direction does not matter to what overlaps what. */
typedef struct extents {
    int64_t strides[3], counts[3];
} extents;

static extents extents_of(const ra_config *c, const argument *a) {
    extents l = {{a->tensor->batch, a->tensor->row, a->tensor->head}, {c->batch, a->rows, a->heads}};
    for (int i = 0; i < 3; i++) {
        if (l.strides[i] < 0) l.strides[i] = -l.strides[i];
        for (int j = i; j > 0 && l.strides[j] > l.strides[j - 1]; j--) {
            int64_t stride = l.strides[j], count = l.counts[j];
            l.strides[j] = l.strides[j - 1], l.counts[j] = l.counts[j - 1];
            l.strides[j - 1] = stride, l.counts[j - 1] = count;
        }
    }
    return l;
}

/* Each stride steps over all that the shorter ones reach: then no two rows overlap. Rows with other strides may not overlap
 * either, but nobody lays out a tensor like that: they are taken to overlap. */
static bool is_nested(const extents *l, int64_t dim) {
    int64_t reach = dim;
    for (int i = 2; i >= 0; i--) {
        if (l->counts[i] < 2) continue;
        if (l->strides[i] < reach) return false;
        reach += l->strides[i] * (l->counts[i] - 1);
    }
    return true;
}

/* The rows of an output may not overlap each other. */
static ra_status check_output(const ra_config *c, const argument *a) {
    extents l = extents_of(c, a);
    if (is_nested(&l, a->dim)) return RA_OK;
    return ra_fail(RA_INVALID,
                   "%s: the strides %" PRId64 " (batch), %" PRId64 " (row) and %" PRId64 " (head) make rows of %" PRId64
                   " elements overlap",
                   a->name, a->tensor->batch, a->tensor->row, a->tensor->head, a->dim);
}

/* Whether rows of a and b can meet when b starts `gap` elements after a, over the dimensions from `level` on. Both are nested,
 * so that only the index differences which bring the two closest can make them meet. */
static bool rows_meet(const argument *a, const argument *b, int64_t gap, const extents *x, const extents *y, int level) {
    if (level == 3) return gap > -b->dim && gap < a->dim;
    if (x->counts[level] < 2 && y->counts[level] < 2) return rows_meet(a, b, gap, x, y, level + 1);
    int64_t closest = ra_floor_div(gap, x->strides[level]);
    for (int64_t difference = closest - 1; difference <= closest + 1; difference++) {
        if (difference <= -y->counts[level] || difference >= x->counts[level]) continue;
        if (rows_meet(a, b, gap - difference * x->strides[level], x, y, level + 1)) return true;
    }
    return false;
}

/* Slices of one packed tensor have the same strides and are told apart exactly; others must lie in different ranges of
 * memory. */
static bool share_memory(const ra_config *c, const argument *a, const argument *b) {
    uintptr_t low[2], high[2];
    if (!extent(c, a, &low[0], &high[0]) || !extent(c, b, &low[1], &high[1])) return true;
    if (low[0] >= high[1] || low[1] >= high[0]) return false;
    const ra_tensor *x = a->tensor, *y = b->tensor;
    if (a->size != b->size || x->batch != y->batch || x->row != y->row || x->head != y->head) return true;
    if (x->batch < 0 || x->row < 0 || x->head < 0) return true; /* backwards: not worth telling apart */
    int64_t bytes = (int64_t)((uintptr_t)y->data - (uintptr_t)x->data);
    const extents p = extents_of(c, a), q = extents_of(c, b);
    if (bytes % a->size != 0 || !is_nested(&p, a->dim) || !is_nested(&q, b->dim)) return true;
    return rows_meet(a, b, bytes / a->size, &p, &q, 0);
}

static ra_status check_arguments(const ra_config *c, const argument *args, int count) {
    for (int i = 0; i < count; i++) {
        if (is_empty(c, &args[i])) continue;
        if (!args[i].tensor->data && !args[i].optional) return ra_fail(RA_INVALID, "%s is NULL", args[i].name);
        if (args[i].tensor->data && (uintptr_t)args[i].tensor->data % (uintptr_t)args[i].size)
            return ra_fail(RA_INVALID, "%s is not aligned to its elements of %" PRId64 " bytes", args[i].name, args[i].size);
        uintptr_t low, high;
        if (args[i].tensor->data && !extent(c, &args[i], &low, &high))
            return ra_fail(RA_INVALID, "the strides of %s are so large that addresses overflow", args[i].name);
        if (args[i].tensor->data && args[i].output) RA_TRY(check_output(c, &args[i]));
    }
    for (int i = 0; i < count; i++) /* an output shares memory with nothing else */
        for (int j = 0; j < count; j++) {
            if (i == j || !args[i].output || (args[j].output && j < i)) continue;
            if (!args[i].tensor->data || !args[j].tensor->data || is_empty(c, &args[i]) || is_empty(c, &args[j])) continue;
            if (share_memory(c, &args[i], &args[j]))
                return ra_fail(RA_INVALID, "%s and %s share memory", args[i].name, args[j].name);
        }
    return RA_OK;
}

ra_status ra_forward(ra_plan *plan, const ra_forward_args *args) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    if (!args) return ra_fail(RA_INVALID, "args is NULL");
    const ra_config *c = &plan->config;
    int64_t rows_q = plan->view.rows_q, rows_k = plan->view.rows_k, dim = c->head_dim, size = (int64_t)ra_dtype_size(c->dtype);
    const argument list[] = {{"q", &args->q, rows_q, c->heads, dim, size, false, false},
                             {"k", &args->k, rows_k, c->kv_heads, dim, size, false, false},
                             {"v", &args->v, rows_k, c->kv_heads, dim, size, false, false},
                             {"out", &args->out, rows_q, c->heads, dim, size, true, false},
                             {"lse", &args->lse, rows_q, c->heads, 1, ra_state_size(c->dtype), true, true}};
    RA_TRY(check_arguments(c, list, (int)(sizeof list / sizeof *list)));
    return ra_ring_forward(plan, args);
}

ra_status ra_backward(ra_plan *plan, const ra_backward_args *args) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    if (!args) return ra_fail(RA_INVALID, "args is NULL");
    const ra_config *c = &plan->config;
    int64_t rows_q = plan->view.rows_q, rows_k = plan->view.rows_k, dim = c->head_dim, size = (int64_t)ra_dtype_size(c->dtype);
    int64_t state = ra_state_size(c->dtype);
    const argument list[] = {{"q", &args->q, rows_q, c->heads, dim, size, false, false},
                             {"k", &args->k, rows_k, c->kv_heads, dim, size, false, false},
                             {"v", &args->v, rows_k, c->kv_heads, dim, size, false, false},
                             {"out", &args->out, rows_q, c->heads, dim, size, false, false},
                             {"lse", &args->lse, rows_q, c->heads, 1, state, false, false},
                             {"dout", &args->dout, rows_q, c->heads, dim, size, false, false},
                             {"dlse", &args->dlse, rows_q, c->heads, 1, state, false, true},
                             {"dq", &args->dq, rows_q, c->heads, dim, size, true, false},
                             {"dk", &args->dk, rows_k, c->kv_heads, dim, size, true, false},
                             {"dv", &args->dv, rows_k, c->kv_heads, dim, size, true, false}};
    RA_TRY(check_arguments(c, list, (int)(sizeof list / sizeof *list)));
    return ra_ring_backward(plan, args);
}

ra_status ra_attention(const ra_attention_desc *desc, const ra_forward_args *args) {
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    RA_TRY(ra_comm_self(&comm));
    ra_status status = ra_plan_create(comm, desc, &plan);
    if (status == RA_OK) status = ra_forward(plan, args);
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
    return status;
}
