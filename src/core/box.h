/* A box: rows of a tensor that a message holds. In the tensor they lie strided; packed, one after the other without gaps:
 *
 *     [batch][head][repeat][row][dim] */
#ifndef RA_CORE_BOX_H
#define RA_CORE_BOX_H

#include "core/span.h"

typedef struct ra_box {
    int64_t batch;
    ra_span heads;
    int64_t first;                /* row of the tensor */
    int64_t repeats, repeat_step; /* in rows of the tensor */
    int64_t rows, row_step;
    int64_t dim;
} ra_box;

static inline int64_t ra_box_elements(const ra_box *box) {
    return box->batch * box->heads.count * box->repeats * box->rows * box->dim;
}

#endif
