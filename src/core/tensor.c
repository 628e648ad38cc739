#include "ringattn.h"

ra_tensor ra_tensor_bnhd(void *data, int64_t rows, int64_t heads, int64_t dim) {
    return (ra_tensor){data, rows * heads * dim, heads * dim, dim};
}
ra_tensor ra_tensor_lse(void *data, int64_t rows, int64_t heads) { return (ra_tensor){data, heads * rows, 1, rows}; }
