#include "kernels/rows.h"

#include <math.h>
#include <string.h>

#include "core/dtype.h"

typedef struct rows_job {
    const ra_problem *problem;
    ra_tensor a, b, c, d, e; /* what each function makes of them is said there */
    int64_t rows, heads, chunk;
    int64_t size;  /* of an element of a, where it is zeroed */
    int64_t piece; /* elements that lie together in the tensors that `elements` handles: of a head, of a row, or of all rows */
    void (*elements)(const struct rows_job *job, int64_t batch, int64_t row, int64_t head, int64_t count); /* NULL: nothing */
    void (*each)(const struct rows_job *job, int64_t batch, int64_t head, int64_t begin, int64_t end); /* rows; NULL: nothing */
} rows_job;

static int64_t at(const ra_tensor *t, int64_t batch, int64_t row, int64_t head) {
    return batch * t->batch + row * t->row + head * t->head;
}

static void *element(const ra_tensor *t, int64_t size, int64_t batch, int64_t row, int64_t head) {
    return (char *)t->data + at(t, batch, row, head) * size;
}

static void rows_task(void *arg, int64_t index, int worker) {
    (void)worker;
    const rows_job *job = arg;
    const int64_t chunks = ra_ceil_div(job->rows, job->chunk), dim = job->problem->head_dim;
    const int64_t batch = index / chunks, begin = index % chunks * job->chunk, end = ra_min(begin + job->chunk, job->rows);
    if (job->elements) {
        const int64_t rows = ra_max(1, job->piece / (job->heads * dim)), heads = ra_min(job->heads, job->piece / dim);
        for (int64_t row = begin; row < end; row += rows)
            for (int64_t head = 0; head < job->heads; head += heads)
                job->elements(job, batch, row, head, ra_min(rows, end - row) * heads * dim);
    }
    for (int64_t head = 0; job->each && head < job->heads; head++) job->each(job, batch, head, begin, end);
}

/* Elements of a tensor that lie together: a head's, a row's, or all. */
static int64_t piece_of(const rows_job *job, const ra_tensor *t) {
    const int64_t dim = job->problem->head_dim, row = job->heads * dim;
    if (job->heads > 1 && t->head != dim) return dim;
    return job->rows > 1 && t->row != row ? row : job->rows * row;
}

/* Tasks of about 64 Ki elements, each of whole rows. */
static void run(rows_job *job, ra_workers *workers) {
    job->chunk = ra_max(1, 65536 / ra_max(1, job->heads * job->problem->head_dim));
    ra_workers_run(workers, job->problem->batch * ra_ceil_div(job->rows, job->chunk), rows_task, job, NULL, NULL);
}

static void store(const ra_tensor *t, ra_dtype dtype, int64_t batch, int64_t row, int64_t head, double value) {
    const int64_t i = at(t, batch, row, head);
    if (dtype == RA_F64) ((double *)t->data)[i] = value;
    else ((float *)t->data)[i] = (float)value;
}

static double load(const ra_tensor *t, ra_dtype dtype, int64_t batch, int64_t row, int64_t head) {
    const int64_t i = at(t, batch, row, head);
    return dtype == RA_F64 ? ((const double *)t->data)[i] : (double)((const float *)t->data)[i];
}

/* ----------------------------------------------------------------------------------------------------------- fill */

/* a: out or acc, b: lse or m, c: l */
static void zero(const rows_job *job, int64_t batch, int64_t row, int64_t head, int64_t count) {
    memset(element(&job->a, job->size, batch, row, head), 0, (size_t)(count * job->size));
}
static void fill_rows(const rows_job *job, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    const ra_dtype dtype = job->problem->dtype;
    for (int64_t row = begin; job->b.data && row < end; row++) store(&job->b, dtype, batch, row, head, -INFINITY);
    for (int64_t row = begin; job->c.data && row < end; row++) store(&job->c, dtype, batch, row, head, 0);
}

void ra_rows_fill(const ra_problem *problem, ra_workers *workers, bool single, ra_tensor out, ra_tensor lse, ra_tensor acc,
                  ra_tensor m, ra_tensor l) {
    rows_job job = {.problem = problem,
                    .a = single ? out : acc,
                    .b = single ? lse : m,
                    .c = single ? (ra_tensor){0} : l,
                    .rows = problem->rows_q,
                    .heads = problem->heads,
                    .size = single ? (int64_t)ra_dtype_size(problem->dtype) : ra_state_size(problem->dtype),
                    .elements = zero,
                    .each = fill_rows};
    job.piece = piece_of(&job, &job.a);
    run(&job, workers);
}

void ra_rows_zero(const ra_problem *problem, ra_workers *workers, ra_tensor tensor, int64_t size, int64_t rows, int64_t heads) {
    rows_job job = {.problem = problem, .a = tensor, .rows = rows, .heads = heads, .size = size, .elements = zero};
    job.piece = piece_of(&job, &tensor);
    run(&job, workers);
}

/* --------------------------------------------------------------------------------------------------------- finish */

