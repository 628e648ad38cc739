/* The plan of a call whose tensors lie in host memory: how long its blocks are, and what lies on the device. */
#include <inttypes.h>
#include <stdio.h>

#include "core/dtype.h"
#include "core/status.h"
#include "plan/plan.h"

/* A block of q is large enough to keep a GPU's tiles busy at this many bytes, and the sequence has some blocks, so that copies
 * run beside steps. The time of a stage grows with the square of a block's rows, that of its copies with the rows: at the rates
 * of an H200 they are equal at 10,000 rows forward and 17,000 backward, where sums come and go, too. Blocks have some times as
 * many rows, or copies would not be hidden where steps are shorter, as under a causal mask. */
#define BLOCK_BYTES ((int64_t)256 << 20)
#define FEW_BLOCKS 8
static const int64_t least_rows[2] = {32768, 65536};

static int64_t usual_rows(const ra_config *c, bool backward) {
    const int64_t row = ra_max(1, c->batch * c->heads * c->head_dim * (int64_t)ra_dtype_size(c->dtype));
    const int64_t some = ra_ceil_div(ra_max(c->seq_q, c->seq_k), FEW_BLOCKS);
    return ra_min(ra_max(least_rows[backward], some), ra_max(256, BLOCK_BYTES / row / 256 * 256));
}

/* Of a block of so many rows. */
static ra_workspace workspace_of(const ra_plan *plan, int64_t rows_q, int64_t rows_k, bool backward) {
    const ra_config *c = &plan->config;
    const ra_device_ops *device = plan->kernel->device;
    const ra_used_rows all = {.modulus = 1};
    ra_problem problem = plan->problem;
    problem.rows_q = rows_q;
    problem.keys = rows_k;
    const ra_pass_shape shape = {.problem = &problem,
                                 .used_q = &all,
                                 .used_k = &all,
                                 .all_q = &all,
                                 .all_k = &all,
                                 .direct = plan->kernel->direct};
    const int64_t q = c->batch * rows_q * c->heads, k = c->batch * rows_k * c->kv_heads * c->head_dim,
                  state = ra_state_size(c->dtype), size = (int64_t)ra_dtype_size(c->dtype);
    ra_workspace w = {.state = (backward ? device->backward_bytes : device->forward_bytes)(&shape),
                      .scratch = (backward ? plan->kernel->backward_scratch : plan->kernel->forward_scratch)(&problem, 1)};
    for (int i = 0; i < 2; i++) {
        w.queries[i] = (backward ? 4 : 2) * ra_round_up(q * c->head_dim * size, 64) + /* q, out; dout, dq */
                       (backward ? 2 : 1) * ra_round_up(q * state, 64);               /* lse; dlse */
        w.kv[i] = 2 * ra_round_up(k * size, 64);
        w.grad[i] = backward ? 2 * ra_round_up(k * state, 64) : 0;
    }
    const int64_t parts[] = {w.state, w.scratch, w.queries[0], w.queries[1], w.kv[0], w.kv[1], w.grad[0], w.grad[1]};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) w.total += ra_round_up(parts[i], 64);
    return w;
}

static ra_status cut(ra_plan *plan, bool backward, ra_workspace *w, ra_blocks *blocks) {
    const ra_config *c = &plan->config;
    for (int64_t rows = c->bucket > 0 ? c->bucket : usual_rows(c, backward);; rows = ra_ceil_div(rows, 2)) {
        const int64_t count = ra_max(1, ra_ceil_div(ra_max(c->seq_q, c->seq_k), rows));
        *w = workspace_of(plan, ra_ceil_div(c->seq_q, count), ra_ceil_div(c->seq_k, count), backward);
        if (c->memory_limit == 0 || w->total <= c->memory_limit) return ra_blocks_create(&plan->arena, c, rows, blocks);
        if (c->bucket > 0 || rows == 1 || count > RA_MAX_BLOCKS)
            return ra_fail(RA_NOMEM,
                           "blocks of %" PRId64 " rows need %" PRId64 " bytes, and memory_limit allows %" PRId64,
                           rows, w->total, c->memory_limit);
    }
}

ra_status ra_plan_offload(ra_plan *plan, int ranks) {
    const ra_config *c = &plan->config;
    if (ranks > 1) return ra_fail(RA_NOT_AVAILABLE, "offload is for one rank, and there are %d", ranks);
    RA_TRY(cut(plan, false, &plan->forward, &plan->blocks[0]));
    const ra_status backward = cut(plan, true, &plan->backward, &plan->blocks[1]);
    if (backward == RA_NOMEM && c->memory_limit > 0) plan->no_backward = "its blocks do not fit the memory limit";
    else RA_TRY(backward);
    snprintf(plan->reason, sizeof plan->reason,
             "offload: tensors stay in host memory, and %d block%s of at most %" PRId64 " rows pass through the %s",
             plan->blocks[0].count, plan->blocks[0].count == 1 ? "" : "s", plan->blocks[0].rows, plan->kernel->device->name);
    return RA_OK;
}
