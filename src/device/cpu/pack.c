#include <string.h>

#include "core/dtype.h"
#include "device/cpu/messages.h"
#include "device/cpu/sums.h"

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

/* Where the rows of a box lie in its tensor: as many elements at a time as lie together. */
typedef struct walk {
    const ra_box *box;
    ra_tensor tensor;
    int64_t size;     /* of an element */
    int64_t some;     /* rows at a time */
    int64_t elements; /* of so many rows */
} walk;

static walk walk_of(const ra_box *box, ra_tensor tensor, int64_t size) {
    const int64_t some = box->row_step * tensor.row == box->dim ? box->rows : 1;
    return (walk){box, tensor, size, some, some * box->dim};
}

/* The rows from (batch, head, repeat, row) on. */
static char *rows_at(const walk *w, int64_t b, int64_t h, int64_t r, int64_t i) {
    const ra_box *box = w->box;
    const int64_t head = box->heads.start + h * box->heads.step, row = box->first + r * box->repeat_step + i * box->row_step;
    return (char *)w->tensor.data + (b * w->tensor.batch + head * w->tensor.head + row * w->tensor.row) * w->size;
}

ra_status ra_cpu_pack(const ra_queue *queue, ra_dtype dtype, const ra_box *box, ra_tensor from, char *packed) {
    const walk w = walk_of(box, from, (int64_t)ra_dtype_size(dtype));
    (void)queue;
    for (int64_t b = 0; b < box->batch; b++)
        for (int64_t h = 0; h < box->heads.count; h++)
            for (int64_t r = 0; r < box->repeats; r++)
                for (int64_t i = 0; i < box->rows; i += w.some, packed += w.elements * w.size)
                    memcpy(packed, rows_at(&w, b, h, r, i), (size_t)(w.elements * w.size));
    return RA_OK;
}

/* 16-bit types: sums of a pass lie in halves. */
static void unpack_add_halves(const ra_box *box, const float *packed, ra_tensor sums, ra_tensor result) {
    const walk lower = walk_of(box, sums, 2), upper = walk_of(box, result, 2);
    const int64_t some = ra_min(lower.some, upper.some), elements = some * box->dim;
    for (int64_t b = 0; b < box->batch; b++)
        for (int64_t h = 0; h < box->heads.count; h++)
            for (int64_t r = 0; r < box->repeats; r++)
                for (int64_t i = 0; i < box->rows; i += some, packed += elements)
                    ra_sums_add((ra_sums){.upper = (uint16_t *)(void *)rows_at(&upper, b, h, r, i),
                                          .lower = (uint16_t *)(void *)rows_at(&lower, b, h, r, i)},
                                packed, 1, elements);
}

ra_status ra_cpu_unpack_add(const ra_queue *queue, ra_dtype dtype, const ra_box *box, const char *packed, ra_tensor sums,
                            ra_tensor result) {
    const walk w = walk_of(box, sums, ra_state_size(dtype));
    (void)queue;
    if (ra_dtype_size(dtype) == 2) {
        unpack_add_halves(box, (const float *)(const void *)packed, sums, result);
        return RA_OK;
    }
    for (int64_t b = 0; b < box->batch; b++)
        for (int64_t h = 0; h < box->heads.count; h++)
            for (int64_t r = 0; r < box->repeats; r++)
                for (int64_t i = 0; i < box->rows; i += w.some, packed += w.elements * w.size)
                    add_sums(dtype, rows_at(&w, b, h, r, i), packed, w.elements);
    return RA_OK;
}

ra_status ra_cpu_add(const ra_queue *queue, ra_dtype dtype, char *sums, const char *more, int64_t count) {
    (void)queue;
    add_sums(dtype, sums, more, count);
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------ a block that travels */

enum { CHUNK = 1 << 16 }; /* sums of a task */

typedef struct addition {
    ra_dtype dtype;
    int64_t count;
    char *into;
    const char *from;
} addition;

static void add_chunk(void *arg, int64_t index, int worker) {
    const addition *job = arg;
    const int64_t start = index * CHUNK, at = start * ra_state_size(job->dtype);
    (void)worker;
    add_sums(job->dtype, job->into + at, job->from + at, ra_min(CHUNK, job->count - start));
}

ra_status ra_cpu_merge_sums(const ra_queue *queue, const ra_problem *p, char *mine, const char *theirs) {
    addition job = {p->dtype, p->batch * p->rows_q * p->heads * p->head_dim, mine, theirs};
    ra_workers_run(queue->workers, ra_ceil_div(job.count, CHUNK), add_chunk, &job, NULL, NULL);
    return RA_OK;
}
