/* Hopper's backward kernel, as it is compiled for each head dimension. */
#ifndef RA_DEVICE_CUDA_BACKWARD_SM90_VARIANT_CUH
#define RA_DEVICE_CUDA_BACKWARD_SM90_VARIANT_CUH

#include "device/cuda/backward/sm90.cuh"
#include "device/cuda/launch.cuh"

namespace ra {

/* Variant.rows: query rows of a block; Variant.keys: keys of a tile. `define` runs after the kernel. */
struct BackVariant : Variant {
    const void *define[2]; /* bf16, f16 */
    int parts;             /* of dQ of a block */
};
template <class S> static constexpr BackVariant back_variant() {
    return {{S::D, S::QUERIES, S::KEYS, S::THREADS, back_shared_bytes<S>(),
             {(const void *)&backward_sm90<bf16, S>, (const void *)&backward_sm90<f16, S>}},
            {(const void *)&define_sm90<bf16, S>, (const void *)&define_sm90<f16, S>},
            S::PARTS};
}

/* Those that add to sums, and those that write the results of a single step. */
extern const BackVariant sm90_backward_d192[2], sm90_backward_d256[2];

} // namespace ra
#endif
