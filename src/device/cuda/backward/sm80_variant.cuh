/* Instances of the general backward kernels, in files of their own so that they compile side by side. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM80_VARIANT_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM80_VARIANT_CUH

#include "device/cuda/backward/variants.cuh"
#include "device/cuda/backward/sm80.cuh"

namespace ra {

template <class S> constexpr Variant keys_of() {
    return {S::D,      S::OWN,
            S::TILE,   S::THREADS,
            S::SHARED, {(const void *)&backward_keys_sm80<bf16, S>, (const void *)&backward_keys_sm80<f16, S>}};
}

template <class S> constexpr Variant queries_of() {
    return {S::D,      S::OWN,
            S::TILE,   S::THREADS,
            S::SHARED, {(const void *)&backward_queries_sm80<bf16, S>, (const void *)&backward_queries_sm80<f16, S>}};
}

} // namespace ra
#endif
