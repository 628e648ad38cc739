/* Instances of the Hopper kernel, in files of their own so that they compile side by side. */
#ifndef RA_KERNELS_CUDA_SM90_VARIANT_CUH
#define RA_KERNELS_CUDA_SM90_VARIANT_CUH

#include "forward_sm90.cuh"
#include "launch.cuh"

namespace ra {

template <class S> constexpr Variant sm90_of(Pace pace = {1, 0}) {
    return {S::D,       S::ROWS,           S::N,
            S::THREADS, shared_bytes<S>(), {(const void *)&forward_sm90<bf16, S>, (const void *)&forward_sm90<f16, S>},
            pace};
}

} // namespace ra
#endif
