/* The CUDA kernels as the ring sees them. */
#ifndef RA_DEVICE_CUDA_LOADER_H
#define RA_DEVICE_CUDA_LOADER_H

#include "device/device.h"
#include "ringattn_cuda.h"

/* Tensors and scratch are device memory, `stream` a cudaStream_t. Steps are enqueued; nothing waits. When `single`, forward
 * writes the rows that no item meets too, so nothing needs to be filled before, but it must be called even without items. */
extern const ra_kernel ra_kernel_cuda;  /* whichever of the others is the fastest that takes a step */
extern const ra_kernel ra_kernel_sm90a; /* Hopper's */
extern const ra_kernel ra_kernel_sm80;  /* the general ones */

extern const ra_device_ops ra_cuda_device_ops; /* device.c */

/* Before the first step and after the last, of a pass that is not single: ra_rows_fill and ra_rows_finish (device/rows.h). */
ra_status ra_cuda_fill(const ra_forward_step *step);
ra_status ra_cuda_finish(const ra_forward_step *step);
/* Is the stream being captured into a graph? */
bool ra_cuda_capturing(void *stream);

#endif
