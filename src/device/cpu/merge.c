/* Merging running states (acc, m, l) of the same rows: exact up to rounding, in any order. An empty state is neutral. */
#include <math.h>

#include "device/cpu/messages.h"

typedef struct merge {
    const ra_problem *problem;
    char *into;
    const char *from;
} merge;

/* One (batch, head) pair: all of its rows. */
#define MERGE_ROWS(name, real, exponential)                                                                                    \
    static void name(void *arg, int64_t index, int worker) {                                                                   \
        const merge *job = arg;                                                                                                \
        const ra_problem *p = job->problem;                                                                                    \
        int64_t batch = index / p->heads, head = index % p->heads, dim = p->head_dim, total = p->batch * p->rows_q * p->heads; \
        real *acc = (real *)(void *)job->into;                                                                                 \
        const real *acc2 = (const real *)(const void *)job->from;                                                              \
        real *m = acc + total * dim, *l = m + total;                                                                           \
        const real *m2 = acc2 + total * dim, *l2 = m2 + total;                                                                 \
        (void)worker;                                                                                                          \
        for (int64_t row = 0; row < p->rows_q; row++) {                                                                        \
            int64_t at = index * p->rows_q + row, start = ((batch * p->rows_q + row) * p->heads + head) * dim;                 \
            if (ra_state_empty((double)m2[at], (double)l2[at])) continue; /* nothing to add */                                 \
            bool empty = ra_state_empty((double)m[at], (double)l[at]);                                                         \
            real top = m2[at] > m[at] ? m2[at] : m[at];                                                                        \
            real one = m[at] == top ? 1 : exponential(m[at] - top), two = m2[at] == top ? 1 : exponential(m2[at] - top);       \
            for (int64_t d = 0; d < dim; d++) acc[start + d] = (empty ? 0 : acc[start + d] * one) + acc2[start + d] * two;     \
            l[at] = l[at] * one + l2[at] * two;                                                                                \
            m[at] = top;                                                                                                       \
        }                                                                                                                      \
    }
MERGE_ROWS(merge_f32, float, expf)
MERGE_ROWS(merge_f64, double, exp)

ra_status ra_cpu_merge_states(const ra_queue *queue, const ra_problem *p, char *mine, const char *theirs) {
    merge job = {p, mine, theirs};
    ra_workers_run(queue->workers, p->batch * p->heads, p->dtype == RA_F64 ? merge_f64 : merge_f32, &job, NULL, NULL);
    return RA_OK;
}
