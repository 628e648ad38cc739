#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d128[] = {sm90_with_few<Shape<128, 64, 3, 4>>({1.05f, 120}), sm90_of<Shape<128, 128, 2, 2, true>>()};
} // namespace ra
