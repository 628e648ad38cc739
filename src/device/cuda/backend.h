/* What libringattn_cuda.so offers to the library, which loads it on demand (loader.c). Nothing here needs CUDA's headers.
 * Functions return RA_OK, or a status while `error` says which call failed and why. Work is enqueued on `stream` (a
 * cudaStream_t; NULL: the default stream) of the current device. */
#ifndef RA_KERNELS_CUDA_BACKEND_H
#define RA_KERNELS_CUDA_BACKEND_H

#include "device/kernel.h"
#include "ringattn_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RA_CUDA_BACKEND_VERSION 3

typedef struct ra_cuda_error {
    char text[256];
} ra_cuda_error;

RA_API int ra_cuda_backend_version(void);

/* RA_OK when the current device can run the kernels; RA_NOT_AVAILABLE says why not. device may be NULL. */
RA_API ra_status ra_cuda_backend_probe(ra_cuda_device *device, ra_cuda_error *error);

/* The kernels, as --kernel and reports name them. */
#define RA_CUDA_ANY NULL      /* the fastest that takes the step */
#define RA_CUDA_SM90A "sm90a" /* Hopper's */
#define RA_CUDA_SM80 "sm80"   /* the general ones: float32 too, any strides */
#define RA_CUDA_F32 "f32"     /* the one of them for float32; not to be asked for */

/* NULL if the wanted kernel computes this problem on the current device, else why not. */
RA_API const char *ra_cuda_backend_unsupported(const ra_problem *problem, const char *wanted);

/* Device bytes that ra_forward_step.scratch points to; without, tiles are dealt round robin, which balances less well. */
#define RA_CUDA_SCRATCH 256

/* Enqueues one forward step. All tensors are device memory; items, problem and key ranges are host memory and are read before
 * it returns. When `single`, rows that no item meets are filled too: out = 0, lse = -inf. RA_NOT_AVAILABLE: the wanted kernel
 * does not take the step. *path, if not NULL, is set to the name of the kernel that ran (static). */
RA_API ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char *wanted, const char **path,
                                         ra_cuda_error *error);
/* ra_rows_fill and ra_rows_finish of device/rows.h, on the device. */
RA_API ra_status ra_cuda_backend_fill(const ra_problem *problem, bool single, ra_tensor out, ra_tensor lse, ra_tensor acc,
                                      ra_tensor m, ra_tensor l, void *stream, ra_cuda_error *error);
RA_API ra_status ra_cuda_backend_finish(const ra_problem *problem, ra_tensor acc, ra_tensor m, ra_tensor l, ra_tensor out,
                                        ra_tensor lse, void *stream, ra_cuda_error *error);

/* Device memory; may be called while a stream is being captured. */
RA_API ra_status ra_cuda_backend_alloc(int64_t bytes, void **memory, ra_cuda_error *error);
RA_API void ra_cuda_backend_free(void *memory);
/* Is the stream being captured into a graph? */
RA_API bool ra_cuda_backend_capturing(void *stream);
/* Either end may be host memory; pageable host memory makes it wait. */
RA_API ra_status ra_cuda_backend_copy(void *to, const void *from, int64_t bytes, void *stream, ra_cuda_error *error);
RA_API ra_status ra_cuda_backend_synchronize(void *stream, ra_cuda_error *error);
/* A moment on the stream; *event is made when NULL. Seconds between two moments; waits for the second. */
RA_API ra_status ra_cuda_backend_mark(void *stream, void **event, ra_cuda_error *error);
RA_API ra_status ra_cuda_backend_between(void *start, void *end, double *seconds, ra_cuda_error *error);
RA_API void ra_cuda_backend_forget(void *event);

#ifdef __cplusplus
}
#endif
#endif
