#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d96[] = {sm90_of<Shape<96, 80, 3, 3>>(), sm90_of<Shape<96, 128, 2, 2, true>>()};
} // namespace ra
