/* What happens to gradients before the first backward step and after the last, on the CPU. */
#include "core/dtype.h"
#include "device/cpu/cpu.h"
#include "device/rows.h"

static bool sums_apart(const ra_gradient *g) { return g->sums.data != g->result.data; }

static void start(const ra_backward_rows *r, const ra_gradient *g) {
    const ra_used_rows all = {0};
    const ra_dtype dtype = r->problem->dtype;
    if (r->single && !r->zeroed)
        ra_rows_fill_gaps(r->problem, r->workers, &g->used, g->result, (ra_tensor){0}, g->rows, g->heads);
    else if (r->single || !sums_apart(g))
        ra_rows_zero(r->problem, r->workers, &all, g->result, (int64_t)ra_dtype_size(dtype), g->rows, g->heads);
    else ra_rows_zero(r->problem, r->workers, &g->used, g->sums, r->halves ? 2 : ra_state_size(dtype), g->rows, g->heads);
    if (!r->single && r->halves) ra_rows_zero(r->problem, r->workers, &g->used, g->result, 2, g->rows, g->heads);
}

ra_status ra_cpu_backward_begin(const ra_backward_rows *r) {
    for (int i = 0; i < 3; i++) start(r, &r->gradients[i]);
    ra_rows_delta(r->problem, r->workers, &r->used, r->dout, r->out, r->dlse, r->delta, r->problem->rows_q, r->problem->heads);
    return RA_OK;
}

ra_status ra_cpu_backward_end(const ra_backward_rows *r) {
    for (int i = 0; i < 3 && !r->single; i++) {
        const ra_gradient *g = &r->gradients[i];
        if (sums_apart(g)) ra_rows_convert(r->problem, r->workers, &g->used, r->halves, g->result, g->sums, g->rows, g->heads);
    }
    return RA_OK;
}
