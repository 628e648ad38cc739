#include "ring/accumulator.h"

#include <math.h>

#include "device/kernel.h"
#include "ring/pack.h"

typedef struct merge {
    const ra_config *config;
    int64_t rows, count, chunk;
    char *into;
    const char *from;
} merge;

/* One (batch, head) pair: all of its rows. */
#define MERGE_ROWS(name, real, exponential)                                                                                    \
    static void name(void *arg, int64_t index, int worker) {                                                                   \
        const merge *job = arg;                                                                                                \
        const ra_config *c = job->config;                                                                                      \
        int64_t batch = index / c->heads, head = index % c->heads, dim = c->head_dim, total = c->batch * job->rows * c->heads; \
        real *acc = (real *)(void *)job->into;                                                                                 \
        const real *acc2 = (const real *)(const void *)job->from;                                                              \
        real *m = acc + total * dim, *l = m + total;                                                                           \
        const real *m2 = acc2 + total * dim, *l2 = m2 + total;                                                                 \
        (void)worker;                                                                                                          \
        for (int64_t row = 0; row < job->rows; row++) {                                                                        \
            int64_t at = index * job->rows + row, start = ((batch * job->rows + row) * c->heads + head) * dim;                 \
            if (ra_state_empty((double)m2[at], (double)l2[at])) continue; /* nothing to add */                                 \
            bool empty = ra_state_empty((double)m[at], (double)l[at]);    /* acc holds anything */                             \
            real top = m2[at] > m[at] ? m2[at] : m[at];                                                                        \
            real one = m[at] == top ? 1 : exponential(m[at] - top), two = m2[at] == top ? 1 : exponential(m2[at] - top);       \
            for (int64_t d = 0; d < dim; d++) acc[start + d] = (empty ? 0 : acc[start + d] * one) + acc2[start + d] * two;     \
            l[at] = l[at] * one + l2[at] * two;                                                                                \
            m[at] = top;                                                                                                       \
        }                                                                                                                      \
    }
MERGE_ROWS(merge_f32, float, expf)
MERGE_ROWS(merge_f64, double, exp)

void ra_state_merge(const ra_config *c, int64_t rows, ra_workers *workers, char *into, const char *from) {
    merge job = {.config = c, .rows = rows, .into = into, .from = from};
    ra_workers_run(workers, c->batch * c->heads, c->dtype == RA_F64 ? merge_f64 : merge_f32, &job, NULL, NULL);
}

static void add_chunk(void *arg, int64_t index, int worker) {
    const merge *job = arg;
    (void)worker;
    int64_t size = job->config->dtype == RA_F64 ? 8 : 4, start = index * job->chunk;
    ra_add_sums(job->config->dtype, job->into + start * size, job->from + start * size, ra_min(job->chunk, job->count - start));
}

void ra_sums_merge(const ra_config *c, int64_t count, ra_workers *workers, char *into, const char *from) {
    merge job = {.config = c, .count = count, .chunk = 1 << 16, .into = into, .from = from};
    ra_workers_run(workers, ra_ceil_div(count, job.chunk), add_chunk, &job, NULL, NULL);
}
