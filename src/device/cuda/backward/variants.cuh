/* The general backward kernels, as they are compiled. */
#ifndef RA_DEVICE_CUDA_BACKWARD_VARIANTS_CUH
#define RA_DEVICE_CUDA_BACKWARD_VARIANTS_CUH

#include "device/cuda/backward/plain_job.cuh"
#include "device/cuda/launch.cuh"

namespace ra {

/* Variant.rows: own rows of a block, keys or queries; Variant.keys: rows of a tile. */
extern const Variant backward_keys_d64, backward_keys_d128, backward_keys_d256;
extern const Variant backward_queries_d64, backward_queries_d128, backward_queries_d256;
extern const Variant backward_keys_f32_d64, backward_keys_f32_d128, backward_keys_f32_d256;
extern const Variant backward_queries_f32_d64, backward_queries_f32_d128, backward_queries_f32_d256;

/* Where the gradients of an item's keys go. */
inline KeyGradients key_gradients(const ra_backward_step *step, const ra_item *item) {
    return step->single ? KeyGradients{item->dk_result, item->dv_result, false}
                        : KeyGradients{item->dk_view, item->dv_view, item->fresh};
}

/* Hopper's: NULL, or why it does not compute the problem; the scratch that it needs; and its launch (false: it does not take
 * the step). No two items of the step may add to the same rows. */
const char *beyond_sm90_backward(const ra_problem *p, const Device &device);
int64_t scratch_sm90_backward(const ra_problem *p);
bool launch_sm90_backward(const ra_backward_step *step, const Device &device, ra_status *status, ra_cuda_error *error);

} // namespace ra
#endif
