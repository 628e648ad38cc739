#include "sm80_variant.cuh"

namespace ra {
const Variant sm80_d256[] = {sm80_of<Plain<256, 1, 32>, true>(), sm80_of<Plain<256, 1, 32>, false>()};
} // namespace ra
