#include "device/state.h"

#include "core/dtype.h"

static bool is_narrow(const ra_problem *p) { return p->dtype == RA_BF16 || p->dtype == RA_F16; }

/* Bytes of a number for each query row and head. */
static int64_t numbers(const ra_problem *p) { return p->batch * p->rows_q * p->heads * ra_state_size(p->dtype); }

/* Row r lies at r dim / fold: of `fold` rows one is used, and it takes the room of all.
 *
 *     row       0 1 2 3 4 5 6 7 8      used: 1, 5; fold 4
 *     sums      . [ 1   ] [ 5   ]
 *
 * Rows still begin at multiples of four elements, as kernels like them. */
ra_tensor ra_sums_tensor(const ra_problem *p, const ra_used_rows *used, int64_t rows, int64_t heads, void *data) {
    int64_t fold = p->head_dim % 4 ? 1 : ra_gcd(used->modulus, p->head_dim / 4);
    if (fold == 1) return ra_tensor_bnhd(data, rows, heads, p->head_dim);
    int64_t head = (ra_ceil_div(rows, fold) + 1) * p->head_dim;
    return (ra_tensor){data, heads * head, p->head_dim / fold, head};
}

/* Bytes of an element of sums. */
static int64_t sums_size(const ra_pass_shape *s) { return s->halves ? 2 : ra_state_size(s->problem->dtype); }

/* Bytes of sums apart from results. */
static int64_t sums_bytes(const ra_pass_shape *s, bool queries) {
    const ra_problem *p = s->problem;
    if (!is_narrow(p)) return 0;
    const ra_tensor sums = queries ? ra_sums_tensor(p, s->used_q, p->rows_q, p->heads, NULL)
                                   : ra_sums_tensor(p, s->used_k, s->rows_k, p->kv_heads, NULL);
    return ra_round_up(p->batch * sums.batch * sums_size(s), 64);
}

int64_t ra_forward_state_bytes(const ra_pass_shape *s) {
    const ra_problem *p = s->problem;
    if (s->single || s->travels) return 0;
    return sums_bytes(s, true) + 2 * ra_round_up(numbers(p), 64);
}

/* In a single pass, a direct kernel needs no room for sums. */
static int64_t gradient_bytes(const ra_pass_shape *s, bool queries) {
    return s->single && s->direct ? 0 : sums_bytes(s, queries);
}

int64_t ra_backward_state_bytes(const ra_pass_shape *s) {
    int64_t dq = s->travels ? 0 : gradient_bytes(s, true);
    return ra_round_up(numbers(s->problem), 64) + dq + 2 * gradient_bytes(s, false);
}

int64_t ra_travelling_bytes(const ra_problem *p, bool backward) { return numbers(p) * (p->head_dim + (backward ? 0 : 2)); }

/* at + bytes, also where both are zero (a call without rows has no memory at all). */
static char *past(char *at, int64_t bytes) { return bytes ? at + bytes : at; }

void ra_forward_lay(ra_forward_pass *pass) {
    const ra_problem *p = pass->shape.problem;
    ra_forward_step step = {.problem = p,
                            .single = pass->shape.single,
                            .closes = pass->shape.single,
                            .halves = pass->shape.halves && !pass->shape.single,
                            .q = pass->q,
                            .out = pass->out,
                            .lse = pass->lse,
                            .used = *pass->shape.used_q,
                            .stream = pass->queue.stream,
                            .workers = pass->queue.workers,
                            .scratch = pass->scratch,
                            .poll = pass->queue.poll,
                            .poll_arg = pass->queue.poll_arg};
    char *at = pass->state;
    if (pass->shape.travels) {
        step.used.count = 0; /* it holds all rows */
        step.acc = ra_tensor_bnhd(pass->travelling, p->rows_q, p->heads, p->head_dim);
        step.m = ra_tensor_lse(pass->travelling + numbers(p) * p->head_dim, p->rows_q, p->heads);
        step.l = ra_tensor_lse(pass->travelling + numbers(p) * (p->head_dim + 1), p->rows_q, p->heads);
    } else if (!step.single) {
        int64_t sums = sums_bytes(&pass->shape, true);
        step.acc = sums ? ra_sums_tensor(p, pass->shape.used_q, p->rows_q, p->heads, at) : pass->out;
        step.m = ra_tensor_lse(at = past(at, sums), p->rows_q, p->heads);
        step.l = ra_tensor_lse(past(at, ra_round_up(numbers(p), 64)), p->rows_q, p->heads);
    }
    pass->step = step;
}

