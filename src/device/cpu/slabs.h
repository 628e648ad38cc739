/* The slabs of an item, by number: batch entries and KV heads within the iterations of its loops. */
#ifndef RA_DEVICE_CPU_SLABS_H
#define RA_DEVICE_CPU_SLABS_H

#include "device/cpu/step.h"

static inline int64_t ra_slabs(const ra_problem *problem, const ra_item *item) {
    if (item->q.count <= 0 || item->k.count < 0) return 0;
    return item->loop[0].repeat * item->loop[1].repeat * problem->batch * item->heads.count;
}

static inline ra_slab ra_slab_number(const ra_problem *problem, const ra_item *item, int64_t index) {
    ra_slab p = {.problem = problem, .item = item, .q = item->q, .k = item->k, .origin = item->origin};
    p.kv_index = index % item->heads.count;
    index /= item->heads.count;
    p.batch = index % problem->batch;
    index /= problem->batch;
    const int64_t iteration[2] = {index / item->loop[1].repeat, index % item->loop[1].repeat};
    for (int i = 0; i < 2; i++) {
        const ra_item_loop *loop = &item->loop[i];
        p.q.row += iteration[i] * loop->q_row;
        p.q.pos += iteration[i] * loop->q_pos;
        p.k.row += iteration[i] * loop->k_row;
        p.k.pos += iteration[i] * loop->k_pos;
        p.origin += iteration[i] * loop->origin;
    }
    p.group = problem->heads / problem->kv_heads;
    p.head = (item->heads.start + p.kv_index * item->heads.step) * p.group;
    return p;
}

#endif
