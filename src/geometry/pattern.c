#include "geometry/pattern.h"

ra_span ra_branch_heads(const ra_config *c, int64_t branch) {
    if (c->combine == RA_COMBINE_MIX) return (ra_span){0, 1, c->kv_heads};
    int64_t share = c->kv_heads / c->branches, longer = c->kv_heads % c->branches;
    return (ra_span){branch * share + ra_min(branch, longer), 1, share + (branch < longer)};
}

int64_t ra_class_bound(const ra_config *c) {
    int64_t bound = 0;
    for (int64_t i = 0; i < c->branches; i++) bound += ra_min(c->rate[i], ra_branch_heads(c, i).count);
    return bound;
}

int64_t ra_classes(const ra_config *c, ra_class *classes) {
    int64_t count = 0;
    for (int64_t i = 0; i < c->branches; i++) {
        int64_t rate = c->rate[i];
        ra_span heads = ra_branch_heads(c, i);
        ra_class class = {.branch = i, .segment = c->segment[i], .rate = rate, .heads = heads};
        switch (c->offset) {
        case RA_OFFSET_BRANCH:
            class.offset = i % rate;
            classes[count++] = class;
            break;
        case RA_OFFSET_RESIDUE:
            class.residue = rate > 1; /* a single residue is a lattice like any other */
            classes[count++] = class;
            break;
        case RA_OFFSET_HEAD: /* heads g, g + rate, ... share an offset */
            for (int64_t h = 0; h < ra_min(rate, heads.count); h++) {
                int64_t g = heads.start + h;
                class.offset = g % rate;
                class.heads = (ra_span){g, rate, (heads.count - h - 1) / rate + 1};
                classes[count++] = class;
            }
            break;
        case RA_OFFSET_HEAD_BLOCK: { /* blocks of consecutive heads share one */
            int64_t block = ra_ceil_div(c->kv_heads, rate), end = heads.start + heads.count;
            for (int64_t g = heads.start; g < end;) {
                int64_t next = ra_min(end, (g / block + 1) * block);
                class.offset = g / block;
                class.heads = (ra_span){g, 1, next - g};
                classes[count++] = class;
                g = next;
            }
            break;
        }
        }
    }
    return count;
}

/* Everything below the segment's end; a class with segment 0 has one segment without ends. */
static ra_span lattice(const ra_class *class, int64_t origin, int64_t first, int64_t end) {
    if (class->segment > 0) {
        first = ra_max(first, origin);
        end = ra_min(end, origin + class->segment);
    }
    if (class->residue) return (ra_span){first, 1, ra_max(0, end - first)};
    int64_t start = first + ra_mod(origin + class->offset - first, class->rate);
    return (ra_span){start, class->rate, start < end ? (end - 1 - start) / class->rate + 1 : 0};
}

ra_span ra_lattice_keys(const ra_config *c, const ra_class *class, int64_t origin) {
    return lattice(class, origin, 0, c->seq_k);
}

ra_span ra_lattice_queries(const ra_config *c, const ra_class *class, int64_t origin) {
    ra_class all = *class;
    if (!c->dilate_queries) all.residue = true; /* every query of the segment, on the lattice or not */
    if (class->residue) all.residue = true;
    return lattice(&all, origin, ra_query_shift(c), c->seq_k);
}
