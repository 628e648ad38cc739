#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d128_brief = sm90_of<Shape<128, 64, 3, 3>>();
} // namespace ra
