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

} // namespace ra
#endif
