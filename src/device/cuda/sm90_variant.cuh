/* Instances of the Hopper kernel, in files of their own so that they compile side by side. */
#ifndef RA_KERNELS_CUDA_SM90_VARIANT_CUH
#define RA_KERNELS_CUDA_SM90_VARIANT_CUH

#include "forward_sm90.cuh"
#include "launch.cuh"

namespace ra {

template <class S> constexpr Variant sm90_of(Pace pace = {1, 0}) {
    const void *const bf16_kernel = (const void *)&forward_sm90<bf16, S, TmaJob>;
    const void *const f16_kernel = (const void *)&forward_sm90<f16, S, TmaJob>;
    return {S::D, S::ROWS, S::N, S::THREADS, shared_bytes<S>(), {bf16_kernel, f16_kernel}, S::THROUGH, pace};
}

/* And kernels for few items. */
template <class S> constexpr Variant sm90_with_few(Pace pace) {
    Variant v = sm90_of<S>(pace);
    v.few[0] = (const void *)&forward_sm90<bf16, S, FewTmaJob>;
    v.few[1] = (const void *)&forward_sm90<f16, S, FewTmaJob>;
    return v;
}

} // namespace ra
#endif
