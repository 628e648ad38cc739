/* A libringattn_cuda.so without a GPU: its device is the CPU, its memory this process's own, its streams are threads that take
 * their time (streams.h). What the library or a test forgets to order or to wait for shows here.
 *
 * The CPU kernels fill the rows that no item meets before a step and sum gradients apart from results; the module bridges that,
 * so that it keeps the promises of backend.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/dtype.h"
#include "device/cuda/layout.h"
#include "device/rows.h"
#include "streams.h"

static ra_status refuse(ra_cuda_error *error, ra_status status, const char *sentence) {
    snprintf(error->text, sizeof error->text, "%s", sentence);
    return status;
}

int64_t ra_cuda_backend_layout(char *text, int64_t capacity) { return ra_layout_text(text, capacity); }

/* ---------------------------------------------------------------------------------------------------------------- device */

/* Its own (nccl.c) is used where RINGATTN_NCCL names it, and never a real one. */
const char *ra_cuda_backend_nccl(void) { return NULL; }

ra_status ra_cuda_backend_probe(ra_cuda_device *device, ra_cuda_error *error) {
    (void)error;
    if (device) *device = (ra_cuda_device){.name = "stand-in for a GPU", .major = 8, .processors = 1, .memory = 1 << 30};
    return RA_OK;
}

/* ----------------------------------------------------------------------------------------------------------------- calls */

/* What is enqueued: a function and what it needs. What lies in the caller's memory is copied. */
typedef struct call {
    void (*run)(struct call *call);
    const ra_kernel *kernel; /* the best of the CPU's */
    ra_workers *workers;
    ra_problem problem;
    ra_used_rows used;
    ra_item *items;
    ra_forward_step forward;
    ra_backward_step backward;
    ra_tensor a, b, c, d; /* of rows */
    int64_t size, rows, heads;
    bool gaps;
} call;

static void *copy_of(const void *from, int64_t count, size_t size) {
    if (!from) return NULL;
    void *to = malloc((size_t)count * size + 1);
    if (!to) abort();
    memcpy(to, from, (size_t)count * size);
    return to;
}

static void *zeros(int64_t bytes) {
    void *memory = aligned_alloc(64, ((size_t)bytes + 127) / 64 * 64);
    if (!memory) abort();
    return memset(memory, 0, ((size_t)bytes + 127) / 64 * 64);
}

static void run_call(void *arg) {
    call *c = arg;
    c->run(c);
    ra_workers_destroy(c->workers);
    free((void *)c->problem.key_begin);
    free((void *)c->problem.key_end);
    free(c->used.sets);
    free(c->items);
    free(c);
}

static bool is_near(const call *c) {
    const void *const used[] = {c->forward.q.data, c->forward.out.data, c->forward.acc.data, c->forward.scratch,
                                c->backward.q.data, c->backward.dq.data, c->backward.dq_acc.data, c->backward.scratch,
                                c->a.data, c->b.data};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (!memory_is_near(used[i])) return false;
    return true;
}

/* The bytes between the first and the last key of an item in a view. */
static void use_keys(const ra_problem *p, const ra_item *item, ra_tensor view, int64_t size, bool writes, void *stream) {
    const struct {
        int64_t count, step;
    } ways[] = {{p->batch, view.batch},
                {item->heads.count, view.head},
                {item->k.count, view.row * item->k.row_step},
                {item->loop[0].repeat, view.row * item->loop[0].k_row},
                {item->loop[1].repeat, view.row * item->loop[1].k_row}};
    int64_t first = item->k.row * view.row, last = first;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const int64_t far = (ways[i].count - 1) * ways[i].step;
        *(far < 0 ? &first : &last) += far;
    }
    if (view.data) memory_use(stream, (char *)view.data + first * size, (last - first + p->head_dim) * size, writes);
}

static void use_items(const call *c, const ra_problem *p, const ra_item *items, int64_t count, void *stream) {
    const bool sums = c->backward.items && !c->backward.single;
    for (const ra_item *item = items; item < items + count; item++) {
        use_keys(p, item, item->k_view, (int64_t)ra_dtype_size(p->dtype), false, stream);
        use_keys(p, item, item->v_view, (int64_t)ra_dtype_size(p->dtype), false, stream);
        if (sums) use_keys(p, item, item->dk_view, sizeof(float), true, stream);
        if (sums) use_keys(p, item, item->dv_view, sizeof(float), true, stream);
    }
}

