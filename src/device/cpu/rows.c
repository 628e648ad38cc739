#include "device/rows.h"

#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "core/stream.h"
#include "device/cpu/sums.h"

enum {
    TASK = 65536,       /* elements, about */
    BLOCK = 16384,      /* bytes of a block with gaps, at most: L1 holds it */
    STREAMED = 1 << 20, /* bytes of results with gaps that bypass the caches; smaller ones are better off near their reader */
};

/* Rows and heads of a batch entry. */
typedef struct block {
    int64_t batch, row, rows, head, heads;
} block;

typedef struct rows_job {
    const ra_problem *problem;
    ra_tensor a, b, c;   /* what each function makes of them is said there */
    ra_tensor out, lse;  /* results: rows that are not used, the gaps, have 0 and -inf in them. data may be NULL */
    int64_t size;        /* of an element of a */
    bool halves;         /* a has the lower halves of sums, out the upper ones */
    int64_t rows, heads; /* of all tensors */
    bool streamed;       /* out bypasses the caches */
    void (*each)(const struct rows_job *job, const block *b);
    /* filled by `run` */
    ra_used all;
    const ra_used *sets; /* used rows */
    int64_t count;
    int64_t chunk;                   /* rows of a task */
    int64_t block_rows, block_heads; /* of a block: a task, or where there are gaps some of it that lies together in out */
    bool gaps;
} rows_job;

static int64_t at(const ra_tensor *t, int64_t batch, int64_t row, int64_t head) {
    return batch * t->batch + row * t->row + head * t->head;
}

static void *element(const ra_tensor *t, int64_t size, int64_t batch, int64_t row, int64_t head) {
    return (char *)t->data + at(t, batch, row, head) * size;
}

static int64_t out_size(const rows_job *job) { return (int64_t)ra_dtype_size(job->problem->dtype); }

static bool is_large(const rows_job *job) {
    return job->problem->batch * job->rows * job->heads * job->problem->head_dim * out_size(job) >= STREAMED;
}

static bool heads_together(const rows_job *job, const ra_tensor *t) {
    return job->heads == 1 || t->head == job->problem->head_dim;
}

/* Calls `piece` for the used rows of a block: `count` elements from a row and head on, contiguous in both t and u. If these are
 * NULL, a piece is one head of one row. */
static void for_used(const rows_job *job, const block *b, const ra_tensor *t, const ra_tensor *u,
                     void (*piece)(const rows_job *job, const block *b, int64_t row, int64_t head, int64_t count, void *arg),
                     void *arg) {
    const int64_t dim = job->problem->head_dim;
    for (const ra_used *set = job->sets; set < job->sets + job->count; set++) {
        const ra_span rows = ra_span_clip(set->rows, b->row, b->row + b->rows);
        const ra_span heads = ra_span_clip(set->heads, b->head, b->head + b->heads);
        const bool join_heads = t && heads.step == 1 && heads_together(job, t) && heads_together(job, u);
        const int64_t some_heads = join_heads ? heads.count : 1, step = some_heads * dim;
        const int64_t some_rows = t && t->row * rows.step == step && u->row * rows.step == step ? rows.count : 1;
        for (int64_t i = 0; i < rows.count; i += some_rows)
            for (int64_t h = 0; h < heads.count; h += some_heads)
                piece(job, b, rows.start + i * rows.step, heads.start + h * heads.step, some_rows * step, arg);
    }
}

static void rows_task(void *arg, int64_t index, int worker) {
    (void)worker;
    const rows_job *job = arg;
    const int64_t chunks = ra_ceil_div(job->rows, job->chunk);
    const int64_t batch = index / chunks, begin = index % chunks * job->chunk, end = ra_min(begin + job->chunk, job->rows);
    for (int64_t row = begin; row < end; row += job->block_rows)
        for (int64_t head = 0; head < job->heads; head += job->block_heads)
            job->each(job, &(block){batch, row, ra_min(job->block_rows, end - row), head,
                                    ra_min(job->block_heads, job->heads - head)});
    if (job->streamed) ra_stream_end();
}

