#include "sm80_variant.cuh"

namespace ra {
const Variant sm80_d64[] = {sm80_of<Plain<64, 1, 64>, true>(), sm80_of<Plain<64, 1, 64>, false>()};
} // namespace ra