/* items and used may be NULL. */
static ra_status enqueue(call wanted, const ra_problem *p, const ra_item *items, int64_t item_count, const ra_used_rows *used,
                         void *stream, ra_cuda_error *error) {
    if (!is_near(&wanted)) return refuse(error, RA_DEVICE, "an illegal memory access was encountered: it is another GPU's");
    call *c = copy_of(&wanted, 1, sizeof wanted);
    if (ra_kernel_find(NULL, RA_DEVICE_CPU, p, &c->kernel) != RA_OK || ra_workers_create(1, &c->workers) != RA_OK) {
        free(c);
        return refuse(error, RA_NOT_AVAILABLE, "the CPU has no kernel for this problem");
    }
    c->problem = *p;
    c->problem.key_begin = copy_of(p->key_begin, p->batch, sizeof(int64_t));
    c->problem.key_end = copy_of(p->key_end, p->batch, sizeof(int64_t));
    c->items = copy_of(items, item_count, sizeof(ra_item));
    for (int64_t i = 0; i < item_count; i++) c->problem.keys = ra_max(c->problem.keys, items[i].k.count); /* joined ones */
    c->used = used ? *used : (ra_used_rows){.modulus = 1};
    c->used.sets = copy_of(c->used.sets, c->used.count, sizeof(ra_used));
    use_items(&wanted, p, items, item_count, stream);
    stream_enqueue(stream, run_call, c);
    return RA_OK;
}

/* --------------------------------------------------------------------------------------------------------------- forward */

const char *ra_cuda_backend_unsupported(const ra_problem *p, const char *wanted, bool backward) {
    (void)backward;
    if (p->dtype == RA_F64) return "the CUDA kernels compute f32, bf16 and f16 only";
    if (p->rows_q >= 1 << 30) return "a rank holds 2^30 rows or more";
    if (wanted && strcmp(wanted, RA_CUDA_SM90A) == 0) return "it needs a GPU of compute capability 9.0 (Hopper)";
    return NULL;
}

int64_t ra_cuda_backend_scratch(const ra_problem *problem, bool backward) {
    (void)problem, (void)backward;
    return 64;
}

/* May the step run? *path says by which kernel. */
static ra_status admit(const ra_problem *p, const char *wanted, bool backward, const char **path, ra_cuda_error *error) {
    const char *reason = ra_cuda_backend_unsupported(p, wanted, backward);
    if (reason) {
        snprintf(error->text, sizeof error->text, "kernel '%s' cannot be used: %s", wanted ? wanted : "cuda", reason);
        return RA_NOT_AVAILABLE;
    }
    if (path) *path = p->dtype == RA_F32 ? RA_CUDA_F32 : RA_CUDA_SM80;
    return RA_OK;
}

static ra_forward_step *forward_of(call *c) {
    ra_forward_step *s = &c->forward;
    s->problem = &c->problem;
    s->items = c->items;
    s->used = c->used;
    s->workers = c->workers;
    s->poll = NULL;
    return s;
}

/* RINGATTN_STAND_IN_PAIR_US: a step takes so many microseconds for each pair of a query and a key. */
static void take_time(const ra_problem *p, const ra_item *items, int64_t count) {
    const char *text = getenv("RINGATTN_STAND_IN_PAIR_US");
    if (!text) return;
    int64_t pairs = 0;
    for (const ra_item *item = items; item < items + count; item++)
        for (int64_t a = 0; a < item->q.count; a++) {
            int64_t begin, end;
            const int64_t repeats = item->loop[0].repeat * item->loop[1].repeat;
            const ra_item_rows *q = &item->q, *k = &item->k;
            ra_key_interval(p, 0, q->pos + a * q->pos_step, k->pos, k->pos_step, k->count, &begin, &end);
            pairs += repeats * ra_max(0, ra_min(end, k->count) - ra_max(begin, 0));
        }
    const int64_t ns = 1000 * pairs * strtol(text, NULL, 10);
    nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
}

static void run_forward(call *c) {
    stream_slow_down("RINGATTN_STAND_IN_STEP_MS");
    take_time(&c->problem, c->items, c->forward.item_count);
    ra_forward_step *s = forward_of(c);
    s->scratch = zeros(c->kernel->forward_scratch(&c->problem, 1));
    if (s->single) ra_rows_fill(s->problem, s->workers, &s->used, true, s->out, s->lse, s->m, s->l);
    if (s->item_count) c->kernel->forward(s);
    free(s->scratch);
}

