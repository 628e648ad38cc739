#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d64[] = {sm90_with_few<Shape<64, 128, 3, 4>>({1, 150}), sm90_of<Shape<64, 96, 3, 4, true>>()};
} // namespace ra
