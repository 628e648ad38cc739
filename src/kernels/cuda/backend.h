/* What libringattn_cuda.so offers to the library, which loads it on demand. Nothing here needs CUDA's headers. Every function
 * returns RA_OK or a status, and then `error` says which call failed and why. */
#ifndef RA_KERNELS_CUDA_BACKEND_H
#define RA_KERNELS_CUDA_BACKEND_H

#include "kernels/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RA_CUDA_BACKEND_VERSION 1

typedef struct ra_cuda_error {
    char text[256];
} ra_cuda_error;

RA_API int ra_cuda_backend_version(void);

/* RA_OK when the current device can run the kernels; RA_NOT_AVAILABLE says why not. name[64] may be NULL. */
RA_API ra_status ra_cuda_backend_probe(char *name, ra_cuda_error *error);

/* Device bytes that ra_forward_step.scratch points to. */
#define RA_CUDA_SCRATCH 256

/* Enqueues one forward step. All tensors are device memory; items, problem and key ranges are host memory and are read before it
 * returns. When `single`, rows that no item meets are filled too: out = 0, lse = -inf. *path, if not NULL, is set to the
 * name of the kernel that ran ("sm90", "sm80", "f32"; static). */
RA_API ra_status ra_cuda_backend_forward(const ra_forward_step *step, const char **path, ra_cuda_error *error);

/* NULL if the kernels compute this problem, else why not. */
RA_API const char *ra_cuda_backend_unsupported(const ra_problem *problem);

#ifdef __cplusplus
}
#endif
#endif
