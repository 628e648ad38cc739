/* Instances of the Ampere kernel, in files of their own so that they compile side by side. */
#ifndef RA_KERNELS_CUDA_SM80_VARIANT_CUH
#define RA_KERNELS_CUDA_SM80_VARIANT_CUH

#include "forward_sm80.cuh"
#include "launch.cuh"

namespace ra {

template <class S, bool Vectors> constexpr Variant sm80_of() {
    return {S::D,      S::ROWS,
            S::N,      S::THREADS,
            S::SHARED, {(const void *)&forward_sm80<bf16, S, Vectors>, (const void *)&forward_sm80<f16, S, Vectors>}};
}

} // namespace ra
#endif
