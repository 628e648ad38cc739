/* Generated tensors: every element is a function of seed, tensor and global index alone, so each rank makes its own rows and
 * any number of ranks makes the same tensor. About normal, mean 0, variance 1. */
#ifndef CLI_DATA_H
#define CLI_DATA_H

#include "ringattn.h"

typedef enum data_tensor { DATA_Q, DATA_K, DATA_V, DATA_DOUT } data_tensor;

/* Elements first .. first + count - 1 of the C-order tensor [B, N, H, D], in the given dtype. */
void data_fill(uint64_t seed, data_tensor tensor, int64_t first, int64_t count, ra_dtype dtype, void *elements);

#endif