/* Tasks have whole rows. */
static void run(rows_job *job, ra_workers *workers, const ra_used_rows *used) {
    const int64_t dim = job->problem->head_dim, row = job->heads * dim;
    job->all = (ra_used){{0, 1, job->rows}, {0, 1, job->heads}};
    job->sets = used->count > 0 ? used->sets : &job->all;
    job->count = ra_max(1, used->count);
    job->chunk = job->block_rows = ra_max(1, TASK / ra_max(1, row));
    job->block_heads = ra_max(1, job->heads);
    job->gaps = used->count > 0 && job->out.data && !used->keeps;
    if (job->gaps) {
        const int64_t most = BLOCK / out_size(job);
        job->block_heads = heads_together(job, &job->out) ? ra_min(job->heads, most / dim) : 1;
        job->block_rows = job->out.row == job->block_heads * dim ? most / (job->block_heads * dim) : 1;
    }
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

/* ----------------------------------------------------------------------------------------------------------- gaps */

static int64_t place_in_block(const block *b, int64_t row, int64_t head) { return (row - b->row) * b->heads + head - b->head; }

static void mark(const rows_job *job, const block *b, int64_t row, int64_t head, int64_t count, void *used) {
    memset((char *)used + place_in_block(b, row, head), 1, (size_t)(count / job->problem->head_dim));
}

/* used[place_in_block]: 0 or 1 */
static void find_used(const rows_job *job, const block *b, char used[BLOCK / 2]) {
    memset(used, 0, (size_t)(b->rows * b->heads));
    for_used(job, b, &job->out, &job->out, mark, used);
}

/* Used rows are left alone: they hold results. */
static void fill_gaps(const rows_job *job, const block *b, const char used[BLOCK / 2]) {
    const int64_t all = b->rows * b->heads, bytes = job->problem->head_dim * out_size(job);
    char *out = element(&job->out, out_size(job), b->batch, b->row, b->head);
    for (int64_t begin = 0, end; begin < all; begin = end + 1) {
        const char *next = memchr(used + begin, 1, (size_t)(all - begin));
        end = next ? next - used : all;
        if (job->streamed) ra_stream_zeros(out + begin * bytes, (end - begin) * bytes);
        else memset(out + begin * bytes, 0, (size_t)((end - begin) * bytes));
    }
    for (int64_t i = 0; job->lse.data && i < b->rows; i++)
        for (int64_t h = 0; h < b->heads; h++)
            if (!used[i * b->heads + h]) store(&job->lse, job->problem->dtype, b->batch, b->row + i, b->head + h, -INFINITY);
}

/* ----------------------------------------------------------------------------------------------------------- fill */

/* a: out or nothing, b: lse or m, c: l */
static void zero(const rows_job *job, const block *b, int64_t row, int64_t head, int64_t count, void *arg) {
    (void)arg;
    memset(element(&job->a, job->size, b->batch, row, head), 0, (size_t)(count * job->size));
}
static void zero_block(const rows_job *job, const block *b) { for_used(job, b, &job->a, &job->a, zero, NULL); }

/* t: a number for each row and head; data may be NULL */
static void set_rows(const rows_job *job, const block *b, const ra_tensor *t, double x) {
    for (const ra_used *set = job->sets; t->data && set < job->sets + job->count; set++) {
        const ra_span rows = ra_span_clip(set->rows, b->row, b->row + b->rows);
        const ra_span heads = ra_span_clip(set->heads, b->head, b->head + b->heads);
        const int64_t step = t->row * rows.step;
        for (int64_t h = 0; h < heads.count; h++) {
            const int64_t first = at(t, b->batch, rows.start, heads.start + h * heads.step);
            double *wide = (double *)t->data + first;
            float *narrow = (float *)t->data + first;
            if (job->problem->dtype == RA_F64)
                for (int64_t i = 0; i < rows.count; i++) wide[i * step] = x;
            else if (step == 1) /* several at a time */
                for (int64_t i = 0; i < rows.count; i++) narrow[i] = (float)x;
            else
                for (int64_t i = 0; i < rows.count; i++) narrow[i * step] = (float)x;
        }
    }
}
static void fill_block(const rows_job *job, const block *b) {
    if (job->a.data) zero_block(job, b);
    set_rows(job, b, &job->b, -INFINITY);
    set_rows(job, b, &job->c, 0);
}

void ra_rows_fill(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool single, ra_tensor out,
                  ra_tensor lse, ra_tensor m, ra_tensor l) {
    const ra_tensor none = {0};
    rows_job job = {.problem = problem,
                    .a = single ? out : none,
                    .b = single ? lse : m,
                    .c = single ? none : l,
                    .rows = problem->rows_q,
                    .heads = problem->heads,
                    .size = (int64_t)ra_dtype_size(problem->dtype),
                    .each = fill_block};
    run(&job, workers, single ? &(ra_used_rows){0} : used);
}

static void gaps_block(const rows_job *job, const block *b) {
    char used[BLOCK / 2];
    find_used(job, b, used);
    fill_gaps(job, b, used);
}

void ra_rows_fill_gaps(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor out, ra_tensor lse,
                       int64_t rows, int64_t heads) {
    rows_job job = {.problem = problem, .out = out, .lse = lse, .rows = rows, .heads = heads, .each = gaps_block};
    job.streamed = is_large(&job);
    if (used->count > 0) run(&job, workers, used);
}

void ra_rows_zero(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor tensor, int64_t size,
                  int64_t rows, int64_t heads) {
    rows_job job = {.problem = problem, .a = tensor, .size = size, .rows = rows, .heads = heads, .each = zero_block};
    run(&job, workers, used);
}

/* --------------------------------------------------------------------------------------------------------- finish */

/* a: acc, b: m, c: l */
static void finish_row(const rows_job *job, const block *b, int64_t row, int64_t head, int64_t count, void *arg) {
    (void)count, (void)arg;
    const ra_dtype dtype = job->problem->dtype;
    const int64_t dim = job->problem->head_dim;
    const double m = load(&job->b, dtype, b->batch, row, head), l = load(&job->c, dtype, b->batch, row, head);
    void *acc = element(&job->a, job->size, b->batch, row, head);
    if (job->lse.data) store(&job->lse, dtype, b->batch, row, head, l == 0 ? -INFINITY : m + log(l));
    void *out = element(&job->out, out_size(job), b->batch, row, head);
    if (dtype == RA_F64) {
        const double *from = acc;
        double *to = out;
        for (int64_t d = 0; d < dim; d++) to[d] = l == 0 ? 0 : from[d] / l;
        return;
    }
    /* By way of a buffer, since acc may be out. */
    const double share = 1 / l;
    float buffer[256];
    ra_sums_load(buffer, job->halves ? (ra_sums){.upper = out, .lower = acc} : (ra_sums){.whole = acc}, dim);
    for (int64_t d = 0; d < dim; d++) buffer[d] = l == 0 ? 0 : (float)((double)buffer[d] * share);
    ra_convert(out, dtype, buffer, RA_F32, dim);
}
static void finish_block(const rows_job *job, const block *b) {
    if (!job->gaps) {
        for_used(job, b, NULL, NULL, finish_row, NULL);
        return;
    }
    char used[BLOCK / 2];
    find_used(job, b, used);
    for (int64_t i = 0; i < b->rows; i++) /* set by set a row might be finished twice */
        for (int64_t h = 0; h < b->heads; h++)
            if (used[i * b->heads + h]) finish_row(job, b, b->row + i, b->head + h, 0, NULL);
    fill_gaps(job, b, used);
}

void ra_rows_finish(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool halves, ra_tensor acc,
                    ra_tensor m, ra_tensor l, ra_tensor out, ra_tensor lse) {
    rows_job job = {.problem = problem,
                    .a = acc,
                    .size = halves ? 2 : ra_state_size(problem->dtype),
                    .halves = halves,
                    .b = m,
                    .c = l,
                    .out = out,
                    .lse = lse,
                    .rows = problem->rows_q,
                    .heads = problem->heads,
                    .each = finish_block};
    run(&job, workers, used);
}

/* ---------------------------------------------------------------------------------------------------------- delta */

/* sum += x y, of 16-bit elements that `widen` makes f32. Products are exact in f32, and 16 partial sums keep each short. */
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

/* a: dout, b: out, c: dlse, lse: delta. f32 is summed in double: delta is subtracted from what nearly equals it. */
static void delta_row(const rows_job *job, const block *in, int64_t row, int64_t head) {
    const ra_dtype dtype = job->problem->dtype;
    const int64_t size = (int64_t)ra_dtype_size(dtype), dim = job->problem->head_dim;
    const void *a = element(&job->a, size, in->batch, row, head), *b = element(&job->b, size, in->batch, row, head);
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
    if (job->c.data) sum -= load(&job->c, dtype, in->batch, row, head);
    store(&job->lse, dtype, in->batch, row, head, sum);
}

/* Fetched in software: hardware prefetchers do not foresee rows of one head that lie apart. */
static void fetch_row(const rows_job *job, const ra_tensor *t, const block *in, int64_t row, int64_t head) {
    const int64_t size = (int64_t)ra_dtype_size(job->problem->dtype);
    const char *data = element(t, size, in->batch, row, head);
    for (int64_t i = 0; i < job->problem->head_dim * size; i += 64) __builtin_prefetch(data + i);
}

static void delta_block(const rows_job *job, const block *b) {
    enum { AHEAD = 8 }; /* rows */
    for (const ra_used *set = job->sets; set < job->sets + job->count; set++) {
        const ra_span rows = ra_span_clip(set->rows, b->row, b->row + b->rows);
        const ra_span heads = ra_span_clip(set->heads, b->head, b->head + b->heads);
        for (int64_t i = 0; i < rows.count; i++)
            for (int64_t h = 0; h < heads.count; h++) {
                const int64_t row = rows.start + i * rows.step, head = heads.start + h * heads.step;
                if (i + AHEAD < rows.count) {
                    fetch_row(job, &job->a, b, row + AHEAD * rows.step, head);
                    fetch_row(job, &job->b, b, row + AHEAD * rows.step, head);
                }
                delta_row(job, b, row, head);
            }
    }
}

void ra_rows_delta(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, ra_tensor dout, ra_tensor out,
                   ra_tensor dlse, ra_tensor delta, int64_t rows, int64_t heads) {
    rows_job job = {
        .problem = problem, .a = dout, .b = out, .c = dlse, .lse = delta, .rows = rows, .heads = heads, .each = delta_block};
    run(&job, workers, used);
}

/* -------------------------------------------------------------------------------------------------------- convert */

static void convert_halves(ra_dtype dtype, uint16_t *to, const uint16_t *upper, const uint16_t *lower, int64_t count) {
    enum { SOME = 256 };
    float sums[SOME];
    for (int64_t i = 0; i < count; i += SOME) {
        const int64_t some = ra_min(SOME, count - i);
        ra_sums_load(sums, (ra_sums){.upper = (uint16_t *)upper + i, .lower = (uint16_t *)lower + i}, some);
        ra_convert(to + i, dtype, sums, RA_F32, some);
    }
}

/* a: src */
static void convert(const rows_job *job, const block *b, int64_t row, int64_t head, int64_t count, void *image) {
    const ra_dtype dtype = job->problem->dtype;
    void *out = element(&job->out, out_size(job), b->batch, row, head);
    void *to = image ? (char *)image + place_in_block(b, row, head) * job->problem->head_dim * out_size(job) : out;
    const void *from = element(&job->a, job->size, b->batch, row, head);
    if (job->halves) convert_halves(dtype, to, out, from, count);
    else ra_convert(to, dtype, from, dtype == RA_F64 ? RA_F64 : RA_F32, count);
}

/* Used rows and gaps are written as one stream, from an image in L1: written alone, lines of used rows would be read first, and
 * short streams between them are slow. Halves in out must stay until all are read: sets may overlap. */
static void convert_block(const rows_job *job, const block *b) {
    const int64_t bytes = b->rows * b->heads * job->problem->head_dim * out_size(job);
    _Alignas(64) char image[BLOCK];
    char *out = element(&job->out, out_size(job), b->batch, b->row, b->head);
    const bool by_image = job->streamed || (job->gaps && job->halves);
    if (job->gaps) memset(by_image ? image : out, 0, (size_t)bytes);
    for_used(job, b, &job->a, &job->out, convert, by_image ? image : NULL);
    if (job->streamed) ra_stream(out, image, bytes);
    else if (by_image) memcpy(out, image, (size_t)bytes);
}

void ra_rows_convert(const ra_problem *problem, ra_workers *workers, const ra_used_rows *used, bool halves, ra_tensor dst,
                     ra_tensor src, int64_t rows, int64_t heads) {
    rows_job job = {.problem = problem,
                    .a = src,
                    .size = halves ? 2 : ra_state_size(problem->dtype),
                    .halves = halves,
                    .out = dst,
                    .rows = rows,
                    .heads = heads,
                    .each = convert_block};
    job.streamed = used->count > 0 && !used->keeps && is_large(&job);
    run(&job, workers, used);
}
