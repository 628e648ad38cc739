#include <string.h>

#include "core/dtype.h"
#include "device/cpu/messages.h"
#include "device/cpu/sums.h"

/* All of this is done by all workers: a step does not begin before its messages are packed. */
enum { TASK = 1 << 17 }; /* elements of a task, about */

static void run(const ra_queue *queue, int64_t count, void (*task)(void *arg, int64_t index, int worker), void *arg) {
    if (queue && queue->workers) {
        ra_workers_run(queue->workers, count, task, arg, NULL, NULL);
        return;
    }
    for (int64_t i = 0; i < count; i++) task(arg, i, 0);
}

static void add_sums(ra_dtype dtype, char *a, const char *b, int64_t count) {
    if (dtype == RA_F64) {
        double *x = (double *)(void *)a;
        const double *y = (const double *)(const void *)b;
        for (int64_t i = 0; i < count; i++) x[i] += y[i];
    } else {
        float *x = (float *)(void *)a;
        const float *y = (const float *)(const void *)b;
        for (int64_t i = 0; i < count; i++) x[i] += y[i];
    }
}

/* ----------------------------------------------------------------------------------------------------------- boxes */

/* Rows of a tensor that have a message's rows: `at` is the first of them, the next lies `step` bytes further on. */
typedef struct strided {
    char *at;
    int64_t step;
} strided;

/* A box and its message. `move` is given `elements` of the tensor, and of the result that holds upper halves (if there is one);
 * as many at a time as lie together. */
typedef struct boxed {
    const ra_box *box;
    ra_tensor tensor, result;
    int64_t size, packed_size; /* of an element */
    ra_dtype dtype;
    char *packed;
    void (*move)(const struct boxed *job, char *rows, char *result, char *packed, int64_t elements);
} boxed;

/* Row i of a stretch of rows: those of one batch entry, head and repeat. */
static strided rows_at(const boxed *job, const ra_tensor *tensor, int64_t stretch, int64_t i) {
    const ra_box *box = job->box;
    const int64_t repeat = stretch % box->repeats, head = stretch / box->repeats % box->heads.count,
                  batch = stretch / box->repeats / box->heads.count,
                  row = box->first + repeat * box->repeat_step + i * box->row_step,
                  at = batch * tensor->batch + (box->heads.start + head * box->heads.step) * tensor->head + row * tensor->row;
    return (strided){tensor->data ? (char *)tensor->data + at * job->size : NULL, box->row_step * tensor->row * job->size};
}

static int64_t task_rows(const ra_box *box) { return ra_max(1, TASK / box->dim); }

static void box_task(void *arg, int64_t index, int worker) {
    const boxed *job = arg;
    const ra_box *box = job->box;
    const int64_t row_bytes = box->dim * job->size;
    const int64_t all = box->batch * box->heads.count * box->repeats * box->rows;
    const int64_t end = ra_min((index + 1) * task_rows(box), all);
    (void)worker;
    for (int64_t row = index * task_rows(box), count; row < end; row += count) {
        const int64_t stretch = row / box->rows, i = row % box->rows;
        const strided rows = rows_at(job, &job->tensor, stretch, i), result = rows_at(job, &job->result, stretch, i);
        char *packed = job->packed + row * box->dim * job->packed_size;
        count = ra_min(end - row, box->rows - i);
        const bool together = rows.step == row_bytes && (!result.at || result.step == row_bytes);
        const int64_t some = together ? count : 1;
        for (int64_t j = 0; j < count; j += some)
            job->move(job, rows.at + j * rows.step, result.at ? result.at + j * result.step : NULL,
                      packed + j * box->dim * job->packed_size, some * box->dim);
    }
}

static void run_box(const ra_queue *queue, boxed *job) {
    const ra_box *box = job->box;
    const int64_t all = box->batch * box->heads.count * box->repeats * box->rows;
    run(queue, ra_ceil_div(all, task_rows(box)), box_task, job);
}

static void pack_rows(const boxed *job, char *rows, char *result, char *packed, int64_t elements) {
    (void)result;
    memcpy(packed, rows, (size_t)(elements * job->size));
}

ra_status ra_cpu_pack(const ra_queue *queue, ra_dtype dtype, const ra_box *box, ra_tensor from, char *packed) {
    const int64_t size = (int64_t)ra_dtype_size(dtype);
    boxed job = {.box = box, .tensor = from, .size = size, .packed_size = size, .packed = packed, .move = pack_rows};
    run_box(queue, &job);
    return RA_OK;
}

static void add_rows(const boxed *job, char *rows, char *result, char *packed, int64_t elements) {
    (void)result;
    add_sums(job->dtype, rows, packed, elements);
}

/* 16-bit types: sums of a pass lie in halves. */
static void add_to_halves(const boxed *job, char *rows, char *result, char *packed, int64_t elements) {
    (void)job;
    ra_sums_add((ra_sums){.upper = (uint16_t *)(void *)result, .lower = (uint16_t *)(void *)rows},
                (const float *)(const void *)packed, 1, elements);
}

ra_status ra_cpu_unpack_add(const ra_queue *queue, ra_dtype dtype, const ra_box *box, const char *packed, ra_tensor sums,
                            ra_tensor result) {
    const bool halves = ra_dtype_size(dtype) == 2;
    boxed job = {.box = box,
                 .tensor = sums,
                 .size = halves ? 2 : ra_state_size(dtype),
                 .packed_size = ra_state_size(dtype),
                 .dtype = dtype,
                 .packed = (char *)(uintptr_t)packed,
                 .move = halves ? add_to_halves : add_rows};
    if (halves) job.result = result;
    run_box(queue, &job);
    return RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------- blocks */

typedef struct addition {
    ra_dtype dtype;
    int64_t count;
    char *into;
    const char *from;
} addition;

static void add_task(void *arg, int64_t index, int worker) {
    const addition *job = arg;
    const int64_t start = index * TASK, at = start * ra_state_size(job->dtype), count = ra_min(TASK, job->count - start);
    (void)worker;
    add_sums(job->dtype, job->into + at, job->from + at, count);
}

ra_status ra_cpu_add(const ra_queue *queue, ra_dtype dtype, char *sums, const char *more, int64_t count) {
    addition job = {dtype, count, sums, more};
    run(queue, ra_ceil_div(count, TASK), add_task, &job);
    return RA_OK;
}

ra_status ra_cpu_merge_sums(const ra_queue *queue, const ra_problem *p, char *mine, const char *theirs) {
    return ra_cpu_add(queue, p->dtype, mine, theirs, p->batch * p->rows_q * p->heads * p->head_dim);
}

typedef struct zeros {
    char *memory;
    int64_t bytes;
} zeros;

static void zero_task(void *arg, int64_t index, int worker) {
    const zeros *job = arg;
    const int64_t start = index * 4 * TASK;
    (void)worker;
    memset(job->memory + start, 0, (size_t)ra_min(4 * TASK, job->bytes - start));
}

ra_status ra_cpu_zero(const ra_queue *queue, void *memory, int64_t bytes) {
    zeros job = {memory, bytes};
    run(queue, ra_ceil_div(bytes, 4 * TASK), zero_task, &job);
    return RA_OK;
}
