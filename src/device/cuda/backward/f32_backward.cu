#include "device/cuda/backward/f32.cuh"
#include "device/cuda/backward/variants.cuh"

namespace ra {

template <class S> constexpr Variant keys_of() {
    return {S::D, S::OWN, S::TILE, S::THREADS, S::SHARED, {(const void *)&backward_keys_f32<S>, nullptr}};
}
template <class S> constexpr Variant queries_of() {
    return {S::D, S::OWN, S::TILE, S::THREADS, S::SHARED, {(const void *)&backward_queries_f32<S>, nullptr}};
}

const Variant backward_keys_f32_d64 = keys_of<SingleBackward<64, 4, 2>>();
const Variant backward_keys_f32_d128 = keys_of<SingleBackward<128, 2, 2>>();
const Variant backward_keys_f32_d256 = keys_of<SingleBackward<256, 1, 1>>();
const Variant backward_queries_f32_d64 = queries_of<SingleBackward<64, 4, 2>>();
const Variant backward_queries_f32_d128 = queries_of<SingleBackward<128, 2, 2>>();
const Variant backward_queries_f32_d256 = queries_of<SingleBackward<256, 1, 1>>();

} // namespace ra
