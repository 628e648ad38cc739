/* How the host starts a kernel family on a job. */
#ifndef RA_KERNELS_CUDA_LAUNCH_CUH
#define RA_KERNELS_CUDA_LAUNCH_CUH

#include "backend.h"
#include "job.cuh"

#include <cuda_runtime.h>
#include <stdio.h>

namespace ra {

/* `call` failed: the status for it, with its name and CUDA's words in error. */
ra_status cuda_failed(ra_cuda_error *error, const char *call, cudaError_t code);

#define RA_CUDA_TRY(error, call)                                                                                               \
    do {                                                                                                                       \
        cudaError_t code_ = (call);                                                                                            \
        if (code_ != cudaSuccess) return cuda_failed(error, #call, code_);                                                     \
    } while (0)

/* A compiled kernel: what it covers and what a launch of it takes. */
struct Variant {
    int dim, rows, keys; /* largest head_dim, query rows of a block, keys of a tile */
    int threads, shared;
    const void *kernel[2]; /* bf16, f16 */
};

/* The Hopper kernels. */
extern const Variant sm90_d64, sm90_d96, sm90_d128, sm90_d192, sm90_d256;

} // namespace ra
#endif
