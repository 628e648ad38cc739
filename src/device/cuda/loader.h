/* The CUDA kernels as the ring sees them. */
#ifndef RA_DEVICE_CUDA_LOADER_H
#define RA_DEVICE_CUDA_LOADER_H

#include "device/device.h"
#include "ringattn_cuda.h"

/* Tensors and scratch are device memory, `stream` a cudaStream_t. Steps are enqueued; nothing waits. When `single`, forward
 * also writes the rows that no item meets: nothing needs to be filled before, but it must be called even without items. */
extern const ra_kernel ra_kernel_cuda;  /* whichever of the others is the fastest that takes a step */
extern const ra_kernel ra_kernel_sm90a; /* Hopper's */
extern const ra_kernel ra_kernel_sm80;  /* the general ones */

extern const ra_device_ops ra_cuda_device_ops; /* device.c */

/* Before the first step and after the last, of a pass that is not single: ra_rows_fill and ra_rows_finish (device/rows.h). */
ra_status ra_cuda_fill(const ra_forward_step *step);
ra_status ra_cuda_finish(const ra_forward_step *step);
/* Messages. */
ra_status ra_cuda_clear(void *memory, int64_t bytes, void *stream);
ra_status ra_cuda_pack(ra_dtype dtype, const ra_box *box, ra_tensor from, void *packed, void *stream);
ra_status ra_cuda_unpack_add(const ra_box *box, const void *packed, ra_tensor sums, void *stream);
ra_status ra_cuda_convert(const ra_problem *problem, ra_tensor to, ra_tensor sums, int64_t rows, int64_t heads, void *stream);
ra_status ra_cuda_add(void *sums, const void *more, int64_t count, void *stream);
ra_status ra_cuda_merge_states(const ra_problem *problem, void *mine, const void *theirs, void *stream);
ra_status ra_cuda_spoil(const ra_problem *problem, ra_tensor tensor, int64_t rows, int64_t heads, void *stream);
/* Copies beside a call: see ra_copy_ops. */
ra_status ra_cuda_open_first_stream(void **stream);
ra_status ra_cuda_reach(int gpu);
ra_status ra_cuda_record(void *stream, void **event);
ra_status ra_cuda_passed(void *event, bool *passed);
ra_status ra_cuda_export(void *memory, char handle[RA_HANDLE_BYTES]);
ra_status ra_cuda_import(const char handle[RA_HANDLE_BYTES], void **memory);
void ra_cuda_release(void *memory);
ra_status ra_cuda_share(void *counters, int64_t bytes);
void ra_cuda_unshare(void *counters);
ra_status ra_cuda_raise(void *stream, uint64_t *counter, uint64_t value);
ra_status ra_cuda_await(void *stream, uint64_t *counter, uint64_t value);
/* The file of the NCCL that goes with the device; NULL: none does. */
const char *ra_cuda_nccl(void);
extern const ra_net_ops ra_cuda_net_ops; /* nccl.c */
/* Is the stream being captured into a graph? */
bool ra_cuda_capturing(void *stream);

#endif
