/* The CUDA kernels as the ring sees them. */
#ifndef RA_KERNELS_CUDA_LOADER_H
#define RA_KERNELS_CUDA_LOADER_H

#include "device/kernel.h"
#include "ringattn_cuda.h"

/* Tensors and scratch are device memory, `stream` a cudaStream_t. Steps are enqueued; nothing waits. When `single`, forward
 * writes the rows that no item meets too, so nothing needs to be filled before, but it must be called even without items. */
extern const ra_kernel ra_kernel_cuda;  /* whichever of the others is the fastest that takes a step */
extern const ra_kernel ra_kernel_sm90a; /* Hopper's */
extern const ra_kernel ra_kernel_sm80;  /* the general ones */

#endif