/* a: acc, b: m, c: l, d: out, e: lse */
static void finish_row(const rows_job *job, int64_t batch, int64_t row, int64_t head) {
    const ra_dtype dtype = job->problem->dtype;
    const int64_t dim = job->problem->head_dim;
    const double m = load(&job->b, dtype, batch, row, head), l = load(&job->c, dtype, batch, row, head);
    void *acc = element(&job->a, ra_state_size(dtype), batch, row, head);
    if (job->e.data) store(&job->e, dtype, batch, row, head, l == 0 ? -INFINITY : m + log(l));
    void *out = element(&job->d, (int64_t)ra_dtype_size(dtype), batch, row, head);
    if (dtype == RA_F64) {
        const double *from = acc;
        double *to = out;
        for (int64_t d = 0; d < dim; d++) to[d] = l == 0 ? 0 : from[d] / l;
        return;
    }
    /* By way of a buffer, since acc may be out. */
    const float *from = acc;
    float buffer[256];
    for (int64_t d = 0; d < dim; d++) buffer[d] = l == 0 ? 0 : (float)((double)from[d] / l);
    ra_convert(out, dtype, buffer, RA_F32, dim);
}
static void finish_rows(const rows_job *job, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) finish_row(job, batch, row, head);
}

void ra_rows_finish(const ra_problem *problem, ra_workers *workers, ra_tensor acc, ra_tensor m, ra_tensor l, ra_tensor out,
                    ra_tensor lse) {
    rows_job job = {.problem = problem,
                    .a = acc,
                    .b = m,
                    .c = l,
                    .d = out,
                    .e = lse,
                    .rows = problem->rows_q,
                    .heads = problem->heads,
                    .each = finish_rows};
    run(&job, workers);
}

/* ---------------------------------------------------------------------------------------------------------- delta */

/* sum += x y, 16-bit elements that `widen` makes f32: products are exact in it, and each of 16 sums has few of them. */
#define SUM_OF_HALVES(sum, x, y, dim, widen)                                                                                   \
    do {                                                                                                                       \
        float part_[16] = {0};                                                                                                 \
        int64_t d_ = 0;                                                                                                        \
        for (; d_ + 16 <= (dim); d_ += 16)                                                                                     \
            for (int i_ = 0; i_ < 16; i_++) part_[i_] += widen((x)[d_ + i_]) * widen((y)[d_ + i_]);                            \
        for (int i_ = 0; d_ < (dim); d_++, i_++) part_[i_] += widen((x)[d_]) * widen((y)[d_]);                                 \
        for (int i_ = 0; i_ < 8; i_++) part_[i_] += part_[i_ + 8];                                                             \
        for (int i_ = 0; i_ < 4; i_++) (sum) += (double)part_[i_] + (double)part_[i_ + 4];                                     \
    } while (0)

/* a: dout, b: out, c: dlse, d: delta. f32 is summed in double: delta is subtracted from what nearly equals it. */
static void delta_row(const rows_job *job, int64_t batch, int64_t row, int64_t head) {
    const ra_dtype dtype = job->problem->dtype;
    const int64_t size = (int64_t)ra_dtype_size(dtype), dim = job->problem->head_dim;
    const void *a = element(&job->a, size, batch, row, head), *b = element(&job->b, size, batch, row, head);
    double sum = 0;
    if (dtype == RA_F64) {
        const double *x = a, *y = b;
        for (int64_t d = 0; d < dim; d++) sum += x[d] * y[d];
    } else if (dtype == RA_F32) {
        const float *x = a, *y = b;
        double part[4] = {0};
        const int64_t whole = dim / 4 * 4;
        for (int64_t d = 0; d < whole; d += 4)
            for (int i = 0; i < 4; i++) part[i] += (double)x[d + i] * (double)y[d + i];
        for (int64_t d = whole; d < dim; d++) part[d - whole] += (double)x[d] * (double)y[d];
        sum = (part[0] + part[2]) + (part[1] + part[3]);
    } else if (dtype == RA_BF16) {
        const uint16_t *x = a, *y = b;
        SUM_OF_HALVES(sum, x, y, dim, ra_bf16_to_f32);
    } else {
        float x[256], y[256];
        ra_convert(x, RA_F32, a, dtype, dim);
        ra_convert(y, RA_F32, b, dtype, dim);
        SUM_OF_HALVES(sum, x, y, dim, (float));
    }
    if (job->c.data) sum -= load(&job->c, dtype, batch, row, head);
    store(&job->d, dtype, batch, row, head, sum);
}
static void delta_rows(const rows_job *job, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) delta_row(job, batch, row, head);
}

void ra_rows_delta(const ra_problem *problem, ra_workers *workers, ra_tensor dout, ra_tensor out, ra_tensor dlse,
                   ra_tensor delta, int64_t rows, int64_t heads) {
    rows_job job = {
        .problem = problem, .a = dout, .b = out, .c = dlse, .d = delta, .rows = rows, .heads = heads, .each = delta_rows};
    run(&job, workers);
}

/* -------------------------------------------------------------------------------------------------------- convert */

/* a: dst, b: src */
static void convert(const rows_job *job, int64_t batch, int64_t row, int64_t head, int64_t count) {
    const ra_dtype dtype = job->problem->dtype;
    ra_convert(element(&job->a, (int64_t)ra_dtype_size(dtype), batch, row, head), dtype,
               element(&job->b, ra_state_size(dtype), batch, row, head), dtype == RA_F64 ? RA_F64 : RA_F32, count);
}

void ra_rows_convert(const ra_problem *problem, ra_workers *workers, ra_tensor dst, ra_tensor src, int64_t rows,
                     int64_t heads) {
    rows_job job = {.problem = problem, .a = dst, .b = src, .rows = rows, .heads = heads, .elements = convert};
    job.piece = ra_min(piece_of(&job, &dst), piece_of(&job, &src));
    run(&job, workers);
}