void ra_backward_lay(ra_backward_pass *pass) {
    const ra_pass_shape *s = &pass->shape;
    const ra_problem *p = s->problem;
    int64_t rows = gradient_bytes(s, true), keys = gradient_bytes(s, false);
    char *at = pass->state;
    ra_backward_step step = {.problem = p,
                             .single = s->single,
                             .halves = s->halves,
                             .q = pass->q,
                             .dout = pass->dout,
                             .lse = pass->lse,
                             .dq = pass->dq,
                             .dq_acc = pass->dq,
                             .delta = ra_tensor_lse(at, p->rows_q, p->heads),
                             .stream = pass->queue.stream,
                             .workers = pass->queue.workers,
                             .scratch = pass->scratch,
                             .poll = pass->queue.poll,
                             .poll_arg = pass->queue.poll_arg};
    at = past(at, ra_round_up(numbers(p), 64));
    if (s->travels) {
        step.dq_acc = ra_tensor_bnhd(pass->travelling, p->rows_q, p->heads, p->head_dim);
    } else if (rows) {
        step.dq_acc = ra_sums_tensor(p, s->used_q, p->rows_q, p->heads, at);
        at = past(at, rows);
    }
    pass->dk_sums = keys ? ra_sums_tensor(p, s->used_k, s->rows_k, p->kv_heads, at) : pass->dk;
    pass->dv_sums = keys ? ra_sums_tensor(p, s->used_k, s->rows_k, p->kv_heads, past(at, keys)) : pass->dv;
    pass->sums_size = sums_size(s);
    pass->step = step;
}

/* ----------------------------------------------------------------------------------------------------- begin and end */

/* (row, head) pairs of used queries (keys). */
static int64_t count_used(const ra_pass_shape *shape, const ra_used_rows *used, bool queries) {
    const ra_problem *p = shape->problem;
    if (used->count > 0) return ra_used_count(used->sets, used->count);
    return queries ? p->rows_q * p->heads : shape->rows_k * p->kv_heads;
}

/* Those that items meet, if no two of them meet the same. */
static int64_t count_met(const ra_problem *p, const ra_item *items, int64_t count, bool queries) {
    int64_t met = 0;
    for (const ra_item *item = items; item < items + count; item++)
        met += (queries ? item->q.count * (p->heads / p->kv_heads) : item->k.count) * item->heads.count * item->loop[0].repeat *
               item->loop[1].repeat;
    return met;
}

bool ra_meet_all(const ra_pass_shape *s, const ra_item *items, int64_t count, bool queries) {
    const int64_t met = count_met(s->problem, items, count, queries),
                  steps = s->parted ? count_used(s, queries ? s->used_q : s->used_k, queries) : 0;
    return met + steps == count_used(s, queries ? s->all_q : s->all_k, queries);
}

/* Will the kernel write every used row of all gradients? Where an item has no pair for a row it may leave that as it is. Of a
 * parted pass the rows that steps meet are written from sums. */
static bool writes_all(const ra_pass_shape *shape, const ra_item *items, int64_t count) {
    bool whole = shape->single || shape->parted;
    for (int64_t i = 0; i < count && whole; i++) whole = ra_item_whole(shape->problem, &items[i]);
    return whole && ra_meet_all(shape, items, count, true) && ra_meet_all(shape, items, count, false);
}

ra_status ra_backward_begin(ra_backward_pass *pass, const ra_item *items, int64_t count) {
    const ra_pass_shape *s = &pass->shape;
    const ra_problem *p = s->problem;
    pass->step.zeroed = !writes_all(s, items, count);
    pass->rows = (ra_backward_rows){.problem = p,
                                    .single = s->single,
                                    .zeroed = pass->step.zeroed,
                                    .halves = s->halves,
                                    .gradients = {{pass->dq, pass->step.dq_acc, p->rows_q, p->heads, *s->used_q, *s->all_q},
                                                  {pass->dk, pass->dk_sums, s->rows_k, p->kv_heads, *s->used_k, *s->all_k},
                                                  {pass->dv, pass->dv_sums, s->rows_k, p->kv_heads, *s->used_k, *s->all_k}},
                                    .dout = pass->dout,
                                    .out = pass->out,
                                    .dlse = pass->dlse,
                                    .delta = pass->step.delta,
                                    .used = *s->all_q,
                                    .stream = pass->queue.stream,
                                    .workers = pass->queue.workers};
    if (s->travels) pass->rows.gradients[0].used.count = 0; /* it holds all rows */
    return pass->kernel->backward_begin(&pass->rows);
}

ra_status ra_backward_run(ra_backward_pass *pass, const ra_item *items, int64_t count) {
    pass->step.items = items;
    pass->step.item_count = count;
    return count ? pass->kernel->backward(&pass->step) : RA_OK;
}

ra_status ra_backward_end(ra_backward_pass *pass) { return pass->kernel->backward_end(&pass->rows); }