static void run_fill(call *c) {
    const ra_forward_step *s = forward_of(c);
    ra_rows_fill(s->problem, s->workers, &s->used, s->single, s->out, s->lse, s->m, s->l);
}
static void run_finish(call *c) {
    const ra_forward_step *s = forward_of(c);
    ra_rows_finish(s->problem, s->workers, &s->used, false, s->acc, s->m, s->l, s->out, s->lse);
}

ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char *wanted, const char **path, ra_cuda_error *error) {
    const ra_status status = admit(step->problem, wanted, false, path, error);
    if (status != RA_OK) return status;
    const call c = {.run = run_forward, .forward = *step};
    return enqueue(c, step->problem, step->items, step->item_count, &step->used, step->stream, error);
}

ra_status ra_cuda_backend_fill(const ra_forward_step *step, ra_cuda_error *error) {
    return enqueue((call){.run = run_fill, .forward = *step}, step->problem, NULL, 0, NULL, step->stream, error);
}

ra_status ra_cuda_backend_finish(const ra_forward_step *step, ra_cuda_error *error) {
    return enqueue((call){.run = run_finish, .forward = *step}, step->problem, NULL, 0, &step->used, step->stream, error);
}

/* -------------------------------------------------------------------------------------------------------------- backward */

/* Does query (key) a of an item meet a key (a query) in batch entry b? */
static bool has_pair(const ra_problem *p, const ra_item *item, bool queries, int64_t i0, int64_t i1, int64_t a, int64_t b) {
    const ra_item_loop *l = item->loop;
    const int64_t q = item->q.pos + i0 * l[0].q_pos + i1 * l[1].q_pos, k = item->k.pos + i0 * l[0].k_pos + i1 * l[1].k_pos;
    int64_t begin, end;
    if (queries) {
        ra_key_interval(p, b, q + a * item->q.pos_step, k, item->k.pos_step, item->k.count, &begin, &end);
        return begin < ra_min(end, item->k.count);
    }
    const int64_t key = k + a * item->k.pos_step;
    if ((p->key_begin && key < p->key_begin[b]) || (p->key_end && key >= p->key_end[b])) return false;
    ra_mask_keys(p->right, p->left, key, key, q, item->q.pos_step, item->q.count, &begin, &end);
    return begin < ra_min(end, item->q.count);
}

/* The rows of a progression from sums [B, rows, heads, dim] to a result, for `heads` heads from `first` on in both. Rows
 * without a pair keep what they hold, as those that a GPU's kernels skip. Where sums.data is NULL, the result is sums that
 * begin: of f32, zero where a row has a pair, and NaN where nobody writes. */
static void take_rows(const call *c, const ra_item *item, bool queries, ra_tensor sums, ra_tensor result, int64_t first,
                      int64_t heads) {
    const ra_item_rows *rows = queries ? &item->q : &item->k;
    const int64_t size = sums.data ? (int64_t)ra_dtype_size(c->problem.dtype) : 4, dim = c->problem.head_dim;
    for (int64_t i0 = 0; i0 < item->loop[0].repeat; i0++)
        for (int64_t i1 = 0; i1 < item->loop[1].repeat; i1++)
            for (int64_t a = 0; a < rows->count; a++) {
                const int64_t row = rows->row + a * rows->row_step +
                                    i0 * (queries ? item->loop[0].q_row : item->loop[0].k_row) +
                                    i1 * (queries ? item->loop[1].q_row : item->loop[1].k_row);
                for (int64_t b = 0; b < c->problem.batch; b++)
                    for (int64_t h = first; h < first + heads; h++) {
                        const bool met = has_pair(&c->problem, item, queries, i0, i1, a, b);
                        char *to = (char *)result.data + (b * result.batch + row * result.row + h * result.head) * size;
                        if (!sums.data) memset(to, met ? 0 : 0xff, (size_t)(dim * size));
                        else if (met)
                            ra_convert(to, c->problem.dtype,
                                       (float *)sums.data + b * sums.batch + row * sums.row + h * sums.head, RA_F32, dim);
                    }
            }
}

static int64_t key_rows(const ra_item *item) {
    int64_t last = item->k.row + (item->k.count - 1) * item->k.row_step;
    for (int i = 0; i < 2; i++) last += ra_max(0, item->loop[i].k_row * (item->loop[i].repeat - 1));
    return last + 1;
}

