#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d128_low = sm90_of<Shape<128, 128, 2, 2>>({1, 230});
} // namespace ra
