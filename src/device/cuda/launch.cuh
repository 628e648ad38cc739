/* How the host makes jobs and starts kernels. */
#ifndef RA_KERNELS_CUDA_LAUNCH_CUH
#define RA_KERNELS_CUDA_LAUNCH_CUH

#include "backend.h"
#include "job.cuh"

#include <cuda_runtime.h>
#include <string.h>

namespace ra {

/* ---------------------------------------------------------------------------------------------------------------- errors */

/* `call` failed: the status for it, with its name and CUDA's words in error. */
ra_status cuda_failed(ra_cuda_error *error, const char *call, cudaError_t code);

#define RA_CUDA_TRY(error, call)                                                                                               \
    do {                                                                                                                       \
        cudaError_t code_ = (call);                                                                                            \
        if (code_ != cudaSuccess) return ra::cuda_failed(error, #call, code_);                                                 \
    } while (0)

/* ---------------------------------------------------------------------------------------------------------------- device */

struct Device {
    int id, major, minor, processors;
};

/* The current device, as the thread knows it from its last call. */
ra_status find_device(Device *device, ra_cuda_error *error);

struct Variant;

/* Raises the limit of shared memory to what a block of the kernel needs. */
ra_status raise_shared(const Variant *variant, const void *kernel, const Device &device, ra_cuda_error *error);

/* Is this the kernel that was asked for? */
inline bool wants(const char *wanted, const char *name) { return wanted && strcmp(wanted, name) == 0; }

/* ------------------------------------------------------------------------------------------------------------------ jobs */

/* Do all rows of t, elements of `size` bytes, start at multiples of `bytes`? */
bool aligned(const ra_tensor &t, int64_t size, int64_t bytes);

/* NULL, or why an item is beyond what the kernels count with. */
const char *check_item(const ra_item *item);

/* An empty job for batch entries first .. first + batch - 1: what all launches of a step have in common, tensors apart. */
void start_job(const ra_problem *p, bool single, Job *job, int64_t first, int64_t batch);

/* The same with the tensors of a forward step. */
void start_forward_job(const ra_forward_step *step, Job *job, int64_t first, int64_t batch);

/* An item for blocks of `block` rows, or keys (of all query heads of a group); append_item numbers its tiles. False: the job
 * has no room for them. */
JobItem job_item(const ra_problem *p, const ra_item *item, int64_t batch, int block);
JobItem key_job_item(const ra_problem *p, const ra_item *item, int64_t batch, int block);
bool append_item(Job *job, JobItem item);

/* Does every query of the item attend to all of its keys, as far as the mask goes? In a causal ring most items are so. No block
 * of such an item is heavier than another. */
bool unmasked(const JobItem &item);

/* Might two items meet the same query row (state, sums of dq), or the same sums of dk and dv? Then they must not run side by
 * side. */
bool rows_touch(const JobItem &a, const JobItem &b);
bool keys_touch(const ra_item &a, const ra_item &b);

/* (row, KV head) pairs of a batch entry that the items of a single step meet. *describable: fill_holes can tell the others. */
int64_t rows_met(const ra_forward_step *step, bool *describable);

/* --------------------------------------------------------------------------------------------------------------- kernels */

/* How fast a kernel is against the others for its head_dim, as measured (H200): its speed, and how many keys it could compute
 * in the pause between two tiles. */
struct Pace {
    float speed, pause;
};

/* A compiled kernel: what it covers and what a launch of it takes. */
struct Variant {
    int dim, rows, keys; /* largest head_dim, query rows of a block, keys of a tile */
    int threads, shared;
    const void *kernel[2];                   /* bf16, f16; f32 in the first */
    bool through = false;                    /* results are stored by TMA, too */
    Pace pace = {1, 0};                      /* where there is a choice */
    const void *few[2] = {nullptr, nullptr}; /* the same for jobs of no more than JOB_FEW items, or NULL */
};

/* Hopper: without and with dropout. */
extern const Variant sm90_d64[2], sm90_d96[2], sm90_d128[2], sm90_d192[2], sm90_d256[2];
/* Others without dropout: blocks of 256 rows instead of 192; of 128 rows. */
extern const Variant sm90_d64_rows256, sm90_d128_rows128;

/* Ampere and later: for rows that start at multiples of 16 bytes, and for any. */
extern const Variant sm80_d64[2], sm80_d128[2], sm80_d192[2], sm80_d256[2];

/* float32. */
extern const Variant f32_d64, f32_d128, f32_d256;

/* out = 0 and lse = -inf in all rows. */
ra_status launch_fill(const ra_forward_step *step, ra_cuda_error *error);

} // namespace ra
#endif
