#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d192[] = {sm90_of<Shape<192, 96, 2, 2>>(), sm90_of<Shape<192, 96, 2, 2, true>>()};
} // namespace ra
