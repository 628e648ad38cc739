#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d256[] = {sm90_of<Shape<256, 80, 2, 2>>(), sm90_of<Shape<256, 80, 2, 2, true>>()};
} // namespace ra
