#include "forward_f32.cuh"
#include "launch.cuh"

namespace ra {

template <class S> constexpr Variant f32_of() {
    return {S::D, S::ROWS, S::N, S::THREADS, S::SHARED, {(const void *)&forward_f32<S>, nullptr}};
}

const Variant f32_d64 = f32_of<Single<64, 4, 4>>();
const Variant f32_d128 = f32_of<Single<128, 4, 4>>();
const Variant f32_d256 = f32_of<Single<256, 2, 2>>();

} // namespace ra
