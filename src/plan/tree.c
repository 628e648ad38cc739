#include "plan/tree.h"

#include "core/size.h"

int ra_tree_child(const ra_tree *t, int i) {
    int child = t->ranks;
    if (t->shape == RA_SCHEDULE_RING && i == 0) child = t->rank + 1;
    if (t->shape == RA_SCHEDULE_GATHER && t->rank == 0) child = i + 1;
    if (t->shape == RA_SCHEDULE_MERGE && i < 30 && t->rank % (2 << i) == 0) child = t->rank + (1 << i);
    return child < t->ranks ? child : -1;
}

int ra_tree_parent(const ra_tree *t) {
    if (t->shape == RA_SCHEDULE_RING) return t->rank - 1;
    if (t->shape == RA_SCHEDULE_GATHER) return 0;
    return t->rank & (t->rank - 1); /* without the lowest bit */
}

int64_t ra_tree_bytes(const ra_tree *t, int64_t block) {
    int children = 0;
    while (ra_tree_child(t, children) >= 0) children++;
    return ra_sat_mul(children + (t->rank > 0), block);
}