/* Sums of a single step's results, which the CPU's kernels want, are made here, and every row that has a pair is written. */
static void run_single(call *c, ra_backward_step *s) {
    const ra_problem *p = &c->problem;
    const int64_t group = p->heads / p->kv_heads;
    float *dq = zeros(p->batch * p->rows_q * p->heads * p->head_dim * 4);
    s->dq_acc = ra_tensor_bnhd(dq, p->rows_q, p->heads, p->head_dim);
    s->single = false;
    for (int64_t i = 0; i < s->item_count; i++) {
        ra_item *item = &c->items[i];
        const int64_t rows = key_rows(item), numbers = p->batch * rows * item->heads.count * p->head_dim;
        item->dk_view = ra_tensor_bnhd(zeros(numbers * 4), rows, item->heads.count, p->head_dim);
        item->dv_view = ra_tensor_bnhd(zeros(numbers * 4), rows, item->heads.count, p->head_dim);
    }
    c->kernel->backward(s);
    for (int64_t i = 0; i < s->item_count; i++) {
        const ra_item *item = &c->items[i];
        take_rows(c, item, false, item->dk_view, item->dk_result, 0, item->heads.count);
        take_rows(c, item, false, item->dv_view, item->dv_result, 0, item->heads.count);
        for (int64_t h = 0; h < item->heads.count; h++)
            take_rows(c, item, true, s->dq_acc, s->dq, (item->heads.start + h * item->heads.step) * group, group);
        free(item->dk_view.data);
        free(item->dv_view.data);
    }
    free(dq);
}

/* The CPU's kernels add to all sums: those that begin with an item are zeroed just before it, be it the first of its keys or
 * not. */
static void run_sums(call *c, const ra_backward_step *s) {
    ra_backward_step part = *s;
    for (int64_t first = 0, end; first < s->item_count; first = end) {
        const ra_item *item = &c->items[first];
        for (int i = 0; i < 2 && item->fresh; i++)
            take_rows(c, item, false, (ra_tensor){0}, i ? item->dv_view : item->dk_view, 0, item->heads.count);
        for (end = first + 1; end < s->item_count && !c->items[end].fresh;) end++;
        part.items = item;
        part.item_count = end - first;
        c->kernel->backward(&part);
    }
}

static void run_backward(call *c) {
    ra_backward_step *s = &c->backward;
    take_time(&c->problem, c->items, s->item_count);
    s->problem = &c->problem;
    s->items = c->items;
    s->workers = c->workers;
    s->poll = NULL;
    s->scratch = zeros(c->kernel->backward_scratch(&c->problem, 1));
    if (s->single) run_single(c, s);
    else run_sums(c, s);
    free(s->scratch);
}

ra_status ra_cuda_backend_backward(const ra_backward_step *step, const char *wanted, const char **path, ra_cuda_error *error) {
    const ra_status status = admit(step->problem, wanted, true, path, error);
    if (status != RA_OK) return status;
    const call c = {.run = run_backward, .backward = *step};
    return enqueue(c, step->problem, step->items, step->item_count, NULL, step->stream, error);
}

/* ----------------------------------------------------------------------------------------------------------------- rows */

static void run_zero(call *c) {
    if (c->gaps) ra_rows_fill_gaps(&c->problem, c->workers, &c->used, c->a, (ra_tensor){0}, c->rows, c->heads);
    else ra_rows_zero(&c->problem, c->workers, &c->used, c->a, c->size, c->rows, c->heads);
}

ra_status ra_cuda_backend_zero(const ra_problem *problem, const ra_used_rows *used, bool gaps, ra_tensor tensor, int64_t size,
                               int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    const call c = {.run = run_zero, .gaps = gaps, .a = tensor, .size = size, .rows = rows, .heads = heads};
    return enqueue(c, problem, NULL, 0, used, stream, error);
}

static void run_delta(call *c) {
    ra_rows_delta(&c->problem, c->workers, &c->used, c->a, c->b, c->c, c->d, c->problem.rows_q, c->problem.heads);
}

ra_status ra_cuda_backend_delta(const ra_problem *problem, const ra_used_rows *used, ra_tensor dout, ra_tensor out,
                                ra_tensor dlse, ra_tensor delta, void *stream, ra_cuda_error *error) {
    const call c = {.run = run_delta, .a = dout, .b = out, .c = dlse, .d = delta};
    return enqueue(c, problem, NULL, 0, used, stream, error);
}

static void run_convert(call *c) { ra_rows_convert(&c->problem, c->workers, &c->used, false, c->a, c->b, c->rows, c->heads); }

ra_status ra_cuda_backend_convert(const ra_problem *problem, const ra_used_rows *used, ra_tensor to, ra_tensor from,
                                  int64_t rows, int64_t heads, void *stream, ra_cuda_error *error) {
    const call c = {.run = run_convert, .a = to, .b = from, .rows = rows, .heads = heads};
    return enqueue(c, problem, NULL, 0, used, stream, error);
}
