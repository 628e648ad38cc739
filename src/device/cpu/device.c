/* The CPU as a device: what comes before the first step of a pass and after the last. */
#include "device/cpu/device.h"

#include "device/cpu/messages.h"
#include "device/rows.h"
#include "device/state.h"

static const void *owner(const ra_queue *queue) {
    (void)queue;
    return NULL;
}

static bool recording(const ra_queue *queue) {
    (void)queue;
    return false;
}

/* -------------------------------------------------------------------------------------------------------- forward */

static ra_status forward_begin(ra_forward_pass *pass, const ra_item *items, int64_t count) {
    const ra_forward_step *s = &pass->step;
    const ra_problem *p = pass->shape.problem;
    if (s->single && ra_meet_all(&pass->shape, items, count, true)) /* the kernel writes all used rows */
        ra_rows_fill_gaps(p, s->workers, &s->used, s->out, s->lse, p->rows_q, p->heads);
    else ra_rows_fill(p, s->workers, &s->used, s->single, s->out, s->lse, s->m, s->l);
    return RA_OK;
}

static ra_status forward_step(ra_forward_pass *pass, const ra_item *items, int64_t count, bool last) {
    ra_forward_step *s = &pass->step;
    s->items = items;
    s->item_count = count;
    /* A last step with one item that meets all rows writes results itself, which saves a pass over all of memory. */
    s->closes =
        s->single || (last && pass->shape.used_q->count == 0 && count == 1 && ra_meet_all(&pass->shape, items, count, true));
    return count ? pass->kernel->forward(s) : RA_OK;
}

static ra_status forward_end(ra_forward_pass *pass) {
    const ra_forward_step *s = &pass->step;
    if (!s->closes) ra_rows_finish(s->problem, s->workers, &s->used, s->halves, s->acc, s->m, s->l, s->out, s->lse);
    return RA_OK;
}

const ra_device_ops ra_cpu_device = {
    .kind = RA_DEVICE_CPU,
    .name = "CPU",
    .by_workers = true,
    .halves = true,
    .zero = ra_cpu_zero,
    .owner = owner,
    .recording = recording,
    .forward_bytes = ra_forward_state_bytes,
    .backward_bytes = ra_backward_state_bytes,
    .travelling_bytes = ra_travelling_bytes,
    .forward_lay = ra_forward_lay,
    .backward_lay = ra_backward_lay,
    .forward_begin = forward_begin,
    .forward_step = forward_step,
    .forward_end = forward_end,
    .backward_begin = ra_backward_begin,
    .backward_step = ra_backward_run,
    .backward_end = ra_backward_end,
    .pack = ra_cpu_pack,
    .unpack_add = ra_cpu_unpack_add,
    .add = ra_cpu_add,
    .merge_states = ra_cpu_merge_states,
    .merge_sums = ra_cpu_merge_sums,
};
